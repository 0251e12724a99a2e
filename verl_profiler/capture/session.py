"""Start and stop the captures of this process, and list them in its journal.

Tools number their files; the journal has the step, rank and process of the k-th one, even if the
process died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.capture import tools
from verl_profiler.capture.plan import Plan, RoleCapture, decoded_plan
from verl_profiler.recording import context, recorder


class Process:
    """The captures of one process.

    Args:
        plan: What is captured.
        role: This process's role.
        rank: Its rank, or None.
    """

    def __init__(self, plan: Plan, role: str, rank: int | None) -> None:
        self.plan = plan
        self.role = role
        self.rank = rank
        self.capture: RoleCapture | None = plan.of(role, rank)
        # A run's plan is made in an environment that may have a tool that this one lacks.
        self.tool = tools.find(plan.tool)
        self.count = 0
        self.step: int | None = None
        self.task: str | None = None
        self._open: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a capture runs now."""
        return self._open is not None

    def start(self) -> None:
        """Start a capture, unless one runs or this process is not captured."""
        if self.is_open or self.capture is None or self.tool is None:
            return
        handle = self.tool.start(self.capture)
        if handle is not None:
            self.opened(handle)

    def stop(self) -> None:
        """End the capture that runs."""
        if not self.is_open or self.tool is None:
            return
        handle = self._open
        self.closed()
        name = f"{self._file_name()}.{self.count}{self.tool.suffix}"
        self.tool.stop(handle, Path(self.plan.directory) / name)

    def opened(self, handle: Any = tools.STARTED_BY_HOST) -> None:
        """Record that a capture started."""
        self._open = handle
        self.count += 1
        self._write({"begin_ns": time.time_ns()})

    def closed(self) -> None:
        """Record that the capture ended."""
        self._open = None
        self._write({"end_ns": time.time_ns()})
        self.task = None

    def _file_name(self) -> str:
        return f"{self.role}_{socket.gethostname()}_{os.getpid()}"

    def _write(self, moment: dict[str, int]) -> None:
        """Append one line at once, so that a process killed in a capture leaves its start."""
        step = self.step if self.step is not None else context.process.current_step()
        line = {
            "capture": self.count,
            **moment,
            "role": self.role,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": step,
            "task": self.task,
            "tool": self.plan.tool,
        }
        folder = Path(self.plan.journal)
        path = folder / f"{self._file_name()}.jsonl"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(line) + b"\n")


_current: Process | None = None


def current() -> Process | None:
    """Return the captures of this process, or None if nothing is captured."""
    global _current
    active = recorder.active()
    plan = decoded_plan(active.config.capture_plan) if active is not None else None
    # A running capture is ended by its caller, even after recording has stopped.
    if _current is None or (active is not None and _current.plan is not plan):
        _current = None
        if plan is None:
            return None
        from verl_profiler.recording.identity import identify

        identity = active.identity or identify() if active is not None else None
        if identity is None:
            return None
        _current = Process(plan, identity.role, identity.rank)
    return _current


def start(_instance: Any = None, step: int | None = None) -> bool:
    """Start a capture in this process; the trainer also calls it in other actors.

    Returns:
        Whether a capture runs now.
    """
    process = current()
    if process is None:
        return False
    if step is not None:
        process.step = step
    process.start()
    return process.is_open


def stop(_instance: Any = None) -> None:
    """End the capture of this process."""
    process = current()
    if process is not None:
        process.stop()


def note_step(step: int | None) -> None:
    """Set the step of the next captures."""
    process = current()
    if process is not None and isinstance(step, int):
        process.step = step


def note_task(task: str | None) -> None:
    """Set verl's task of the next capture; a capture of a whole step has none."""
    process = current()
    if process is not None and process.plan.discrete:
        process.task = task
