"""A fake of the parts of uni-agent that are probed, where the real one is not there; after its source."""
