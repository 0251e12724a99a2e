"""Start a program, and end it with everything that it started.

Ray and SGLang start processes in sessions of their own, which outlive a parent that is killed.  On
Linux this process asks to adopt such orphans (`PR_SET_CHILD_SUBREAPER`), so that they can be found
by their parents and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["Children"]

_PR_SET_CHILD_SUBREAPER = 36


class Children:
    """One started program and its descendants.

    Args:
        arguments: The command line.
        environment: Its whole environment.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = set(_descendants(os.getpid()))
        # A session of its own: Ctrl-C at the terminal reaches this process only, which then ends
        # the program in order.
        self.program = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def console(self) -> Iterable[bytes]:
        """The lines that the program and its descendants write, as they come."""
        return self.program.stdout or ()

    def living(self) -> list[int]:
        """Return the pids of the program and its descendants that have not ended."""
        return [pid for pid in _descendants(os.getpid()) if pid not in self._before]

    def interrupt(self, grace_s: float) -> None:
        """Ask the program to stop as Ctrl-C would, and wait for it."""
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.program.wait(grace_s)

    def end(self, grace_s: float = 5.0) -> None:
        """End what still lives: ask, wait, then kill."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace_s
            pids = self.living()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            while pids and time.monotonic() < deadline:
                time.sleep(0.05)
                self.program.poll()
                pids = self.living()
            if not pids:
                return


def _descendants(ancestor: int) -> list[int]:
    """Return the pids below a process, zombies left out; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; state and parent follow it.
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(entry.parent.name)] = int(parent)
    found = []
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above != ancestor:
            above = parents.get(above)
        if above == ancestor:
            found.append(pid)
    return found
