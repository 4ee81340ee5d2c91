"""Message schema: names, shapes, dtypes, fingerprints and their checks."""
