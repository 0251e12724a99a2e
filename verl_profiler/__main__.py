"""`python -m verl_profiler` is the command `verl-profiler`, with the Python that is named."""

import sys

from verl_profiler.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
