"""Take traces of other profilers into a timeline: torch's (Chrome JSON) and exports of nsys (SQLite).

They are placed by the time of day that they carry, beside the process with their host and pid where
there is one.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler import nsys_export
from verl_profiler.errors import ReadingError
from verl_profiler.report.tracks import Folders, Lanes, Trace
from verl_profiler.tables import Tables

__all__ = ["find_guests", "read_guest", "write_guest"]

_PATTERNS = ("*.json", "*.json.gz", "*.sqlite")
# Microseconds since 1970 are larger than this, and times since a boot smaller.
_TIME_OF_DAY_US = 10**14


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
    """

    title: str
    host: str | None = None
    pids: set[int] = field(default_factory=set)
    threads: dict[str, list[GuestSpan]] = field(default_factory=dict)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


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
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read()
            content = msgspec.json.decode(text)
        if found and b'"traceEvents"' not in text:
            return None
        return _chrome(path, content)
    except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, f"cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(path, f"is not a trace as torch or nsys writes it: {error!r}") from error


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
    events = content["traceEvents"] if isinstance(content, dict) else content
    about: Mapping[str, Any] = content if isinstance(content, dict) else {}
    # Written by our own `--chrome-json`, or by torch since 2.4.
    base_ns = int(about.get("baseTimeNanoseconds", 0))
    guest = Guest(f"torch: {path.name}", about.get("host_name"))
    names = {
        (event["pid"], event.get("tid")): str(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    begun: dict[Any, list[GuestSpan]] = {}
    placed: dict[Any, GuestSpan] = {}
    arrows: list[dict[str, Any]] = []
    for event in events:
        kind = event["ph"]
        place = (event.get("pid"), event.get("tid"))
        if kind == "E" and begun.get(place):
            begun[place].pop().end_ns = _chrome_ns(path, event, base_ns)
        elif kind in ("s", "f"):
            arrows.append(event)
        if kind not in ("X", "B", "i", "I", "C"):
            continue
        begin_ns = _chrome_ns(path, event, base_ns)
        if kind == "C":
            for key, value in event["args"].items():
                values = guest.counters.setdefault(f"{event['name']} {key}", [])
                values.append((begin_ns, float(value)))
            continue
        end_ns = begin_ns + round(event.get("dur", 0) * 1000)
        fields = event.get("args") or {}
        category = str(event.get("cat", "torch"))
        instant = kind in ("i", "I")
        span = GuestSpan(begin_ns, end_ns, str(event["name"]), category, fields, instant)
        if isinstance(event.get("pid"), int):
            guest.pids.add(event["pid"])
        thread = names.get(place, f"{place[0]} {place[1]}")
        guest.threads.setdefault(thread, []).append(span)
        if not instant:
            placed[(*place, event["ts"])] = span
        if kind == "B":
            begun.setdefault(place, []).append(span)
    _join(arrows, placed, path)
    return guest


def _chrome_ns(path: Path, event: Mapping[str, Any], base_ns: int) -> int:
    time_us = event["ts"]
    if not base_ns and time_us < _TIME_OF_DAY_US:
        raise _unusable(path, "does not say at what time of day it was taken")
    whole = int(time_us)
    return base_ns + whole * 1000 + round((time_us - whole) * 1000)


def _join(arrows: Iterable[Mapping[str, Any]], placed: Mapping[Any, GuestSpan], path: Path) -> None:
    """Give arrows to the spans that begin where the arrow does, if both of its ends are there."""
    ends: dict[Any, dict[str, GuestSpan]] = {}
    for arrow in arrows:
        span = placed.get((arrow.get("pid"), arrow.get("tid"), arrow["ts"]))
        if span is not None:
            ends.setdefault((arrow.get("cat"), arrow["id"]), {})[arrow["ph"]] = span
    # Far from the numbers of the run's own arrows, and from those of other files.
    first = 1 << 63 | zlib.crc32(bytes(path)) << 28
    for number, both in enumerate(ends.values()):
        if len(both) == 2:
            flow = first + number
            both["s"].sources.append(flow)
            both["f"].targets.append(flow)


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
