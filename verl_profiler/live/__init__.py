"""A run that is still going on, in the terminal."""
