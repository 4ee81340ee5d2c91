"""Local private mechanisms: per-record gradients, clip, noise, direction, update."""
