"""Attacks, canaries and lower bounds."""
