"""Start a program, and stop it with all its descendants.

Ray and SGLang start processes in their own sessions, which outlive a killed parent.  On
Linux this process adopts such orphans (`PR_SET_CHILD_SUBREAPER`), so that it can find them
by their parent and stop them.
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
    """A started program and its descendants.

    Args:
        arguments: The command line.
        environment: Its complete environment.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = set(_descendants(os.getpid()))
        # A new session: Ctrl-C at the terminal reaches this process only, which then stops
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
        """The output lines of the program and its descendants."""
        return self.program.stdout or ()

    def living(self) -> list[int]:
        """Return the pids of the program and its descendants that are still running."""
        return [pid for pid in _descendants(os.getpid()) if pid not in self._before]

    def interrupt(self, grace_s: float) -> None:
        """Send SIGINT to the program, and wait for it."""
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.program.wait(grace_s)

    def end(self, grace_s: float = 5.0) -> None:
        """Stop all remaining processes: SIGTERM, wait, then SIGKILL."""
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
    """Return the pids of a process's descendants without zombies; empty without /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain any character; state and parent follow it.
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(entry.parent.name)] = int(parent)
    found: list[int] = []
    for pid in parents:
        above = parents.get(pid)
        while above is not None and above != ancestor:
            above = parents.get(above)
        if above == ancestor:
            found.append(pid)
    return found
