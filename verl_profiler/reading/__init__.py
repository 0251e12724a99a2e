"""Reading half: files in, events out."""
