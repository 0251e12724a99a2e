"""One process's events, from the call to the file."""
