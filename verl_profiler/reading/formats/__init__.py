"""Files of other forms than the event files: one module for each."""
