"""Captures of nsys and torch: planned, taken, gathered."""
