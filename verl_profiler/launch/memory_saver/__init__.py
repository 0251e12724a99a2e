"""Flags of the memory saver, put into verl's configuration."""
