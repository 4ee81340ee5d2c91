"""PAVE specifications and the dock."""
