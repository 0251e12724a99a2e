"""The interpreter tuned for a command that reads hundreds of thousands of rows and ends."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Generator

__all__ = ["quick_rows"]

# Switch interval of threads in s; Python's own is 5 ms.
_TURN_S = 1e-4


@contextlib.contextmanager
def quick_rows() -> Generator[None, None, None]:
    """Tune the interpreter for hundreds of thousands of rows.

    Garbage collection is off, because rows hold no cycles.  A short switch interval keeps a thread with
    a result from duckdb from waiting longer for the other thread than the query took.
    """
    enabled, interval_s = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if enabled:
            gc.enable()
