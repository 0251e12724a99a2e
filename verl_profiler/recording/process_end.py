"""The ends of a process that recording must survive: exit, fork, SIGTERM, multiprocessing's children."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_installed = False


def install(stop: Callable[[str], None], forked: Callable[[], None]) -> None:
    """Install the hooks; a second call does nothing.

    Args:
        stop: Called with the reason (`exit`, `sigterm`) when the process ends.
        forked: Called in each forked child.
    """
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(stop, "exit")
    os.register_at_fork(after_in_child=forked)

    def on_sigterm(number: int, _frame: Any) -> None:
        stop("sigterm")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with contextlib.suppress(ValueError, OSError):
        # Only where nobody else handles it; Ray installs a handler of its own, then atexit runs.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, on_sigterm)


def stop_with_multiprocessing(owner: object, stop: Callable[[str], None]) -> None:
    """Stop in a child of multiprocessing, which ends without `atexit`; called in the forked child.

    Args:
        owner: Registered with multiprocessing, which holds it weakly.
        stop: Called with the reason when the child ends.
    """
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:

        def finalize(_owner: object) -> None:
            multiprocessing.Finalize(None, stop, args=("exit",), exitpriority=0)

        multiprocessing.register_after_fork(owner, finalize)
