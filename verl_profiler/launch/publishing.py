"""Publish a run to its trackers when the command ends: `profiler.publish`.

`verl-profiler export` runs as a process of its own: the driver imports no client, no failure reaches
it, and the time that it waits is limited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler.environ import SETTINGS
from verl_profiler.events.json_values import is_list
from verl_profiler.events.vocabulary import TRACKERS
from verl_profiler.recording.complaints import say

__all__ = ["publish", "run_command", "trackers_of"]

# A report of a million events takes below a minute.
PATIENCE_S = 300.0


def trackers_of(logger: Any) -> tuple[str, ...]:
    """Return the trackers among the values of `trainer.logger`, in their order."""
    named: list[Any] = [logger] if isinstance(logger, str) else logger if is_list(logger) else []
    # verl's older name of the logger.
    current = ("wandb" if name == "tracking" else name for name in named)
    return tuple(name for name in dict.fromkeys(current) if name in TRACKERS)


def publish(directory: Path, trackers: Sequence[str], *, patience_s: float = PATIENCE_S) -> None:
    """Publish, and print a line per tracker; a failure is printed, never raised.

    Args:
        directory: The run directory.
        trackers: Where to.
        patience_s: End it after this time.
    """
    again = f"Run: verl-profiler export trackers {directory}"
    try:
        done = run_command(
            ["export", "trackers", str(directory), "--tracker", *trackers], patience_s
        )
    except subprocess.TimeoutExpired:
        say(f"WARNING not published: not done after {patience_s:g} s. {again} (not-published)")
    except Exception as error:  # noqa: BLE001  training has succeeded; the files are still there
        say(f"WARNING not published: {error!r}. {again} (not-published)")
    else:
        lines = [line for line in done.stdout.splitlines() if "ublished to " in line]
        if not lines:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
            lines = [f"Not published: {reason}"]
        for line in lines:
            failed = line.startswith("Not ")
            say(f"WARNING {line}. {again} (not-published)" if failed else line)


def run_command(words: Sequence[str], patience_s: float) -> subprocess.CompletedProcess[str]:
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
            # Clients leave processes of their own; they hold the pipes open.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, error)
