"""Lines on standard error while a large run is read."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from verl_profiler.cli.terminal import print_error
from verl_profiler.render.visible import visible

__all__ = ["Progress"]

# A command that takes less prints nothing; where standard error is no terminal, it has a line so often.
_QUIET_S = 5.0
_EVERY_S = 60.0
_ERASE = "\r\x1b[K"
_WIDTH = 79


class Progress:
    """Prints what is read: on a terminal in one line that is erased, else in a line a minute.

    Args:
        command: Its name.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._quiet_s = time.monotonic() + _QUIET_S
        self._next_s = time.monotonic() + _EVERY_S
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
                self._next_s = now_s + _EVERY_S
                print_error(f"verl-profiler {self._command}: reading: {what}")


def _terminal() -> TextIO | None:
    """Return standard error if it is a terminal, without the guard of control characters."""
    stream: TextIO = getattr(sys.stderr, "raw", sys.stderr)
    return stream if stream.isatty() else None
