"""Read what a run's processes recorded about their captures, and the metadata beside the reports.

A run may come from anywhere, so a line or file of another form becomes a problem, never an exception.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.capture import tools
from verl_profiler.capture.record import CaptureRecord
from verl_profiler.events.files import (
    is_regular,
    parse_json,
    read_bounded,
    read_object,
    reason_of,
)
from verl_profiler.events.json_values import is_object, mapping_or_empty

__all__ = ["read_journals", "read_metadata"]

# A capture takes two lines of 200 bytes.
_JOURNAL_LIMIT_BYTES = 64 << 20
_NAME = re.compile(r"[\w.:-]*")
_NOT_IN_NAMES = re.compile(r"[^\w.:-]")
_NAME_LIMIT = 60


def read_journals(folder: Path) -> list[CaptureRecord]:
    """Return the captures that the processes recorded, in the order in which they began.

    The invalid lines of a journal are one record, whose `problem` has their number; likewise a journal
    that cannot be read.
    """
    captures: list[CaptureRecord] = []
    for file in sorted(folder.glob("*.jsonl")):
        by_number: dict[int, CaptureRecord] = {}
        rejected: list[Any] = []
        try:
            lines = read_bounded(file, _JOURNAL_LIMIT_BYTES).splitlines()
        except OSError as error:
            captures.append(
                _lost({"role": file.stem}, f"{_shown(file)} cannot be read ({reason_of(error)})")
            )
            continue
        for text in lines:
            # A process that was killed leaves half a line.
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if not _add_line(line, by_number):
                    rejected.append(line)
        captures += by_number.values()
        if rejected:
            many = len(rejected) > 1
            captures.append(
                _lost(
                    rejected[0],
                    f"{len(rejected):,} line{'s' * many} of {_shown(file)} "
                    f"{'are' if many else 'is'} left out: role or host cannot be part of a file name, "
                    "or a value is of another type",
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
    record.silent = bool(line.get("silent"))
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


def _shown(journal: Path) -> str:
    return f"journal/{_NOT_IN_NAMES.sub('_', journal.name)}"


def _lost(line: Any, problem: str) -> CaptureRecord:
    """Return the record of captures that are not gathered, with the names of one rejected line."""
    facts = mapping_or_empty(line)

    def name(key: str) -> str:
        return _NOT_IN_NAMES.sub("_", str(facts.get(key)))[:_NAME_LIMIT]

    def number(key: str) -> int | None:
        value = facts.get(key)
        return value if type(value) is int and 0 <= value < 1 << 31 else None

    return CaptureRecord.without_journal(
        name("role"),
        tools.DEFAULT,
        rank=number("rank"),
        host=name("host"),
        pid=number("pid") or 0,
        step=number("step"),
        problem=f"{problem}; what was captured there is not gathered",
    )
