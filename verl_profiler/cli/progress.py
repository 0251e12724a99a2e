"""Lines on standard error while a large run is read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from verl_profiler.cli.terminal import print_error
from verl_profiler.reading.progress import Watcher
from verl_profiler.render.visible import visible

__all__ = ["Progress"]

# A command that takes less prints nothing; where standard error is no terminal, it has a line so often.
_QUIET_S = 5.0
_EVERY_S = 60.0
_ERASE = "\r\x1b[K"
_WIDTH = 79


class Progress(Watcher):
    """Prints what is read: on a terminal in one line that is erased, else in a line a minute.

    Args:
        command: Its name.
        clock: Seconds, from any begin.
    """

    def __init__(self, command: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._command = command
        self._quiet_s = clock() + _QUIET_S
        self._next_s = clock() + _EVERY_S
        self._lock = threading.Lock()
        self._is_shown = False

    def began(self, what: str) -> None:
        """Show it, if the command takes long and the last line is old enough."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._quiet_s:
                return
            terminal = _terminal()
            if terminal is not None:
                terminal.write(_ERASE + visible(f"reading: {what}")[:_WIDTH])
                terminal.flush()
                self._is_shown = True
            elif now_s >= self._next_s:
                self._next_s = now_s + _EVERY_S
                print_error(f"verl-profiler {self._command}: reading: {what}")

    def ended(self) -> None:
        """Erase the line, since what comes next may be the output."""
        with self._lock:
            terminal = _terminal() if self._is_shown else None
            if terminal is not None:
                terminal.write(_ERASE)
                terminal.flush()
            self._is_shown = False


def _terminal() -> TextIO | None:
    """Return standard error if it is a terminal, without the guard of control characters."""
    stream: TextIO = getattr(sys.stderr, "raw", sys.stderr)
    return stream if stream.isatty() else None
