"""The driver's part, before training."""
