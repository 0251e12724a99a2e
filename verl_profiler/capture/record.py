"""The captures of a run, from what its processes recorded and from the metadata beside the reports.

A run may come from anywhere, so a line or file of another form becomes a problem, never an exception.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.capture import tools
from verl_profiler.events.files import (
    is_regular,
    parse_json,
    read_bounded,
    read_object,
    reason_of,
)
from verl_profiler.events.json_values import is_object
from verl_profiler.units import counted

# A capture takes two lines of 200 bytes.
_JOURNAL_LIMIT_BYTES = 64 << 20
_NAME = re.compile(r"[\w.:-]*")
_NOT_IN_NAMES = re.compile(r"[^\w.:-]")


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


def read_journals(folder: Path) -> list[CaptureRecord]:
    """Return the captures that the processes recorded, in the order in which they began.

    The invalid lines of a journal are one record, whose `problem` has their number; likewise a journal
    that cannot be read.
    """
    captures: list[CaptureRecord] = []
    for file in sorted(folder.glob("*.jsonl")):
        by_number: dict[int, CaptureRecord] = {}
        rejected = 0
        name = f"journal/{_NOT_IN_NAMES.sub('_', file.name)}"
        try:
            lines = read_bounded(file, _JOURNAL_LIMIT_BYTES).splitlines()
        except OSError as error:
            captures.append(_lost(f"{name} cannot be read ({reason_of(error)})"))
            continue
        for text in lines:
            # A process that was killed leaves half a line.
            with contextlib.suppress(ValueError):
                rejected += not _add_line(parse_json(text), by_number)
        captures += by_number.values()
        if rejected:
            captures.append(
                _lost(
                    f"{counted(rejected, 'line')} of {name} left out: role or host cannot be part of a file "
                    "name, or a value is of another type"
                )
            )
    return sorted(captures, key=lambda capture: (capture.begin_ns or 0, capture.label))


def read_metadata(home: Path) -> Iterator[CaptureRecord]:
    """Yield the metadata beside the reports that are in their places.

    Args:
        home: `RUN/nsight`.
    """
    for path in sorted(home.glob("*.json")):
        # Any other file there is not ours.
        with contextlib.suppress(OSError, ValueError):
            record = _record(read_object(path))
            if record is not None and record.file and is_regular(home / record.file):
                yield record


def _add_line(line: Any, by_number: dict[int, CaptureRecord]) -> bool:
    """Add what a journal line has; return False if it has other types or names."""
    if not is_object(line):
        return False
    number = line.get("capture")
    if not isinstance(number, int):
        return False
    record = by_number.get(number)
    if record is None:
        facts: dict[str, Any] = {"number": number, "begin_ns": None, "end_ns": None}
        facts |= {key: line.get(key) for key in ("role", "rank", "host", "pid", "step", "task")}
        record = _record({**facts, "tool": line.get("tool", tools.DEFAULT)})
        if record is None:
            return False
        by_number[number] = record
    for key in ("begin_ns", "end_ns"):
        if isinstance(line.get(key), int):
            setattr(record, key, line[key])
    return True


def _record(facts: dict[str, Any]) -> CaptureRecord | None:
    """Return a capture record, or None if the facts are not as this package writes them."""
    try:
        record = msgspec.convert(facts, CaptureRecord)
    except (msgspec.ValidationError, TypeError):
        return None
    # They become file names.
    names = record.role, record.host, record.file or ""
    valid = all(map(_NAME.fullmatch, names)) and record.tool in tools.names()
    return record if valid else None


def _lost(problem: str) -> CaptureRecord:
    """Return the record of captures that are not gathered."""
    problem = f"{problem}; what was captured there is not gathered"
    return CaptureRecord.without_journal("unknown", tools.DEFAULT, problem=problem)
