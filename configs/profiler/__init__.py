"""Options of the `profiler` config group."""
