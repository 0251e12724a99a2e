"""Turn event files into Parquet parts, and keep them beside the run for the next time.

    <run>/.cache/events-1/part-<fingerprint>.parquet     of about 128 MiB of event files
    <run>/.cache/events-1/part-<fingerprint>.json        what is wrong with those files

A part is used again only if every file it was made from is the same one (inode), has the same size
and times, the same process identity and clock shift, and the conversion is the same.  A run that is
still written therefore converts its last part again, not all of it.  A part of which a file could
not be read is not kept.  A directory that cannot be written costs the cache and nothing else.  The
tables made from the events are there too (`table_cache`); `cache_folder` is how several commands share it.

A file that cannot be parsed, or that has values of wrong types, is read again as a repaired copy
(`salvage`), which reports what is wrong with it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import msgspec

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import expanded, open_regular, reason_of
from verl_profiler.reading.cache_folder import CacheFolder, Kept, unwritable
from verl_profiler.reading.discovery import EventFile, Source, may_hold
from verl_profiler.reading.event_sql import AS_PARQUET, PART_COLUMNS, event_query, list_files
from verl_profiler.reading.legacy_names import FIELD_ALIASES, vocabulary
from verl_profiler.reading.processes import Process
from verl_profiler.reading.progress import doing
from verl_profiler.reading.salvage import LineFault, repair, sentences
from verl_profiler.reading.scans import quoted, scan
from verl_profiler.reading.tables.schemas import FIELDS
from verl_profiler.units import some

# Parts that another conversion made are made again; the number counts changes of `salvage`.
_CONVERSION = json.dumps([11, event_query([]), vocabulary()])
CONVERSION = hashlib.sha256(_CONVERSION.encode()).hexdigest()[:16]
# Bytes of event files that become one part.
PART_BYTES = 128 << 20
# A compressed file counts as so many times its size.
_EXPANSION = 10
_NAIVE_TIMESTAMP = re.compile(rb'"timestamp":\s*"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?"')
# Fields become columns of a part if lines here have them; should more than `_MANY` of its events
# turn out to have others, it is made again with these.
_LOOK_BYTES = 8 << 10
_LOOK_FILES = 8
_MANY = 0.05
_KEY = re.compile(rb'"(\w+)":')
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./ ,:+@=%~-]+")


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
    empty = [file.shown for file in source.files if not file.size_bytes]
    if empty:
        result.problems.append(f"{some(empty, 5)} {'are' if empty[1:] else 'is'} empty")
    chosen = groups_within(source, processes, steps) if groups is None else groups
    faults: list[LineFault] = []
    for number, group in enumerate(chosen, 1):
        prints = [_fingerprint(file, processes[file.name], original) for file in group]
        made_from = json.dumps([CONVERSION, prints]).encode()
        name = f"part-{hashlib.sha256(made_from).hexdigest()[:16]}"
        kept = None if cache is None else cache.find(name)
        part = None if kept is None else _checked(connection, kept)
        if kept is None or part is None:
            build = partial(build_part, connection, group, processes, original)
            with doing("event files", number, len(chosen)):
                kept, part = _built(build, name, result, scratch)
        result.problems += part.problems
        faults += part.faults
        for process, count in part.counts.items():
            result.counts[process] = result.counts.get(process, 0) + count
        if kept.path is not None:
            result.parts.append(kept)
    result.problems += sentences(faults)
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
    build: Callable[[Path, Path], Part], name: str, result: Converted, scratch: CacheFolder
) -> tuple[Kept, Part]:
    """Make a part, in the cache if it can be kept there."""
    folder = result.cache or scratch
    try:
        with folder.new() as draft:
            part = build(draft, scratch.path)
            if part.complete or folder is scratch:
                note = msgspec.to_builtins(part)
                if not part.empty:
                    return folder.publish(draft, name, note), part
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


def _checked(connection: duckdb.DuckDBPyConnection, kept: Kept) -> Part | None:
    """Return what a part from the cache holds; None if it is not a part of events."""
    try:
        part = msgspec.convert(kept.note, Part)
    except msgspec.ValidationError:
        return None
    if kept.path is None and part.counts:
        return None
    if kept.path is not None:
        rows = f"FROM {scan('read_parquet', [kept.path])}"
        try:
            columns = {row[0]: row[1] for row in connection.execute(f"DESCRIBE {rows}").fetchall()}
            counted = connection.execute(f"SELECT count(*) {rows}").fetchall()
        except duckdb.Error:
            return None
        known = {**dict.fromkeys(FIELDS), **columns}
        if counted != [(sum(part.counts.values()),)] or any(
            known.get(name, "") not in (None, kind) for name, kind in PART_COLUMNS.items()
        ):
            return None
    return part


class Part(msgspec.Struct):
    """What a part holds, and what is wrong with its files; it is kept as the part's note.

    Args:
        counts: Events by process name.
        problems: Sentences about files.
        faults: What is wrong with lines.
        left: Which of `FIELDS` events have in `rest` only.
        complete: Every file could be read, whatever was in it.
        empty: There are no events, and nothing was written.
    """

    counts: dict[str, int] = {}
    problems: list[str] = []
    faults: list[LineFault] = []
    left: list[str] = []
    complete: bool = True
    empty: bool = False

    def cannot_read(self, file: EventFile, error: Exception) -> None:
        """Note a file that could not be read."""
        self.complete = False
        self.problems.append(f"{file.shown} cannot be read ({reason_of(error)})")


def build_part(
    connection: duckdb.DuckDBPyConnection,
    group: list[EventFile],
    processes: dict[str, Process],
    original: bool,
    target: Path,
    scratch: Path,
) -> Part:
    """Write the events of some files as Parquet.

    Args:
        connection: Does the work.
        group: The files.
        processes: By name.
        original: The files are in a vocabulary of the original logger.
        target: The file to write.
        scratch: A folder for repaired copies.

    Raises:
        OSError: `target` cannot be written.
        ReadingError: The events do not fit into memory.
    """
    result = Part()
    group = _unpacked(group, scratch, result)
    paths = {number: _plain_path(file, scratch) for number, file in enumerate(group)}
    repaired: set[int] = set()

    def repair_files(numbers: Iterable[int]) -> None:
        for number in numbers:
            file = _present(group[number])
            copy = scratch / f"repaired-{number}.jsonl"
            repaired.add(number)
            try:
                process = processes[file.name]
                running = process.header is not None and process.of("ended") is None
                growing = running and _changed(file)
                result.faults.extend(
                    repair(file.path, copy, file.shown, growing=growing, first_us=process.first_us)
                )
                empty = not copy.stat().st_size
            except (OSError, EOFError, zlib.error) as error:
                result.cannot_read(file, error)
                empty = True
            if empty:
                paths.pop(number)
            else:
                paths[number] = copy

    repair_files([number for number, file in enumerate(group) if not _ends_with_newline(file.path)])
    fields = set(FIELDS) if original else _likely_fields(group, processes)
    counts: list[tuple[int, int, int, int]] = []
    while paths:
        rows = _listing(group, paths, processes, original)
        list_files(connection, rows, scratch / "files.json")
        query = event_query(list(paths.values()), fields)
        try:
            connection.execute(f"COPY ({query}) TO '{quoted(target)}' {AS_PARQUET}")
            counts = connection.execute(
                "SELECT file_id, count(*), count(*) FILTER (flawed), count(rest) "
                f"FROM {scan('read_parquet', [target])} GROUP BY file_id"
            ).fetchall()
            left = sum(row[3] for row in counts)
            others = _other_fields(connection, target, fields) if left else set[str]()
            result.left = sorted(others)
        except duckdb.OutOfMemoryException as error:
            raise ReadingError(
                f"the events do not fit into the memory limit: {reason_of(error)}\n"
                "In Python, give load() more, for example memory_limit='4GB'; or read fewer steps with --steps",
                "memory-limit",
            ) from error
        except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException):
            # The query itself is wrong, not the files.
            raise
        except (OSError, duckdb.Error) as error:
            # Where the disk is full, no file is wrong.
            if str(target.absolute()) in str(error):
                raise OSError(reason_of(error)) from error
            CacheFolder(target.parent).check_room()
            unread = set(paths) - repaired
            broken = {number for number in unread if not _readable(connection, paths[number])}
            for number in () if unread else [*paths]:
                result.cannot_read(group[number], error)
                paths.pop(number)
            repair_files(sorted(broken or unread))
            continue
        if others and left > _MANY * sum(row[1] for row in counts):
            fields |= others
            continue
        flawed = {number for number, _, faults, _ in counts if faults} - repaired
        if not flawed:
            break
        repair_files(sorted(flawed))
    for number, count, *_ in counts if paths else []:
        name = group[number].name
        result.counts[name] = result.counts.get(name, 0) + count
    for pattern in ("repaired-*.jsonl", "unpacked-*.jsonl"):
        for leftover in scratch.glob(pattern):
            leftover.unlink()
    result.empty = not paths
    return result


def _unpacked(group: list[EventFile], scratch: Path, result: Part) -> list[EventFile]:
    """Replace compressed files by copies that are not; of damaged ones, as far as they go."""
    files: list[EventFile] = []
    for number, file in enumerate(map(_present, group)):
        if not file.is_packed:
            files.append(file)
            continue
        copy = scratch / f"unpacked-{number}.jsonl"
        with copy.open("wb") as out:
            try:
                with open_regular(file.path) as stored:
                    _expand(stored, out)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                result.problems.append(f"{file.shown} is damaged ({error}); it is read up to there")
            except OSError as error:
                result.cannot_read(file, error)
        files.append(replace(file, path=copy, size_bytes=copy.stat().st_size))
    return files


def _present(file: EventFile) -> EventFile:
    """Return a file as its process may have made it since it was listed: compressed."""
    packed = file.path.with_name(f"{file.path.name}.gz")
    if file.path.exists() or not packed.exists():
        return file
    return replace(file, path=packed, is_packed=True)


def _expand(packed: BinaryIO, out: BinaryIO) -> None:
    with expanded(packed) as lines:
        # Gives what precedes the place where the file is damaged.
        read = getattr(lines, "read1", lines.read)
        while content := read(1 << 16):
            out.write(content)


def _likely_fields(group: Sequence[EventFile], processes: Mapping[str, Process]) -> set[str]:
    """Return the `FIELDS` that the first and last lines of some files of each role have."""
    by_role: dict[str, list[Path]] = {}
    for each in group:
        by_role.setdefault(processes[each.name].role, []).append(each.path)
    found: set[bytes] = set()
    for paths in by_role.values():
        for path in paths[:: -(-len(paths) // _LOOK_FILES)]:
            with contextlib.suppress(OSError), open_regular(path) as file:
                found.update(_KEY.findall(file.read(_LOOK_BYTES)))
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _LOOK_BYTES))
                found.update(_KEY.findall(file.read(_LOOK_BYTES)))
    return {name for name in FIELDS if name.encode() in found}


def _other_fields(connection: duckdb.DuckDBPyConnection, part: Path, fields: set[str]) -> set[str]:
    """Return the `FIELDS` that events of a part have in `rest` only, under any of their names."""
    rows = connection.execute(
        f"SELECT DISTINCT unnest(json_keys(rest)) FROM {scan('read_parquet', [part])} "
        "WHERE rest IS NOT NULL"
    ).fetchall()
    there = {key for (key,) in rows}
    return {
        name
        for name in set(FIELDS).difference(fields)
        if not there.isdisjoint((name, *FIELD_ALIASES.get(name, ())))
    }


def _listing(
    group: list[EventFile],
    paths: dict[int, Path],
    processes: dict[str, Process],
    original: bool,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, path in paths.items():
        file, process = group[number], processes[group[number].name]
        rows.append(
            {
                "file_id": number,
                "path": str(path),
                "name": file.name,
                "role": process.role,
                "rank": process.rank,
                "host": process.of("host"),
                "pid": process.of("pid"),
                "step": file.step,
                "shift_us": process.shift_us,
                "drift": process.drift,
                "drift_from_us": process.drift_from_us,
                "original": original,
                "first_us": process.first_us,
            }
        )
    return rows


def _ends_with_newline(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return False


def _readable(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    try:
        connection.execute(
            "SELECT count(json) FROM "
            + scan("read_ndjson_objects", [path], f"maximum_object_size = {16 << 20}")
        )
    except duckdb.Error:
        return False
    return True


def _plain_path(file: EventFile, scratch: Path) -> Path:
    """Return an absolute path without characters that duckdb takes for patterns."""
    path = file.path.absolute()
    if _PLAIN_PATH.fullmatch(str(path)):
        return path
    digest = hashlib.sha256(os.fsencode(file.path)).hexdigest()[:16]
    link = scratch / f"link-{digest}.jsonl"
    if not link.exists():
        link.symlink_to(file.path.resolve())
    return link


def _changed(file: EventFile) -> bool:
    try:
        return file.path.stat().st_size != file.size_bytes
    except OSError:
        return False
