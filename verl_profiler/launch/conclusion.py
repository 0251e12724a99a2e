"""What the console shows at the end of a profiled training: the headline and the first finding.

Both come from `verl-profiler summary`, in a process of its own with limited time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_profiler.environ import SETTINGS
from verl_profiler.recording.complaints import say

__all__ = ["conclude"]

# A summary of 100,000 events takes about 3 s.
PATIENCE_S = 10.0
_NEEDED = ("duckdb", "numpy", "scipy")


def conclude(directory: Path, *, patience_s: float = PATIENCE_S) -> None:
    """Print the headline and the first finding of a run; nothing where they cannot be had.

    Args:
        directory: The run directory.
        patience_s: End the summary after this time.
    """
    try:
        if any(importlib.util.find_spec(name) is None for name in _NEEDED):
            return
        done = _run_command(["summary", str(directory)], patience_s)
    except subprocess.TimeoutExpired:
        say(f"the summary takes longer than {patience_s:g} s; see verl-profiler summary")
        return
    except Exception:  # noqa: BLE001  training has succeeded; the files are still there
        return
    if done.returncode == 0:
        lines = done.stdout.splitlines()
        first = itertools.dropwhile(lambda line: not line.startswith("1. "), lines)
        finding = itertools.takewhile(lambda line: line.startswith(("1. ", "   ")), first)
        headline = (line for line in lines if line.startswith(f"{directory.name}: "))
        for line in [*itertools.islice(headline, 1), *finding]:
            say(line)


def _run_command(words: Sequence[str], patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run `verl-profiler` with these arguments in a process of its own; end it after `patience_s`.

    Raises:
        OSError: The process cannot be started.
        TimeoutExpired: It did not end in time.
    """
    command = [sys.executable, "-m", "verl_profiler", *words]
    # Not recorded itself.
    environment = {name: value for name, value in os.environ.items() if name != SETTINGS}
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, error = process.communicate(timeout=patience_s)
        finally:
            # What it started holds the pipes open.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, error)
