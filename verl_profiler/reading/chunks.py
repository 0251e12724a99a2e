"""Convert some event files into one Parquet part, whatever is wrong with them.

A file that cannot be parsed, or that has values of wrong types, is read again as a repaired copy
(`salvage`), which reports what is wrong with it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import duckdb

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import expanded, open_regular, reason_of
from verl_profiler.reading.cache_folder import Draft
from verl_profiler.reading.discovery import EventFile
from verl_profiler.reading.event_sql import AS_PARQUET, event_query, list_files
from verl_profiler.reading.processes import Process
from verl_profiler.reading.salvage import repair
from verl_profiler.reading.scans import quoted, scan
from verl_profiler.reading.tables.schemas import FIELDS

# Fields become columns of a part if lines here have them; should more than `_MANY` of its events
# turn out to have others, it is made again with these.
_LOOK_BYTES = 8 << 10
_LOOK_FILES = 8
_MANY = 0.05
_KEY = re.compile(rb'"(\w+)":')
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./ ,:+@=%~-]+")


@dataclass
class Part:
    """What a part holds, and what is wrong with its files.

    Args:
        counts: Events by process name.
        problems: Sentences about files and lines.
        complete: Every file could be read, whatever was in it.
        empty: There are no events, and nothing was written.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
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
    target: Draft,
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
    problems = result.problems
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
                problems.extend(
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
            connection.execute(f"COPY ({query}) TO '{quoted(target.path)}' {AS_PARQUET}")
            counts = connection.execute(
                "SELECT file_id, count(*), count(*) FILTER (flawed), count(rest) "
                f"FROM {scan('read_parquet', [target.path])} GROUP BY file_id"
            ).fetchall()
            others = set[str]()
            if sum(row[3] for row in counts) > _MANY * sum(row[1] for row in counts):
                others = _other_fields(connection, target.path, fields)
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
            if str(target.path) in str(error):
                raise OSError(reason_of(error)) from error
            target.try_to_write()
            unread = set(paths) - repaired
            broken = {number for number in unread if not _readable(connection, paths[number])}
            for number in () if unread else [*paths]:
                result.cannot_read(group[number], error)
                paths.pop(number)
            repair_files(sorted(broken or unread))
            continue
        if others:
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
    """Return the `FIELDS` that events of a part have in `rest` only."""
    rows = connection.execute(
        f"SELECT DISTINCT unnest(json_keys(rest)) FROM {scan('read_parquet', [part])} "
        "WHERE rest IS NOT NULL"
    ).fetchall()
    return set(FIELDS).difference(fields).intersection(key for (key,) in rows)


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
