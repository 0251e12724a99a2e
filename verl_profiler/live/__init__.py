"""A running training, in the terminal."""
