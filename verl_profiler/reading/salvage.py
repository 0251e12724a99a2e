"""Copy the good lines of a damaged event file and name the others.

duckdb reads whole files fast and gives up at the first bad byte.  A file that it rejects, or whose
values have the wrong types, comes through here once: the copy holds only lines that can be read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from verl_profiler.events import files
from verl_profiler.events.json_values import is_object
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.tables.schemas import COUNT_LIMIT, FIELDS, NUMBER_LIMIT
from verl_profiler.units import counted, some

# Longer lines are dropped.  What is read must fit into memory several times, for each thread.
LINE_LIMIT_BYTES = 1 << 20
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_DURATION_LIMIT_S = 1e9
# Files with the same fault that are named.
_SHOWN = 4
# What both duckdb and this module take as a time, and nothing else.
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


class LineFault(NamedTuple):
    """A fault of lines of one file.

    Args:
        kind: What is wrong, and what became of the lines.
        place: The first of them.
        detail: What is known of that one besides.
        more: How many others have it.
    """

    kind: str
    place: str
    detail: str = ""
    more: int = 0


class _Faults(dict[str, LineFault]):
    """What is wrong with one file, by kind."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        self._shown = shown

    def add(self, number: int, kind: str, detail: str = "") -> None:
        """Note that line `number` has the fault `kind`."""
        known = self.get(kind)
        self[kind] = (
            LineFault(kind, f"{self._shown}:{number}", detail)
            if known is None
            else known._replace(more=known.more + 1)
        )


def sentences(faults: Iterable[LineFault]) -> Iterator[str]:
    """Yield one for each kind of fault, with the first line of some files that have it."""
    by_kind: dict[str, list[LineFault]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for kind, own in by_kind.items():
        more = sum(each.more for each in own)
        files = "these files" if own[1:] else "this file"
        tail = f"; {counted(more, 'more line')} of {files} likewise" if more else ""
        yield f"{some([each.place for each in own], _SHOWN)}: {kind}{own[0].detail}{tail}"


def is_timed(event: str) -> bool:
    """Whether an event has a duration wherever it is recorded."""
    known = EVENTS.get(event)
    return known is not None and not known.instant


def repair(
    path: Path, copy: Path, shown: str, *, growing: bool = False, first_us: int | None = None
) -> Collection[LineFault]:
    """Write the lines of `path` that can be read to `copy`; return what is wrong with the rest.

    Args:
        path: The damaged file, compressed or not.
        copy: Where the good lines go.
        shown: How messages name the file.
        growing: The process still writes, so that an unfinished last line is no fault.
        first_us: A time before all that the process did, by its own clock; None when not known.
    """
    faults = _Faults(shown)
    with (
        files.open_regular(path) as stored,
        files.expanded(stored) as file,
        copy.open("wb") as out,
    ):
        for number, (line, cut) in enumerate(files.limited_lines(file, LINE_LIMIT_BYTES), 1):
            if cut:
                faults.add(number, f"longer than {LINE_LIMIT_BYTES >> 20} MiB, dropped")
                continue
            content = _checked(line, number, faults, first_us, growing=growing)
            if content is not None:
                out.write(content + b"\n")
    return faults.values()


def _checked(
    line: bytes,
    number: int,
    faults: _Faults,
    first_us: int | None,
    *,
    growing: bool,
) -> bytes | None:
    """Return the line as it goes into the copy, or None when it is dropped."""
    whole = line.endswith(b"\n")
    line = line.strip()
    if not line:
        return None
    lost: list[str] = []
    try:
        content = files.parse_json(line, lost)
    except ValueError as error:
        if not whole:
            if not growing:
                faults.add(number, "unfinished line, dropped (was the process killed?)")
        elif not line.strip(b"\0"):
            faults.add(number, "zero bytes instead of a line (disk full or power loss?), dropped")
        elif "deeply" in str(error):
            faults.add(number, "nested too deeply, dropped")
        else:
            faults.add(number, "not JSON, dropped", f" ({str(error).partition(': ')[2]})")
        return None
    fault = _fault(content, first_us)
    if fault is not None:
        faults.add(number, f"{fault}, dropped")
        return None
    if line.decode("utf-8", "replace").encode() != line:
        faults.add(number, "not UTF-8; invalid bytes are replaced")
    for kind in _minor_faults(content):
        faults.add(number, kind)
    if lost:
        faults.add(number, "NaN or Infinity is not JSON, or a number is too large; read as null")
    content["timestamp"] = _normalized(content["timestamp"])
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _fault(content: Any, first_us: int | None) -> str | None:
    """Return why a line cannot be an event, or None."""
    if not is_object(content):
        return "not a JSON object"
    event = content.get("event")
    if not isinstance(event, str) or not event:
        return "no `event` name"
    timestamp = _normalized(content.get("timestamp"))
    if timestamp is None:
        return "no readable `timestamp`"
    duration = content.get("duration_sec")
    if duration is not None and (
        isinstance(duration, bool)
        or not isinstance(duration, (int, float))
        or not math.isfinite(duration)
        or not 0 <= duration <= _DURATION_LIMIT_S
    ):
        return "`duration_sec` is not a valid duration"
    if (
        first_us is not None
        and is_timed(event)
        and _moment_us(timestamp) - (duration or 0) * 1e6 < first_us
    ):
        return "begins before its process started"
    return None


def _minor_faults(content: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a line that is kept all the same."""
    if is_timed(content["event"]) and content.get("duration_sec") is None:
        yield f"`{content['event']}` has no `duration_sec`; it is in no sum"
    if not _is_count(content.get("step")):
        yield "`step` is not a whole number; the folder's number is used"
    extra = content.get("extra")
    if not is_object(extra):
        if extra is not None:
            yield "`extra` is not an object; it is not used"
        return
    for name, kind in FIELDS.items():
        value = extra.get(name)
        if value is None or kind == "VARCHAR":
            continue
        number = _as_number(value)
        if number is None:
            yield f"`{name}` is not a number; it is not used"
            del extra[name]
        elif not abs(number) <= NUMBER_LIMIT:
            yield f"`{name}` is out of range; it is not used"
            del extra[name]
    if not _is_count(extra.get("turn")):
        yield "`turn` is not a whole number; it is not used"
    if not isinstance(extra.get("validate", False), (bool, type(None))):
        yield "`validate` is neither true nor false; it is not used"


def _as_number(value: Any) -> float | None:
    """Return a number, or one that is written as text; None for anything else."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number, or not there."""
    return value is None or (type(value) is int and abs(value) <= COUNT_LIMIT)


def _moment_us(timestamp: str) -> int:
    """Return a time in ISO form as microseconds since 1970; without an offset it is UTC."""
    moment = datetime.fromisoformat(timestamp)
    return (moment.replace(tzinfo=moment.tzinfo or timezone.utc) - _EPOCH) // _MICROSECOND


def _normalized(timestamp: Any) -> str | None:
    """Return the time in the one form that every reader takes, or None."""
    match = _TIMESTAMP.fullmatch(timestamp) if isinstance(timestamp, str) else None
    if match is None:
        return None
    date, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone == "Z" else zone or ""
    if zone and ":" not in zone:
        zone = f"{zone[:3]}:{zone[3:]}"
    text = f"{date}T{clock}.{(fraction or '0')[:6].ljust(6, '0')}{zone}"
    try:
        year = datetime.fromisoformat(text).year
    except ValueError:
        return None
    return text if 1970 <= year <= 2261 else None
