"""Take traces of other profilers into a timeline: torch's (Chrome JSON) and exports of nsys (SQLite).

They are placed by the time of day that they carry, beside the process with their host and pid where
there is one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    UnusableFileError,
    cleaned_text,
    expanded,
    open_regular,
    reason_of,
)
from verl_profiler.exports.tracks import Folders, Lanes, Trace
from verl_profiler.reading.formats import nsys_export
from verl_profiler.reading.tables.tables import Tables

__all__ = ["find_guests", "read_guest", "write_guest"]

_PATTERNS = ("*.json", "*.json.gz", "*.sqlite")
# Microseconds since 1970 are larger than this, and times since a boot smaller.
_TIME_OF_DAY_US = 10**14
# Read whole; decoded, it takes several times as much.
_LIMIT_BYTES = 1 << 30
_EXPANSION_FROM_BYTES = 64 << 20
_LAST_NS = (1 << 63) - 1
_NAME_LIMIT = 4_096
_DEPTH_LIMIT = 60


@dataclass
class GuestSpan:
    """A span of another profiler; an instant where begin and end are the same and `instant`."""

    begin_ns: int
    end_ns: int
    name: str
    category: str
    fields: dict[str, Any] = field(default_factory=dict)
    instant: bool = False
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass
class Guest:
    """A trace of another profiler.

    Args:
        title: What its folder is called.
        host: Where it was taken; None where it does not say.
        pids: The processes in it.
        threads: Spans by the name of their thread or stream.
        counters: (time in ns, value) by name.
        left_out: How many of its events were no events, or of times that cannot be.
    """

    title: str
    host: str | None = None
    pids: set[int] = field(default_factory=set)
    threads: dict[str, list[GuestSpan]] = field(default_factory=dict)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    left_out: int = 0


def find_guests(run: Path) -> list[Path]:
    """Return the files in the `nsight` folder of a run that may be traces."""
    folder = run / "nsight"
    return sorted(path for pattern in _PATTERNS for path in folder.rglob(pattern))


def read_guest(path: Path, *, found: bool = False) -> Guest | None:
    """Read a trace.

    Args:
        path: The file.
        found: It was not named, only found: JSON of another kind is none of ours, and no fault.

    Returns:
        None for a file that was found and is no trace.

    Raises:
        ReadingError: The file is neither a Chrome trace nor an export of nsys, or has no time of day.
    """
    try:
        if path.suffix == ".sqlite":
            return _nsys(path)
        text = _content(path)
        content = msgspec.json.decode(text)
        if found and b'"traceEvents"' not in text:
            return None
    except RecursionError:
        raise _unusable(path, "cannot be read: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, f"cannot be read: {reason_of(error)}") from error
    return _chrome(path, content)


def _content(path: Path) -> bytes:
    with open_regular(path, _LIMIT_BYTES) as file, expanded(file, _EXPANSION_FROM_BYTES) as opened:
        text = bytearray()
        while block := opened.read(1 << 20):
            text += block
            if len(text) > _LIMIT_BYTES:
                raise UnusableFileError(f"is larger than {_LIMIT_BYTES >> 30} GiB")
    return bytes(text)


def write_guest(guest: Guest, tables: Tables, folders: Folders, trace: Trace) -> None:
    """Write a trace beside the process that it is of."""
    folder = trace.folder(guest.title, _home(guest, tables, folders))
    for thread, spans in sorted(guest.threads.items()):
        spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
        placed = (
            (
                span.begin_ns,
                span.end_ns,
                (span.name, span.category, span.instant),
                msgspec.json.encode(span.fields).decode(),
                span.sources,
                span.targets,
            )
            for span in spans
        )
        trace.write(Lanes(trace, folder, thread).place(placed))
    for name, values in sorted(guest.counters.items()):
        track = trace.counter(name, folder, "")
        trace.count(track, sorted(values))


def _home(guest: Guest, tables: Tables, folders: Folders) -> int:
    """Return the folder of the process that a trace is of, or none where that is not certain."""
    rows = [
        row
        for row in tables.rows("SELECT run, name, host, pid FROM processes WHERE pid IS NOT NULL")
        if row["pid"] in guest.pids and guest.host in (None, row["host"])
    ]
    return folders[rows[0]["run"], rows[0]["name"]] if len(rows) == 1 else 0


def _chrome(path: Path, content: Any) -> Guest:
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not any(
        isinstance(event, dict) and "ph" in event for event in events
    ):
        raise _unusable(path, "is not a trace as torch or nsys writes it: it has no events")
    about: Mapping[str, Any] = content if isinstance(content, dict) else {}
    # Written by our own `--chrome-json`, or by torch since 2.4.
    base_ns = about.get("baseTimeNanoseconds")
    host = about.get("host_name")
    reading = _Chrome(
        path,
        Guest(f"torch: {cleaned_text(path.name)}", host if isinstance(host, str) else None),
        base_ns if type(base_ns) is int and 0 <= base_ns <= _LAST_NS else 0,
    )
    known = [event for event in events if isinstance(event, dict)]
    reading.guest.left_out = len(events) - len(known)
    for event in known:
        reading.name(event)
    for event in known:
        if not reading.take(event):
            reading.guest.left_out += 1
    reading.join()
    return reading.guest


class _Chrome:
    """The events of a trace while they are read; any value may be missing or of another type."""

    def __init__(self, path: Path, guest: Guest, base_ns: int) -> None:
        self.guest = guest
        self._path = path
        self._base_ns = base_ns
        self._names: dict[Any, str] = {}
        self._begun: dict[Any, list[GuestSpan]] = {}
        self._placed: dict[Any, GuestSpan] = {}
        self._arrows: list[Mapping[str, Any]] = []

    def name(self, event: Mapping[str, Any]) -> None:
        """Take the name of a thread."""
        args = event.get("args")
        if event.get("ph") == "M" and event.get("name") == "thread_name" and isinstance(args, dict):
            self._names[_place(event)] = _name(args.get("name"))

    def take(self, event: Mapping[str, Any]) -> bool:
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
        fields = args if isinstance(args, dict) else {}
        if kind == "C":
            return self._count(event, fields, begin_ns)
        length_ns = _nanoseconds(event.get("dur", 0))
        if length_ns is None or begin_ns + length_ns > _LAST_NS:
            return False
        category = event.get("cat", "torch")
        span = GuestSpan(
            begin_ns,
            begin_ns + length_ns,
            _name(event.get("name")),
            _name(category),
            fields if _depth_of(fields) < _DEPTH_LIMIT else {},
            instant=kind in ("i", "I"),
        )
        if type(event.get("pid")) is int:
            self.guest.pids.add(event["pid"])
        thread = self._names.get(place, f"{place[0]} {place[1]}")
        self.guest.threads.setdefault(thread, []).append(span)
        if not span.instant:
            self._placed[(*place, event["ts"])] = span
        if kind == "B":
            self._begun.setdefault(place, []).append(span)
        return True

    def join(self) -> None:
        """Give arrows to the spans that begin where the arrow does, if both of its ends are there."""
        ends: dict[Any, dict[str, GuestSpan]] = {}
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
                self.guest.counters.setdefault(name, []).append((time_ns, float(value)))
                taken = True
        return taken

    def _time_ns(self, event: Mapping[str, Any]) -> int | None:
        time_us: Any = event.get("ts")
        if not _is_number(time_us):
            return None
        if not self._base_ns and 0 <= time_us < _TIME_OF_DAY_US:
            raise _unusable(self._path, "does not say at what time of day it was taken")
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
    if depth >= _DEPTH_LIMIT or not isinstance(value, (dict, list)):
        return depth
    inner = value.values() if isinstance(value, dict) else value
    return max(
        (_depth_of(each, depth + 1) for each in inner if isinstance(each, (dict, list))),
        default=depth + 1,
    )


def _nsys(path: Path) -> Guest:
    export = nsys_export.read(path)
    if not export.dated:
        raise _unusable(path, "does not say at what time of day it was taken")
    guest = Guest(f"nsys: {path.name}")

    def take(lane: str, pid: int, begin_ns: int, end_ns: int, name: Any, category: str) -> None:
        guest.pids.add(pid)
        span = GuestSpan(begin_ns, end_ns, str(name or "range"), category)
        guest.threads.setdefault(lane, []).append(span)

    for _domain, name, category, _payload, _kind, pid, tid, begin_ns, end_ns in export.ranges:
        if end_ns is not None:
            take(f"NVTX of thread {tid}", pid, begin_ns, end_ns, name, category or "nvtx")
    for kind, name, gpu, stream, pid, _tid, _launch_ns, begin_ns, end_ns in export.work:
        take(f"GPU {gpu}, stream {stream}", pid, begin_ns, end_ns, name, kind)
    return guest


def _unusable(path: Path, why: str) -> ReadingError:
    return ReadingError(
        f"{path} {why}.\nGive a trace that torch.profiler exported, or what "
        "`nsys export --type sqlite` wrote",
        "bad-trace",
    )
