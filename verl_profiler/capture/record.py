"""One capture of a run, as `captures.json` lists it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CaptureRecord"]


@dataclass
class CaptureRecord:
    """One capture: its report, or the reason why there is none.

    Args:
        role: Role of the process.
        rank: Its rank, or None.
        host: Its host.
        pid: Its process id.
        step: verl's global step.
        task: verl's task, with one capture per task.
        number: Which of the process's captures it is, from 1; 0 if no journal lists it.
        begin_ns: When it began, on that host's wall clock; None if that was not recorded.
        end_ns: When it ended; None if it did not.
        tool: Name of the capture tool.
        file: The report's name in `RUN/nsight`; None if there is none.
        size_bytes: Its size.
        problem: What is wrong with it; empty if nothing is.
        silent: Whether the tool could record nothing when the capture began.
        source: The name that the tool gave to the file.
    """

    role: str
    rank: int | None
    host: str
    pid: int
    step: int | None
    task: str | None
    number: int
    begin_ns: int | None
    end_ns: int | None
    tool: str
    file: str | None = None
    size_bytes: int = 0
    problem: str = ""
    silent: bool = False
    source: str = ""

    @classmethod
    def without_journal(cls, role: str, tool: str, **facts: Any) -> CaptureRecord:
        """Return a capture of which only some facts are known."""
        known: dict[str, Any] = dict.fromkeys(("rank", "step", "task", "begin_ns", "end_ns"))
        known |= {"host": "", "pid": 0, "number": 0, **facts}
        return cls(role=role, tool=tool, **known)

    @property
    def process(self) -> str:
        """How this process's file names begin."""
        return f"{self.role}_{self.host}_{self.pid}"

    @property
    def label(self) -> str:
        """`actor_0`, or role, host and pid without a rank."""
        return self.process if self.rank is None else f"{self.role}_{self.rank}"

    @property
    def key(self) -> tuple[str, int, int]:
        """Host, pid and number, which identify it within a run."""
        return self.host, self.pid, self.number
