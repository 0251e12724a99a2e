"""Turn event files into Parquet parts, and keep them beside the run for the next time.

    <run>/.cache/events-1/part-<fingerprint>.parquet     about 128 MiB of event files each
    <run>/.cache/events-1/stamp.json                     what each part was made from

A part is used again only if every file it was made from has the same size and modification time,
the same process identity and clock shift, and the conversion is the same.  A run that is still
written therefore converts its last part again, not all of it.  A directory that cannot be written
costs the cache and nothing else.  The tables made from the events lie there too (`shelf`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.aliases import vocabulary
from verl_profiler.errors import ReadingError
from verl_profiler.event_query import event_query
from verl_profiler.events import FORMAT_VERSION
from verl_profiler.parts import build_part, can_write
from verl_profiler.processes import Process
from verl_profiler.reading.scans import scan
from verl_profiler.sources import EventFile, Source

__all__ = ["Converted", "cache_folder", "convert"]

# Parts that another conversion made are made again; the number counts changes of `repair`.
_CONVERSION = json.dumps([4, event_query([]), vocabulary()])
_VERSION = hashlib.sha256(_CONVERSION.encode()).hexdigest()[:16]
_PART_BYTES = 128 << 20
_NAIVE_TIMESTAMP = re.compile(rb'"timestamp":\s*"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?"')


@dataclass
class Converted:
    """What a run's event files became.

    Args:
        parts: Parquet files with the columns of `event_query.PART_COLUMNS`.
        counts: Events by process name.
        problems: Sentences about files and lines.
        original: The files are in a vocabulary of the original logger.
    """

    parts: list[Path] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    original: bool = False


def convert(
    connection: duckdb.DuckDBPyConnection,
    source: Source,
    processes: dict[str, Process],
    scratch: Path,
    *,
    cache: bool,
) -> Converted:
    """Convert the event files of a run, or take the parts that an earlier call left.

    Args:
        connection: Does the work, within its memory limit.
        source: The run.
        processes: Its processes, by name.
        scratch: Where parts go when they are not kept.
        cache: Keep parts in the run directory, if it can be written.
    """
    original = _is_original(source)
    result = Converted(original=original)
    cached = cache_folder(source) if cache else None
    known = {} if cached is None else _stamp(cached)
    files = [file for file in source.files if file.size_bytes]
    result.problems += _named_together(
        [file.shown for file in source.files if not file.size_bytes], "is empty", "are empty"
    )
    stamp: dict[str, Any] = {}

    def part_of(group: list[EventFile]) -> tuple[Path, dict[str, Any]]:
        prints = [_fingerprint(file, processes[file.name], original) for file in group]
        name = f"part-{_digest(prints)}.parquet"
        part = known.get(name)
        if cached is not None and part is not None and _usable(connection, cached / name, part):
            return cached / name, part
        for folder in (scratch,) if cached is None else (cached, scratch):
            part = build_part(connection, group, processes, original, folder / name, scratch)
            if part is not None:
                return folder / name, part
        raise ReadingError(
            f"no room for the converted events in {scratch}.\n"
            "Free some space, or set TMPDIR to a larger disk",
            "no-space",
        )

    for path, part in map(part_of, _groups(files, processes)):
        stamp[path.name] = part
        result.problems += part["problems"]
        for process, count in part["counts"].items():
            result.counts[process] = result.counts.get(process, 0) + count
        if part["size_bytes"]:
            result.parts.append(path)
    if cached is not None and stamp != known and all(p.parent == cached for p in result.parts):
        _write_stamp(cached, stamp)
    return result


def cache_folder(source: Source) -> Path | None:
    """Return where what is made of a run is kept; None when nothing can be written there."""
    folder = source.root / ".cache" / f"events-{FORMAT_VERSION}"
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        # duckdb takes UTF-8 only.
        return None
    return folder if source.whole and (_stamp(folder) or _writable(folder)) else None


def _is_original(source: Source) -> bool:
    """Whether the files are the original logger's: no headers, times without an offset."""
    if source.headers or source.launch:
        return False
    for file in source.files[:20]:
        try:
            with file.path.open("rb") as opened:
                head = opened.read(4096)
        except OSError:
            continue
        if head:
            return _NAIVE_TIMESTAMP.search(head) is not None
    return False


def _groups(
    files: Iterable[EventFile], processes: Mapping[str, Process]
) -> Iterator[list[EventFile]]:
    """Cut the files into parts: those of the requests apart, whose events have other fields."""

    def of_requests(file: EventFile) -> bool:
        return processes[file.name].role == "agent_loop"

    ordered = sorted(
        files,
        key=lambda f: (not of_requests(f), -1 if f.step is None else f.step, f.name, f.shown),
    )
    for _, alike in groupby(ordered, of_requests):
        group: list[EventFile] = []
        size = 0
        for file in alike:
            if group and size + file.size_bytes > _PART_BYTES:
                yield group
                group, size = [], 0
            group.append(file)
            size += file.size_bytes
        yield group


def _fingerprint(file: EventFile, process: Process, original: bool) -> list[Any]:
    return [
        file.shown,
        file.size_bytes,
        file.modified_ns,
        process.role,
        process.rank,
        process.host,
        process.pid,
        process.shift_us,
        process.drift,
        process.drift_from_us,
        original,
    ]


def _digest(prints: list[Any]) -> str:
    return hashlib.sha256(json.dumps([_VERSION, prints]).encode()).hexdigest()[:16]


def _stamp(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "stamp.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    parts = content.get("parts")
    return parts if isinstance(parts, dict) else {}


def _write_stamp(folder: Path, parts: dict[str, Any]) -> None:
    """Name the parts that belong to the run as it is now, and remove the others."""
    with contextlib.suppress(OSError):
        partial = folder / f"stamp.{os.getpid()}.partial"
        partial.write_text(json.dumps({"version": _VERSION, "parts": parts}), encoding="utf-8")
        partial.replace(folder / "stamp.json")
        for path in folder.glob("part-*.parquet"):
            if path.name not in parts:
                path.unlink()


def _usable(connection: duckdb.DuckDBPyConnection, path: Path, part: Any) -> bool:
    """Whether a cached part is whole."""
    try:
        size, counts = part["size_bytes"], part["counts"]
        if not isinstance(part["problems"], list):
            return False
        if size == 0:
            return True
        if path.stat().st_size != size:
            return False
        row = connection.execute(f"SELECT count(*) FROM {scan('read_parquet', [path])}").fetchone()
    except (OSError, KeyError, TypeError, duckdb.Error):
        return False
    return row is not None and row[0] == sum(counts.values())


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return can_write(folder)


def _named_together(names: list[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:5])
    if len(names) > 5:
        shown += f" and {len(names) - 5} others"
    return [f"{shown} {one if len(names) == 1 else many}"]
