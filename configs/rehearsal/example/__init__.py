"""Options of the `rehearsal` config group."""
