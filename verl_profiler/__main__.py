"""`python -m verl_profiler` runs the command `verl-profiler` with that Python."""

import sys

from verl_profiler.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
