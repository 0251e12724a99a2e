"""The contract of both halves: names, fields and files of events."""
