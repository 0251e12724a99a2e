"""Turn event files into Parquet parts, and keep them beside the run for the next time.

    <run>/.cache/events-1/part-<fingerprint>.parquet     of about 128 MiB of event files
    <run>/.cache/events-1/part-<fingerprint>.json        what is wrong with those files

A part is used again only if every file it was made from is the same one (inode), has the same size
and times, the same process identity and clock shift, and the conversion is the same.  A run that is
still written therefore converts its last part again, not all of it.  A part of which a file could
not be read is not kept.  A directory that cannot be written costs the cache and nothing else.  The
tables made from the events are there too (`table_cache`); `cache_folder` is how several commands share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.events.files import open_regular
from verl_profiler.events.json_values import is_list, is_object, mapping_or_empty
from verl_profiler.reading.cache_folder import CacheFolder, Draft, Kept, unwritable
from verl_profiler.reading.chunks import Part, build_part
from verl_profiler.reading.discovery import EventFile, Source, may_hold
from verl_profiler.reading.event_sql import PART_COLUMNS, event_query
from verl_profiler.reading.legacy_names import vocabulary
from verl_profiler.reading.processes import Process
from verl_profiler.reading.progress import doing
from verl_profiler.reading.salvage import folded
from verl_profiler.reading.scans import scan
from verl_profiler.reading.tables.schemas import FIELDS
from verl_profiler.units import some

# Parts that another conversion made are made again; the number counts changes of `salvage`.
_CONVERSION = json.dumps([9, event_query([]), vocabulary()])
CONVERSION = hashlib.sha256(_CONVERSION.encode()).hexdigest()[:16]
# Bytes of event files that become one part.
PART_BYTES = 128 << 20
# A compressed file counts as so many times its size.
_EXPANSION = 10
_NAIVE_TIMESTAMP = re.compile(rb'"timestamp":\s*"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?"')


@dataclass
class Converted:
    """What a run's event files became.

    Args:
        parts: Parquet files with the columns of `event_sql.PART_COLUMNS`.
        counts: Events by process name.
        problems: Sentences about files and lines.
        original: The files are in a vocabulary of the original logger.
        cache: Where what is made of the events may be kept; None where nothing may.
    """

    parts: list[Kept] = field(default_factory=list[Kept])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    original: bool = False
    cache: CacheFolder | None = None


def convert(
    connection: duckdb.DuckDBPyConnection,
    source: Source,
    processes: dict[str, Process],
    scratch: CacheFolder,
    *,
    cache: CacheFolder | None = None,
    steps: tuple[int, int] | None = None,
    groups: Sequence[list[EventFile]] | None = None,
) -> Converted:
    """Convert the event files of a run, or take the parts that an earlier call left.

    Args:
        connection: Does the work, within its memory limit.
        source: The run.
        processes: Its processes, by name.
        scratch: Where parts go when they are not kept.
        cache: The cache of the run, which must not be closed before the parts are read; None for none.
        steps: Convert only files that may hold events of these steps, with the files that share a
            part with them.
        groups: The files of each part, some of those of `groups_within`; all of these when None.
    """
    original = _is_original(source)
    result = Converted(original=original, cache=cache)
    result.problems += _named_together(
        [file.shown for file in source.files if not file.size_bytes], "is empty", "are empty"
    )
    chosen = groups_within(source, processes, steps) if groups is None else groups
    for number, group in enumerate(chosen, 1):
        prints = [_fingerprint(file, processes[file.name], original) for file in group]
        name = f"part-{_digest(prints)}"
        kept = None if cache is None else cache.find(name)
        part = None if kept is None else _checked(connection, kept)
        if kept is None or part is None:
            build = partial(build_part, connection, group, processes, original)
            with doing("event files", number, len(chosen)):
                kept, part = _built(build, name, result, scratch)
        result.problems += part.problems
        for process, count in part.counts.items():
            result.counts[process] = result.counts.get(process, 0) + count
        if kept.path is not None:
            result.parts.append(kept)
    result.problems = folded(result.problems)
    if result.cache is not None and steps is None and groups is None:
        result.cache.retire("part")
    return result


def groups_within(
    source: Source, processes: Mapping[str, Process], steps: tuple[int, int] | None = None
) -> list[list[EventFile]]:
    """Return the event files of each part that a run becomes, or of those parts for some steps."""
    files = (file for file in source.files if file.size_bytes)
    return [
        group
        for group in _groups(files, processes)
        if steps is None or any(may_hold(file.step, steps) for file in group)
    ]


def _built(
    build: Callable[[Draft, Path], Part], name: str, result: Converted, scratch: CacheFolder
) -> tuple[Kept, Part]:
    """Make a part, in the cache if it can be kept there."""
    folder = result.cache or scratch
    try:
        with folder.new() as draft:
            part = build(draft, scratch.path)
            if part.complete or folder is scratch:
                note = {"counts": part.counts, "problems": part.problems}
                if not part.empty:
                    return draft.publish(name, note), part
                folder.keep(name, note)
                return Kept(name, None, note), part
    except OSError as error:
        if folder is scratch:
            raise unwritable("the converted events", scratch, error) from error
    # Nor is anything kept that is made of it.
    result.cache = None
    return _built(build, name, result, scratch)


def _is_original(source: Source) -> bool:
    """Whether the files are the original logger's: no headers, times without an offset."""
    if source.headers or source.launch:
        return False
    for file in source.files[:20]:
        try:
            with open_regular(file.path) as opened:
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
        return processes[file.name].role != "agent_loop"

    ordered = sorted(
        files,
        key=lambda f: (of_requests(f), -1 if f.step is None else f.step, f.name, f.shown),
    )
    for _, alike in groupby(ordered, of_requests):
        group: list[EventFile] = []
        size = 0
        for file in alike:
            own = file.size_bytes * (_EXPANSION if file.is_packed else 1)
            if group and size + own > PART_BYTES:
                yield group
                group, size = [], 0
            group.append(file)
            size += own
        yield group


def _fingerprint(file: EventFile, process: Process, original: bool) -> list[Any]:
    # A cache that was copied along with its run, or comes from somebody else, is of other inodes.
    inode = changed_ns = 0
    with contextlib.suppress(OSError):
        status = file.path.stat()
        inode, changed_ns = status.st_ino, status.st_ctime_ns
    return [
        file.shown,
        file.size_bytes,
        file.modified_ns,
        inode,
        changed_ns,
        process.role,
        process.rank,
        process.of("host"),
        process.of("pid"),
        process.shift_us,
        process.drift,
        process.drift_from_us,
        process.first_us,
        process.header is not None,
        original,
    ]


def _digest(prints: list[Any]) -> str:
    return hashlib.sha256(json.dumps([CONVERSION, prints]).encode()).hexdigest()[:16]


def _checked(connection: duckdb.DuckDBPyConnection, kept: Kept) -> Part | None:
    """Return what a part from the cache holds; None if it is not a part of events."""
    note = mapping_or_empty(kept.note)
    counts, problems = note.get("counts"), note.get("problems")
    if not (
        is_object(counts)
        and all(type(count) is int for count in counts.values())
        and is_list(problems)
        and all(isinstance(problem, str) for problem in problems)
    ):
        return None
    if kept.path is None and counts:
        return None
    if kept.path is not None:
        rows = f"FROM {scan('read_parquet', [kept.path])}"
        try:
            columns = {row[0]: row[1] for row in connection.execute(f"DESCRIBE {rows}").fetchall()}
            counted = connection.execute(f"SELECT count(*) {rows}").fetchall()
        except duckdb.Error:
            return None
        known = {**dict.fromkeys(FIELDS), **columns}
        if counted != [(sum(counts.values()),)] or any(
            known.get(name, "") not in (None, kind) for name, kind in PART_COLUMNS.items()
        ):
            return None
    return Part(counts, problems, empty=kept.path is None)


def _named_together(names: list[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    return [f"{some(names, 5)} {one if len(names) == 1 else many}"]
