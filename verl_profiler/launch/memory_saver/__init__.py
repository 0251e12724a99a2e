"""Memory-saver settings, translated into verl's configuration."""
