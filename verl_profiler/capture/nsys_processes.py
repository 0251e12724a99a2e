"""Processes of nsys that work for a run on this machine, and which of them are stale.

nsys is three processes per capture: the launcher above the program, the launcher's helpers, and an
agent without a parent that finishes the report when the launcher was killed.  Sometimes an agent does
not end.  A process belongs to a run by the settings in its environment, or by the report folder in
its command line.  Everything is read from `/proc`, because `verl-profiler collect` runs where only
the core dependencies are installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.capture.open_files import process_ids
from verl_profiler.capture.tools import ToolProcess
from verl_profiler.environ import SETTINGS, UNDER_NSYS

__all__ = ["end_stale", "processes_of"]

_PROGRAM = re.compile(r"nsys(?!-ui)|Qdstrm|quadd")
# nsys names the agent's session after the launcher that started it.
_SESSION = re.compile(r"--session-name=\S*-(\d+)")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    started: int
    cpu_s: float
    argv: tuple[str, ...]
    environment: dict[str, str]

    @property
    def is_nsys(self) -> bool:
        return bool(self.argv) and bool(_PROGRAM.match(os.path.basename(self.argv[0])))

    @property
    def launcher(self) -> int | None:
        """The launcher of this session: itself, or the one that named the agent's session."""
        if "profile" in self.argv[1:2]:
            return self.pid
        match = _SESSION.search(" ".join(self.argv))
        return int(match[1]) if match else None

    @property
    def label(self) -> str:
        name = os.path.basename(self.argv[0])
        rest = " ".join(word for word in self.argv[1:] if not word.startswith("--shm-name"))
        return f"process {self.pid} ({f'{name} {rest}'[:120]}), {self.cpu_s:.0f} s of CPU"

    def belongs_to(self, run: str, raw: str) -> bool:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            settings = json.loads(self.environment[SETTINGS])
            return os.path.realpath(settings["directory"]) == run
        outputs = (word.rpartition("=")[2] for word in self.argv if self.is_nsys)
        return any(
            os.path.realpath(path).startswith(raw + os.sep)
            for path in outputs
            if os.path.isabs(path)
        )


def processes_of(run: Path, raw: Path) -> list[ToolProcess]:
    """Return the processes of nsys that work for a run on this machine, if this user may see them.

    Args:
        run: The run directory.
        raw: Where nsys writes.
    """
    processes = {process.pid: process for process in _processes()}
    places = os.path.realpath(run), os.path.realpath(raw)
    members = [process for process in processes.values() if process.belongs_to(*places)]
    ours = [process for process in members if process.is_nsys]
    pids = {process.pid for process in ours}
    watching: set[int] = set()
    adrift = False
    for process in members:
        if not process.is_nsys and process.environment.get(UNDER_NSYS, "0") != "0":
            above = _above(process, processes)
            watching |= above
            adrift = adrift or not any(processes[pid].launcher == pid for pid in above)
    found: list[ToolProcess] = []
    for process in ours:
        session = {process.pid, process.launcher, *_above(process, processes)}
        # Any agent without a launcher may watch a process whose launcher is gone.
        in_use = bool(session & watching) or (adrift and process.launcher not in pids)
        found.append(ToolProcess(process.pid, process.started, process.label, in_use))
    return found


def _above(process: _Process, processes: dict[int, _Process]) -> set[int]:
    """Return the processes of nsys among the ancestors of a process."""
    found: set[int] = set()
    while (process := processes.get(process.parent)) is not None:  # type: ignore[assignment]
        if process.is_nsys:
            found.add(process.pid)
    return found


def _processes() -> list[_Process]:
    found: list[_Process] = []
    for pid in process_ids():
        # It may end meanwhile, or belong to another user.
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(_read(pid))
    return found


def _read(pid: int) -> _Process:
    folder = Path("/proc") / str(pid)
    # The name may contain spaces and parentheses.
    stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    if stat[0] == "Z":
        raise ProcessLookupError
    argv = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
    environment: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for entry in (folder / "environ").read_bytes().split(b"\0"):
            name, _, value = os.fsdecode(entry).partition("=")
            if name in (SETTINGS, UNDER_NSYS):
                environment[name] = value
    return _Process(
        pid,
        int(stat[1]),
        int(stat[19]),
        (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        tuple(map(os.fsdecode, argv)),
        environment,
    )


def end_stale(run: Path, raw: Path, *, grace_s: float = 5.0) -> list[ToolProcess]:
    """End the stale processes of nsys of a run: with SIGTERM, then with SIGKILL.

    Args:
        run: The run directory.
        raw: Where nsys writes.
        grace_s: How long each signal is given.

    Returns:
        The processes that were stale.
    """
    stale = [process for process in processes_of(run, raw) if not process.in_use]
    left = stale
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            there = {(process.pid, process.started) for process in processes_of(run, raw)}
            left = [process for process in left if (process.pid, process.started) in there]
    return stale
