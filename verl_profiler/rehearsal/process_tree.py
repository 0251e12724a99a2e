"""Start a program, and stop it with all its descendants.

Ray and SGLang start processes in their own sessions, which outlive a killed parent.  On
Linux this process adopts such orphans (`PR_SET_CHILD_SUBREAPER`), so that it can find them
by their parent and stop them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

_PR_SET_CHILD_SUBREAPER = 36


class Children:
    """A started program and its descendants.

    Args:
        arguments: The command line.
        environment: Its complete environment.
        output: Takes what it and its descendants print.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
    ) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Of the environment of a rehearsal: verl needs accelerate, which needs it.
        self._psutil: Any = importlib.import_module("psutil")
        self._before: list[Any] = []
        self._before = self.living()
        # A new session: Ctrl-C at the terminal reaches this process only, which then stops
        # the program in order.
        self.program = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def living(self) -> list[Any]:
        """Return the program and its descendants, as far as they are still running."""
        found: list[Any] = []
        for process in self._psutil.Process().children(recursive=True):
            with contextlib.suppress(self._psutil.NoSuchProcess):
                if process.status() != self._psutil.STATUS_ZOMBIE and process not in self._before:
                    found.append(process)
        return found

    def interrupt(self, grace_s: float) -> None:
        """Send SIGINT to the program, and wait for it."""
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.program.wait(grace_s)

    def end(self, grace_s: float = 5.0) -> None:
        """Stop all remaining processes: SIGTERM, wait, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            processes = self.living()
            for process in processes:
                with contextlib.suppress(self._psutil.Error):
                    process.send_signal(number)
            self._psutil.wait_procs(processes, grace_s)
