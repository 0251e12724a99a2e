"""Read Chrome JSON traces, as torch.profiler exports them, for a timeline.

Times become nanoseconds since 1970; any value may be missing or of another type.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.files import (
    UnusableFileError,
    cleaned_text,
    expanded,
    open_regular,
    reason_of,
)
from verl_profiler.events.json_values import is_list, is_object
from verl_profiler.reading.formats.foreign_traces import ForeignSpan, ForeignTrace, unusable

__all__ = ["is_trace", "read"]

# Microseconds since 1970 are larger than this, and times since a boot smaller.
_TIME_OF_DAY_US = 10**14
# Before its events, a trace has properties of the devices.
_HEAD_BYTES = 1 << 16
# Read whole; decoded, it takes several times as much.
_LIMIT_BYTES = 1 << 30
_LAST_NS = (1 << 63) - 1
_NAME_LIMIT = 4_096
_DEPTH_LIMIT = 60


def read(path: Path, *, found: bool = False) -> ForeignTrace | None:
    """Read a trace.

    Args:
        path: The file, or its gzip.
        found: The user did not name it: JSON of another kind is skipped, not an error.

    Returns:
        None for a file that was found and is no trace.

    Raises:
        ReadingError: The file is no Chrome trace, or has no absolute time.
    """
    try:
        text = _content(path)
        content = msgspec.json.decode(text)
        if found and b'"traceEvents"' not in text:
            return None
    except RecursionError:
        raise unusable(path, "cannot be read: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unusable(path, f"cannot be read: {reason_of(error)}") from error
    return _chrome(path, content)


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace of torch.profiler does."""
    try:
        with open_regular(path) as file, expanded(file) as opened:
            return b'"traceEvents"' in opened.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False


def _content(path: Path) -> bytes:
    with open_regular(path, _LIMIT_BYTES) as file, expanded(file) as opened:
        text = bytearray()
        while block := opened.read(1 << 20):
            text += block
            if len(text) > _LIMIT_BYTES:
                raise UnusableFileError(f"is larger than {_LIMIT_BYTES >> 30} GiB")
    return bytes(text)


def _chrome(path: Path, content: Any) -> ForeignTrace:
    events = content.get("traceEvents") if is_object(content) else content
    if not is_list(events) or not any(is_object(event) and "ph" in event for event in events):
        raise unusable(path, "is not a trace of torch or nsys: it has no events")
    about: Mapping[str, Any] = content if is_object(content) else {}
    # Written by torch since 2.4.
    base_ns = about.get("baseTimeNanoseconds")
    host = about.get("host_name")
    reading = _Chrome(
        path,
        ForeignTrace(f"torch: {cleaned_text(path.name)}", host if isinstance(host, str) else None),
        base_ns if type(base_ns) is int and 0 <= base_ns <= _LAST_NS else 0,
    )
    known = [event for event in events if is_object(event)]
    reading.trace.left_out = len(events) - len(known)
    for event in known:
        reading.name(event)
    for event in known:
        if not reading.add(event):
            reading.trace.left_out += 1
    reading.join()
    return reading.trace


class _Chrome:
    """The events of a trace while they are read; any value may be missing or of another type."""

    def __init__(self, path: Path, trace: ForeignTrace, base_ns: int) -> None:
        self.trace = trace
        self._path = path
        self._base_ns = base_ns
        self._names: dict[Any, str] = {}
        self._begun: dict[Any, list[ForeignSpan]] = {}
        self._placed: dict[Any, ForeignSpan] = {}
        self._arrows: list[Mapping[str, Any]] = []

    def name(self, event: Mapping[str, Any]) -> None:
        """Take the name of a thread."""
        args = event.get("args")
        if event.get("ph") == "M" and event.get("name") == "thread_name" and is_object(args):
            self._names[_place(event)] = _name(args.get("name"))

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take any other event; return False where it cannot be one."""
        kind, place = event.get("ph"), _place(event)
        if kind == "M" or not isinstance(kind, str):
            return kind == "M"
        if kind in ("s", "f"):
            self._arrows.append(event)
            return True
        if kind not in ("X", "B", "E", "i", "I", "C"):
            return True
        begin_ns = self._time_ns(event)
        if begin_ns is None:
            return False
        if kind == "E":
            if self._begun.get(place):
                span = self._begun[place].pop()
                span.end_ns = max(begin_ns, span.begin_ns)
            return True
        args = event.get("args")
        fields = args if is_object(args) else {}
        if kind == "C":
            return self._count(event, fields, begin_ns)
        length_ns = _nanoseconds(event.get("dur", 0))
        if length_ns is None or begin_ns + length_ns > _LAST_NS:
            return False
        category = event.get("cat", "torch")
        span = ForeignSpan(
            begin_ns,
            begin_ns + length_ns,
            _name(event.get("name")),
            _name(category),
            fields if _depth_of(fields) < _DEPTH_LIMIT else {},
            instant=kind in ("i", "I"),
        )
        if type(event.get("pid")) is int:
            self.trace.pids.add(event["pid"])
        thread = self._names.get(place, f"{place[0]} {place[1]}")
        self.trace.threads.setdefault(thread, []).append(span)
        if not span.instant:
            self._placed[(*place, event["ts"])] = span
        if kind == "B":
            self._begun.setdefault(place, []).append(span)
        return True

    def join(self) -> None:
        """Give arrows to the spans that begin where the arrow does, if both of its ends are there."""
        ends: dict[Any, dict[str, ForeignSpan]] = {}
        for arrow in self._arrows:
            span = self._placed.get((*_place(arrow), _key(arrow.get("ts"))))
            if span is not None:
                key = _key(arrow.get("cat")), _key(arrow.get("id"))
                ends.setdefault(key, {})[arrow["ph"]] = span
        # Far from the numbers of the run's own arrows, and from those of other files.
        first = 1 << 63 | zlib.crc32(bytes(self._path)) << 28
        for number, both in enumerate(ends.values()):
            if len(both) == 2:
                flow = first + number
                both["s"].sources.append(flow)
                both["f"].targets.append(flow)

    def _count(self, event: Mapping[str, Any], fields: Mapping[str, Any], time_ns: int) -> bool:
        taken = False
        for key, value in fields.items():
            if _is_number(value):
                name = f"{_name(event.get('name'))} {_name(key)}"
                self.trace.counters.setdefault(name, []).append((time_ns, float(value)))
                taken = True
        return taken

    def _time_ns(self, event: Mapping[str, Any]) -> int | None:
        time_us: Any = event.get("ts")
        if not _is_number(time_us):
            return None
        if not self._base_ns and 0 <= time_us < _TIME_OF_DAY_US:
            raise unusable(self._path, "has no absolute time (time of day)")
        whole = int(time_us)
        time_ns = self._base_ns + whole * 1000 + round((time_us - whole) * 1000)
        return time_ns if 0 <= time_ns <= _LAST_NS else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _nanoseconds(length_us: Any) -> int | None:
    return round(length_us * 1000) if _is_number(length_us) and length_us >= 0 else None


def _name(value: Any) -> str:
    return str(value)[:_NAME_LIMIT]


def _key(value: Any) -> Any:
    """Return a value as it can be looked up: a list cannot."""
    return value if isinstance(value, (int, float, str)) else str(value)[:_NAME_LIMIT]


def _place(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return _key(event.get("pid")), _key(event.get("tid"))


def _depth_of(value: Any, depth: int = 0) -> int:
    """Return how deep a value is nested, up to the limit."""
    if depth >= _DEPTH_LIMIT:
        return depth
    inner: Iterable[Any]
    if is_object(value):
        inner = value.values()
    elif is_list(value):
        inner = value
    else:
        return depth
    return max(
        (_depth_of(each, depth + 1) for each in inner if isinstance(each, (dict, list))),
        default=depth + 1,
    )
