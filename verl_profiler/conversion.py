"""Turn event files into Parquet parts, and keep them beside the run for the next time.

    <run>/.cache/events-1/part-<fingerprint>.parquet     about 128 MiB of event files each
    <run>/.cache/events-1/stamp.json                     what each part was made from

A part is used again only if every file it was made from has the same size and modification time,
the same process identity and clock shift, and this module the same `_VERSION`.  A run that is
still written therefore converts its last part again, not all of it.  A directory that cannot be
written costs the cache and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.aliases import vocabulary
from verl_profiler.errors import ReadingError
from verl_profiler.events import FORMAT_VERSION
from verl_profiler.processes import Process
from verl_profiler.repair import LINE_LIMIT_BYTES, repair
from verl_profiler.sources import EventFile, Source

__all__ = ["PART_COLUMNS", "Converted", "convert"]

_VERSION = 1
_PART_BYTES = 128 << 20
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./ ,:+@=%~-]+")
_NAIVE_TIMESTAMP = re.compile(rb'"timestamp":\s*"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?"')

PART_COLUMNS = {
    "file_id": "INTEGER",
    "flawed": "BOOLEAN",
    "name": "VARCHAR",
    "role": "VARCHAR",
    "rank": "INTEGER",
    "host": "VARCHAR",
    "pid": "INTEGER",
    "step": "INTEGER",
    "event": "VARCHAR",
    "family": "VARCHAR",
    "end_us": "BIGINT",
    "duration_us": "BIGINT",
    "request_id": "VARCHAR",
    "turn": "INTEGER",
    "validate": "BOOLEAN",
    "sample": "VARCHAR",
    "session": "VARCHAR",
    "status": "VARCHAR",
    "error": "VARCHAR",
    "workid": "VARCHAR",
    "recorded": "VARCHAR",
    "extra": "JSON",
}

_FILE_COLUMNS = {
    "file_id": "INTEGER",
    "path": "VARCHAR",
    "name": "VARCHAR",
    "role": "VARCHAR",
    "rank": "INTEGER",
    "host": "VARCHAR",
    "pid": "INTEGER",
    "step": "INTEGER",
    "shift_us": "BIGINT",
    "original": "BOOLEAN",
}

_TOP = json.dumps(
    {
        **dict.fromkeys(("timestamp", "event", "duration_sec", "workid", "step"), "VARCHAR"),
        "extra": "JSON",
    }
)
_IDENTITY = json.dumps(
    dict.fromkeys(
        ("request_id", "turn", "validate", "sample", "session", "status", "error"), "VARCHAR"
    )
)
_KEYS = ("timestamp", "event", "duration_sec", "extra", "workid", "step")
_WITHOUT_KEYS = json.dumps(dict.fromkeys(_KEYS))

# A cast to TIMESTAMP drops the offset from UTC without a word; one to TIMESTAMPTZ takes twice as
# long (duckdb 2.0).  Times without an offset are taken for UTC.
_MOMENT = """CASE
        WHEN ends_with(timestamp, '+00:00') AND length(timestamp) >= 25
            THEN epoch_us(try_cast(timestamp AS TIMESTAMP))
        WHEN length(timestamp) >= 19 THEN epoch_us(try_cast(timestamp AS TIMESTAMPTZ))
    END"""

# Lines as the recorder writes them, whose last key is the step of the folder.
_REGULAR = """
    SELECT filename, {moment} AS moment_us, event AS recorded_event,
        try_cast(duration_sec AS DOUBLE) AS duration_s, extra, workid, step AS line_step,
        duration_sec IS NOT NULL AND try_cast(duration_sec AS DOUBLE) IS NULL AS mistyped
    FROM read_json([{paths}], format = 'newline_delimited', filename = true,
        maximum_object_size = {limit},
        columns = {{timestamp: 'VARCHAR', event: 'VARCHAR', duration_sec: 'VARCHAR',
            extra: 'JSON', workid: 'VARCHAR', step: 'INTEGER'}})
"""

# Any other lines: values are read as text and cast one by one, and keys that the format does not
# know (keywords of the caller of `log_manager.log`) go into `extra`.
_IRREGULAR = """
    SELECT filename, {text_moment} AS moment_us,
        top.event AS recorded_event,
        try_cast(top.duration_sec AS DOUBLE) AS duration_s,
        CASE
            WHEN len(list_distinct(list_concat(json_keys(line), [{keys}]))) = {key_count}
                THEN top.extra
            ELSE json_merge_patch(
                json_merge_patch(line, '{without_keys}'), coalesce(top.extra, '{{}}'))
        END AS extra,
        top.workid AS workid,
        whole_number(top.step) AS line_step,
        (top.duration_sec IS NOT NULL AND try_cast(top.duration_sec AS DOUBLE) IS NULL)
            OR (top.step IS NOT NULL AND whole_number(top.step) IS NULL) AS mistyped
    FROM (
        SELECT filename, json AS line, json_transform(json, '{top}') AS top
        FROM read_ndjson_objects([{paths}], filename = true, maximum_object_size = {limit})
    )
"""

_SELECT = """
WITH lines AS ({lines}
), typed AS (
    SELECT f.*, lines.* EXCLUDE (filename, duration_s, workid),
        nullif(workid, f.rank::VARCHAR) AS workid,
        CASE WHEN moment_us BETWEEN 0 AND 9214646400000000 THEN moment_us + f.shift_us END
            AS end_us,
        CASE WHEN duration_s BETWEEN 0 AND 1e9 THEN round(duration_s * 1e6)::BIGINT END
            AS duration_us,
        duration_s IS NOT NULL AND NOT coalesce(duration_s BETWEEN 0 AND 1e9, false)
            AS bad_duration,
        json_transform(CASE WHEN starts_with(extra::VARCHAR, '{{') THEN extra END,
            '{identity}') AS who
    FROM lines JOIN part_files AS f ON f.path = lines.filename
)
SELECT
    t.file_id,
    coalesce(
        t.mistyped OR t.bad_duration OR t.recorded_event IS NULL OR t.recorded_event = ''
        OR t.recorded_event[1] IN ('{{', '[') OR t.end_us IS NULL
        OR (t.who.turn IS NOT NULL AND whole_number(t.who.turn) IS NULL)
        OR coalesce(t.who.validate, 'true') NOT IN ('true', 'false')
        OR NOT starts_with(t.extra::VARCHAR, '{{'),
        false) AS flawed,
    t.name, t.role, t.rank, t.host, t.pid,
    coalesce(t.line_step, t.step) AS step,
    coalesce(v.event, t.recorded_event) AS event,
    CASE
        WHEN t.role = 'trainer' AND t.duration_us IS NOT NULL AND coalesce(v.phase, true)
            THEN 'trainer'
        ELSE coalesce(v.family, 'user')
    END AS family,
    t.end_us, t.duration_us,
    t.who.request_id AS request_id,
    whole_number(t.who.turn) + coalesce(v.turn_shift, 0) AS turn,
    coalesce(t.who.validate = 'true', false) AS validate,
    coalesce(t.who.sample, CASE WHEN t.original THEN t.extra->>'$.batch_data_id' END) AS sample,
    t.who.session AS session, t.who.status AS status, t.who.error AS error,
    t.workid,
    CASE WHEN v.event <> t.recorded_event THEN t.recorded_event END AS recorded,
    CASE WHEN t.extra::VARCHAR <> '{{}}' THEN t.extra END AS extra
FROM typed AS t
LEFT JOIN vocabulary AS v ON v.recorded = t.recorded_event AND v.original = t.original
"""


@dataclass
class Converted:
    """What a run's event files became.

    Args:
        parts: Parquet files with `PART_COLUMNS`.
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
    result = Converted(original=_is_original(source))
    folder, known = scratch, {}
    keep = cache and source.whole
    if keep:
        cached = source.root / ".cache" / f"events-{FORMAT_VERSION}"
        known = _stamp(cached)
        if known or _writable(cached):
            folder = cached
    stamp: dict[str, Any] = {}
    files = [file for file in source.files if file.size_bytes]
    result.problems += _named_together(
        [file.shown for file in source.files if not file.size_bytes], "is empty", "are empty"
    )
    for group in _groups(files):
        prints = [_fingerprint(file, processes[file.name], result.original) for file in group]
        name = f"part-{_digest(prints)}.parquet"
        part = known.get(name)
        if part is None or not _usable(connection, folder / name, part):
            part = _build(connection, group, processes, result.original, folder / name, scratch)
            if part is None:
                folder = scratch
                part = _build(connection, group, processes, result.original, folder / name, scratch)
        if part is None:
            raise ReadingError(
                f"no room for the converted events in {folder}.\n"
                "Free some space, or set TMPDIR to a larger disk",
                "no-space",
            )
        stamp[name] = part
        result.problems += part["problems"]
        for process, count in part["counts"].items():
            result.counts[process] = result.counts.get(process, 0) + count
        if part["size_bytes"]:
            result.parts.append(folder / name)
    if keep and folder != scratch and stamp != known:
        _write_stamp(folder, stamp)
    return result


def _build(
    connection: duckdb.DuckDBPyConnection,
    group: list[EventFile],
    processes: dict[str, Process],
    original: bool,
    target: Path,
    scratch: Path,
) -> dict[str, Any] | None:
    """Write one part; return its entry in the stamp, or None if `target` cannot be written."""
    problems: list[str] = []
    paths = {number: _plain_path(file, scratch) for number, file in enumerate(group)}
    repaired: set[int] = set()

    def mend(numbers: Iterable[int]) -> None:
        for number in numbers:
            file = group[number]
            copy = scratch / f"repaired-{target.stem}-{number}.jsonl"
            repaired.add(number)
            try:
                running = processes[file.name].has_header and processes[file.name].ended is None
                growing = running and _changed(file)
                problems.extend(repair(file.path, copy, file.shown, growing=growing))
                empty = not copy.stat().st_size
            except OSError as error:
                problems.append(f"{file.shown} cannot be read: {error.strerror or error}")
                empty = True
            if empty:
                paths.pop(number)
            else:
                paths[number] = copy

    shapes = {number: _shape(file) for number, file in enumerate(group)}
    regular = {number for number, shape in shapes.items() if shape == "regular"}
    mend([number for number, shape in shapes.items() if shape == "unfinished"])
    counts: list[tuple[int, int, int]] = []
    partial = target.with_name(f"{target.stem}.{os.getpid()}.partial")
    while paths:
        _set_part_files(connection, group, paths, processes, original, scratch)
        query = _select(
            [path for number, path in paths.items() if number in regular - repaired],
            [path for number, path in paths.items() if number not in regular - repaired],
        )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            connection.execute(
                f"COPY ({query}) TO '{_quoted(partial)}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
            )
            counts = connection.execute(
                "SELECT file_id, count(*), count(*) FILTER (flawed) "
                f"FROM read_parquet('{_quoted(partial)}') GROUP BY file_id"
            ).fetchall()
        except duckdb.OutOfMemoryException as error:
            raise ReadingError(
                f"the events do not fit into the memory limit: {_first_line(error)}\n"
                "Give more, for example memory_limit='4GB'",
                "memory-limit",
            ) from error
        except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException):
            # The query itself is wrong, not the files.
            raise
        except (OSError, duckdb.Error) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if not _can_write(target.parent):
                return None
            mistyped = _named_in(error, paths) & (regular - repaired)
            unreadable = {
                number
                for number, path in paths.items()
                if number not in repaired and not _readable(connection, path)
            }
            if unreadable:
                mend(sorted(unreadable))
            elif mistyped:
                regular -= mistyped
            elif regular - repaired:
                regular.clear()
            elif set(paths) - repaired:
                mend(sorted(set(paths) - repaired))
            else:
                for number in _named_in(error, paths) or set(paths):
                    problems.append(f"{group[number].shown} cannot be read ({_first_line(error)})")
                    paths.pop(number)
            continue
        flawed = {number for number, _, faults in counts if faults} - repaired
        if not flawed:
            partial.replace(target)
            break
        mend(sorted(flawed))
    with contextlib.suppress(OSError):
        partial.unlink()
    by_process: dict[str, int] = {}
    for number, count, _ in counts if paths else []:
        name = group[number].name
        by_process[name] = by_process.get(name, 0) + count
    for leftover in scratch.glob(f"repaired-{target.stem}-*.jsonl"):
        leftover.unlink()
    return {
        "size_bytes": target.stat().st_size if paths else 0,
        "counts": by_process,
        "problems": problems,
    }


def _shape(file: EventFile) -> str:
    """Return whether all lines of a file end as the recorder ends them, in one fast look.

    Returns:
        `regular`, `irregular`, or `unfinished` when the last line has no end.
    """
    compact, spaced = f'"step":{file.step}}}\n'.encode(), f'"step": {file.step}}}\n'.encode()
    lines = ended = 0
    last = b"\n"
    try:
        with file.path.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                chunk += opened.readline(LINE_LIMIT_BYTES)
                found = chunk.count(b"\n")
                lines += found
                matched = chunk.count(compact)
                ended += matched if matched == found else matched + chunk.count(spaced)
                last = chunk[-1:]
    except OSError:
        return "unfinished"
    if last != b"\n":
        return "unfinished"
    return "regular" if lines == ended else "irregular"


def _select(regular: list[Path], irregular: list[Path]) -> str:
    words = {
        "moment": _MOMENT,
        "text_moment": re.sub(r"\btimestamp\b", "top.timestamp", _MOMENT),
        "top": _TOP,
        "identity": _IDENTITY,
        "without_keys": _WITHOUT_KEYS,
        "keys": ", ".join(f"'{key}'" for key in _KEYS),
        "key_count": len(_KEYS),
        "limit": 2 * LINE_LIMIT_BYTES,
    }
    lines = [
        template.format(paths=", ".join(f"'{_quoted(path)}'" for path in paths), **words)
        for template, paths in ((_REGULAR, regular), (_IRREGULAR, irregular))
        if paths
    ]
    return _SELECT.format(lines="    UNION ALL BY NAME".join(lines), **words)


def _set_part_files(
    connection: duckdb.DuckDBPyConnection,
    group: list[EventFile],
    paths: dict[int, Path],
    processes: dict[str, Process],
    original: bool,
    scratch: Path,
) -> None:
    _prepare(connection)
    rows = []
    for number, path in paths.items():
        file = group[number]
        process = processes[file.name]
        rows.append(
            {
                "file_id": number,
                "path": str(path),
                "name": file.name,
                "role": process.role,
                "rank": process.rank,
                "host": process.host,
                "pid": process.pid,
                "step": file.step,
                "shift_us": process.shift_us,
                "original": original,
            }
        )
    listing = scratch / "part_files.json"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in _FILE_COLUMNS.items())
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE part_files AS SELECT * FROM "
        f"read_json('{_quoted(listing)}', format = 'newline_delimited', columns = {{{columns}}})"
    )


def _prepare(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute(
        "CREATE OR REPLACE TEMP MACRO whole_number(text) AS "
        "CASE WHEN regexp_full_match(text, '-?[0-9]{1,9}') THEN text::INTEGER END"
    )
    rows = ", ".join(
        f"({original}, '{recorded}', '{event}', '{family}', {shift}, {phase})"
        for original, recorded, event, family, shift, phase in vocabulary()
    )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE vocabulary AS SELECT * FROM "
        f"(VALUES {rows}) AS v(original, recorded, event, family, turn_shift, phase)"
    )


def _named_in(error: Exception, paths: dict[int, Path]) -> set[int]:
    text = str(error)
    return {number for number, path in paths.items() if f'"{path}"' in text}


def _readable(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    try:
        connection.execute(
            f"SELECT count(json) FROM read_ndjson_objects('{_quoted(path)}', "
            f"maximum_object_size = {2 * LINE_LIMIT_BYTES})"
        )
    except duckdb.Error:
        return False
    return True


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


def _groups(files: list[EventFile]) -> Iterator[list[EventFile]]:
    group: list[EventFile] = []
    size = 0
    for file in sorted(files, key=lambda f: (-1 if f.step is None else f.step, f.name, f.shown)):
        if group and size + file.size_bytes > _PART_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size_bytes
    if group:
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
        row = connection.execute(f"SELECT count(*) FROM read_parquet('{_quoted(path)}')").fetchone()
    except (OSError, KeyError, TypeError, duckdb.Error):
        return False
    return row is not None and row[0] == sum(counts.values())


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return _can_write(folder)


def _can_write(folder: Path) -> bool:
    probe = folder / f"probe.{os.getpid()}.partial"
    try:
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError:
        return False
    return True


def _plain_path(file: EventFile, scratch: Path) -> Path:
    """Return a path without characters that duckdb takes for patterns."""
    if _PLAIN_PATH.fullmatch(str(file.path)):
        return file.path
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


def _named_together(names: list[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:5])
    if len(names) > 5:
        shown += f" and {len(names) - 5} others"
    return [f"{shown} {one if len(names) == 1 else many}"]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
