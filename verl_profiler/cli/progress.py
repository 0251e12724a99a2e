"""Lines on standard error while a large run is read."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from verl_profiler.cli.terminal import print_error
from verl_profiler.render.visible import visible

__all__ = ["Progress"]

_ERASE = "\r\x1b[K"
_WIDTH = 79


class Progress:
    """Prints what is read: on a terminal in one line that is erased, else in a line a minute.

    Args:
        command: Its name.
        quiet_s: A command that takes less prints nothing.
        every_s: Between two lines where standard error is no terminal.
    """

    def __init__(self, command: str, quiet_s: float = 5.0, every_s: float = 60.0) -> None:
        self._command = command
        self._every_s = every_s
        self._quiet_s = time.monotonic() + quiet_s
        self._next_s = time.monotonic() + every_s
        self._lock = threading.Lock()
        self._is_shown = False

    def __call__(self, what: str | None) -> None:
        """Show what begins, if the command takes long; None erases it, since what comes next may be the output."""
        now_s = time.monotonic()
        with self._lock:
            if not self._is_shown if what is None else now_s < self._quiet_s:
                return
            terminal = _terminal()
            if terminal is not None:
                self._is_shown = what is not None
                shown = "" if what is None else visible(f"reading: {what}")[:_WIDTH]
                terminal.write(_ERASE + shown)
                terminal.flush()
            elif now_s >= self._next_s:
                self._next_s = now_s + self._every_s
                print_error(f"verl-profiler {self._command}: reading: {what}")


def _terminal() -> TextIO | None:
    """Return standard error if it is a terminal, without the guard of control characters."""
    stream: TextIO = getattr(sys.stderr, "raw", sys.stderr)
    return stream if stream.isatty() else None
