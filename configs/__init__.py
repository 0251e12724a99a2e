"""Hydra searches this package for the `profiler` and `rehearsal` groups; without this file it would not."""
