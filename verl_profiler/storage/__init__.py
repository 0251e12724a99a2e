"""Copy a run to object storage by URL, while it grows."""
