"""fedlora's Flower strategies."""
