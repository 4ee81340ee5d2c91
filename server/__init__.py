"""fedlora's Flower server."""
