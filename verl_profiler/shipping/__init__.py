"""Bring event files from nodes' own disks to the driver's, and the run to object storage."""
