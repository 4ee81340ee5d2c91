"""Frames, tangent projection, norms, retraction, products, Procrustes."""
