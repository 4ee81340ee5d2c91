"""RayGrid: Flower's Grid on Ray actors; sweeps."""
