"""fedlora's Flower client."""
