"""How a callable of the host is wrapped."""
