"""Which processes of nsys work for a run on this machine, and which of them were left behind.

nsys is three processes per capture: the launcher above the program, the launcher's helpers, and an
agent that is nobody's child and finishes the report when the launcher was killed.  Now and then an
agent does not end.  A process belongs to a run by the settings in its environment, or by the folder
of the reports among its words; everything is read from `/proc`, and nothing there is not ours.
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

from verl_profiler.environ import SETTINGS, UNDER_NSYS

__all__ = ["Tool", "being_written", "end", "tools_of"]

_TOOL = re.compile(r"nsys(?!-ui)|Qdstrm|quadd")
# nsys names the agent's session after the launcher that started it.
_SESSION = re.compile(r"--session-name=\S*-(\d+)")


@dataclass(frozen=True)
class Tool:
    """A process of nsys that works for a run.

    Args:
        pid: Its number.
        started: When it started, in clock ticks since boot; with `pid` it is one process only.
        words: Its command line.
        cpu_s: The CPU time that it has taken.
        in_use: Whether a process of the run that it watches is alive.
    """

    pid: int
    started: int
    words: tuple[str, ...]
    cpu_s: float
    in_use: bool

    @property
    def label(self) -> str:
        """What `ps` would show of it, shortened."""
        name = os.path.basename(self.words[0])
        rest = " ".join(word for word in self.words[1:] if not word.startswith("--shm-name"))
        return f"process {self.pid} ({f'{name} {rest}'[:120]}), {self.cpu_s:.0f} s of CPU"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    started: int
    cpu_s: float
    words: tuple[str, ...]
    environment: dict[str, str]

    @property
    def is_tool(self) -> bool:
        return bool(self.words) and bool(_TOOL.match(os.path.basename(self.words[0])))

    @property
    def launcher(self) -> int | None:
        """The launcher of this session: itself, or the one that an agent's session is named by."""
        if "profile" in self.words[1:2]:
            return self.pid
        match = _SESSION.search(" ".join(self.words))
        return int(match[1]) if match else None

    def is_of(self, run: str, raw: str) -> bool:
        """Whether it belongs to this run."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            settings = json.loads(self.environment[SETTINGS])
            return os.path.realpath(settings["directory"]) == run
        outputs = (word.rpartition("=")[2] for word in self.words if self.is_tool)
        return any(
            os.path.realpath(path).startswith(raw + os.sep)
            for path in outputs
            if os.path.isabs(path)
        )


def tools_of(run: Path, raw: Path) -> list[Tool]:
    """Return the processes of nsys that work for a run on this machine, as far as we may see them.

    Args:
        run: The run directory.
        raw: Where its tools write.
    """
    processes = {process.pid: process for process in _processes()}
    places = os.path.realpath(run), os.path.realpath(raw)
    members = [process for process in processes.values() if process.is_of(*places)]
    tools = [process for process in members if process.is_tool]
    numbers = {tool.pid for tool in tools}
    watching: set[int] = set()
    adrift = False
    for process in members:
        if not process.is_tool and process.environment.get(UNDER_NSYS, "0") != "0":
            above = _above(process, processes)
            watching |= above
            adrift = adrift or not any(processes[pid].launcher == pid for pid in above)
    found = []
    for tool in tools:
        of = {tool.pid, tool.launcher, *_above(tool, processes)}
        # A watched process whose launcher is gone may be watched by any agent without one.
        in_use = bool(of & watching) or (adrift and tool.launcher not in numbers)
        found.append(Tool(tool.pid, tool.started, tool.words, tool.cpu_s, in_use))
    return found


def _above(process: _Process, processes: dict[int, _Process]) -> set[int]:
    """Return the tools among the ancestors of a process."""
    found = set()
    while (process := processes.get(process.parent)) is not None:  # type: ignore[assignment]
        if process.is_tool:
            found.add(process.pid)
    return found


def _processes() -> list[_Process]:
    found = []
    for pid in _pids():
        # It may end meanwhile, or be another user's.
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(_read(pid))
    return found


def _pids() -> list[int]:
    """Return the processes of this machine; none where there is no `/proc`, for example on a Mac."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _read(pid: int) -> _Process:
    folder = Path("/proc") / str(pid)
    # The name may hold spaces and parentheses.
    stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    if stat[0] == "Z":
        raise ProcessLookupError
    words = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
    environment = {}
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
        tuple(os.fsdecode(word) for word in words),
        environment,
    )


def end(run: Path, raw: Path, *, grace_s: float = 5.0) -> list[Tool]:
    """End what nsys left behind of a run: by SIGTERM, and by SIGKILL who does not heed it.

    Args:
        run: The run directory.
        raw: Where its tools write.
        grace_s: How long they have to end themselves.

    Returns:
        Those that were there.
    """
    first = [tool for tool in tools_of(run, raw) if not tool.in_use]
    left = first
    for number in (signal.SIGTERM, signal.SIGKILL):
        for tool in left:
            with contextlib.suppress(OSError):
                os.kill(tool.pid, number)
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            there = {(tool.pid, tool.started) for tool in tools_of(run, raw)}
            left = [tool for tool in left if (tool.pid, tool.started) in there]
    return first


def being_written(folder: Path) -> set[str]:
    """Return the files under a folder, relative to it, that a process of this machine writes now."""
    prefix = os.path.realpath(folder) + os.sep
    found = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            for link in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(link.path)
                    # The link's own permissions are how the file was opened.
                    if target.startswith(prefix) and os.lstat(link.path).st_mode & 0o200:
                        found.add(target.removeprefix(prefix))
    return found
