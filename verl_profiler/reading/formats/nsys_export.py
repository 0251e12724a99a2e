"""Read SQLite exports of nsys reports (`nsys export --type sqlite`) into tables.

nsys writes a table only if it has rows for it, and versions differ, so every table and column is
checked before it is queried.  Times become nanoseconds since 1970; they agree with the events of the
same process to a few tenths of a millisecond.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import read_json, reason_of, status_of_regular
from verl_profiler.events.json_values import is_list
from verl_profiler.events.vocabulary import process_name
from verl_profiler.reading.descriptions import Capture
from verl_profiler.reading.tables.schemas import SCHEMAS
from verl_profiler.reading.tables.tables import Tables

SUMMARY = "captures.json"
# Event types of NVTX_EVENTS.
_CATEGORY, _PUSH_POP, _START_END, _DOMAIN = 33, 59, 60, 75
# GPU work: table → its kind, and the column with its name.
_WORK = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("kernel", "demangledName"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("graph", None),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("memcpy", None),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("memset", None),
}
# The process in a `globalTid` or `globalPid`: the same bits in both.
_PROCESS = "0x0000FFFFFF000000"
_TABLES = {
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "TARGET_INFO_CUDA_DEVICE",
    "TARGET_INFO_SESSION_START_TIME",
    *_WORK,
}
# The columns of text in rows of ranges and of work.
_RANGE_TEXTS, _WORK_TEXTS = frozenset((0, 1, 2, 4)), frozenset((0, 1, 2))
_NAME_LIMIT = 4_096
_UNPRINTED = {0: " ", 10: " ", 13: " "}


@dataclass
class Export:
    """The content of one export.

    Args:
        ranges: NVTX ranges: domain, name, category, payload, kind, pid, tid, begin_ns, end_ns.
        work: Kernels, graphs and copies: kind, name, gpu, stream, pid, tid, launch_ns, begin_ns,
            end_ns; pid and tid are those of the call that launched it.
        problems: What is missing in it, as sentences.
        dated: Whether it has a wall-clock start; otherwise all times count from its start.
        left_out: Number of rows with invalid values.
    """

    ranges: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    work: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    problems: list[str] = field(default_factory=list[str])
    dated: bool = True
    left_out: int = 0


def read(path: Path) -> Export:
    """Read one export.

    Raises:
        ReadingError: If the file is not an nsys export.
    """
    try:
        status_of_regular(path)
    except OSError as error:
        raise ReadingError(f"{path} cannot be read: {reason_of(error)}.", "unreadable") from error
    try:
        # Immutable: SQLite opens no journal or lock beside it.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            return _read(connection)
    except (sqlite3.Error, OverflowError, UnicodeError) as error:
        raise ReadingError(f"{path} is not an nsys export: {error}.", "unreadable") from None


def _read(connection: sqlite3.Connection) -> Export:
    columns = {
        name: {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if name in _TABLES
    }
    found = Export()
    start_ns = 0
    if "TARGET_INFO_SESSION_START_TIME" in columns:
        row = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        start_ns = row[0] if row and type(row[0]) is int and row[0] > 0 else 0
    found.dated = bool(start_ns)
    if not found.dated:
        found.problems.append("it has no wall-clock start, so it cannot be joined with the events")
    if "NVTX_EVENTS" in columns:
        rows = _ranges(connection, start_ns)
        found.ranges = list(_possible(rows, _RANGE_TEXTS, (7,), found))
    else:
        found.problems.append("it has no NVTX ranges")
    for table, (kind, name) in _WORK.items():
        if table in columns:
            rows = _work(connection, columns, table, kind, name, start_ns)
            found.work += _possible(rows, _WORK_TEXTS, (7, 8), found)
    if not found.work:
        found.problems.append("it has no GPU work")
    if found.left_out:
        found.problems.append("rows with invalid values are left out")
    return found


def _possible(
    rows: Iterable[tuple[Any, ...]],
    texts: frozenset[int],
    needed: tuple[int, ...],
    found: Export,
) -> Iterator[tuple[Any, ...]]:
    """Yield rows whose values have the types of their columns; SQLite stores any type in any column.

    Args:
        rows: Rows of a query.
        texts: The columns of text; all others hold 64-bit integers.
        needed: The columns that must not be NULL.
        found: Gets the number of other rows.
    """
    for row in rows:
        if all(
            value is None or (type(value) is int) or place in texts
            for place, value in enumerate(row)
        ) and all(row[place] is not None for place in needed):
            yield tuple(
                value
                if place not in texts or value is None
                else str(value)[:_NAME_LIMIT].translate(_UNPRINTED)
                for place, value in enumerate(row)
            )
        else:
            found.left_out += 1


def _ranges(connection: sqlite3.Connection, start_ns: int) -> Iterator[tuple[Any, ...]]:
    query = f"""
        WITH named AS (
            SELECT *, globalTid & {_PROCESS} AS process,
                coalesce((SELECT value FROM StringIds WHERE id = textId), text) AS name
            FROM NVTX_EVENTS
        ), domains AS (SELECT domainId, process, name FROM named WHERE eventType = {_DOMAIN}),
        categories AS (
            SELECT domainId, process, category, name FROM named WHERE eventType = {_CATEGORY}
        )
        SELECT coalesce(d.name, ''), e.name, c.name, coalesce(e.int64Value, e.uint64Value),
            CASE e.eventType WHEN {_PUSH_POP} THEN 'push' ELSE 'start' END,
            (e.globalTid >> 24) & 0xFFFFFF, e.globalTid & 0xFFFFFF, e.start + ?, e.end + ?
        FROM named AS e
        LEFT JOIN domains AS d ON d.domainId = e.domainId AND d.process = e.process
        LEFT JOIN categories AS c ON c.domainId = e.domainId AND c.process = e.process
            AND c.category = e.category
        WHERE e.eventType IN ({_PUSH_POP}, {_START_END})
        ORDER BY e.start
    """
    return connection.execute(query, (start_ns, start_ns))


def _work(
    connection: sqlite3.Connection,
    columns: dict[str, set[str]],
    table: str,
    kind: str,
    name: str | None,
    start_ns: int,
) -> Iterator[tuple[Any, ...]]:
    has = columns[table]
    text = f"(SELECT value FROM StringIds WHERE id = w.{name})" if name in has else f"'{kind}'"
    runtime = columns.get("CUPTI_ACTIVITY_KIND_RUNTIME", set())
    launch, joined = "NULL, NULL", ""
    if {"correlationId", "globalTid"} <= runtime and {"correlationId", "globalPid"} <= has:
        launch = f"r.globalTid & 0xFFFFFF, r.start + {start_ns}"
        joined = (
            "LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS r ON r.correlationId = w.correlationId "
            f"AND (r.globalTid & {_PROCESS}) = (w.globalPid & {_PROCESS})"
        )
    gpu = "CAST(w.deviceId AS TEXT)" if "deviceId" in has else "''"
    devices = columns.get("TARGET_INFO_CUDA_DEVICE", set())
    if {"cudaId", "pid", "uuid"} <= devices and "deviceId" in has and "globalPid" in has:
        # Processes number their visible GPUs from 0; the uuid identifies a GPU.
        gpu = (
            "coalesce((SELECT uuid FROM TARGET_INFO_CUDA_DEVICE AS d WHERE d.cudaId = w.deviceId "
            f"AND d.pid = (w.globalPid >> 24) & 0xFFFFFF), {gpu})"
        )
    stream = "w.streamId" if "streamId" in has else "NULL"
    pid = "(w.globalPid >> 24) & 0xFFFFFF" if "globalPid" in has else "NULL"
    return connection.execute(
        f"SELECT '{kind}', {text}, {gpu}, {stream}, {pid}, {launch}, w.start + ?, w.end + ? "
        f'FROM "{table}" AS w {joined} ORDER BY w.start',
        (start_ns, start_ns),
    )


def take_captures(tables: Tables, roots: Iterable[tuple[str, Path]]) -> list[str]:
    """Add the captures of runs to the tables `captures`, `capture_ranges` and `capture_work`.

    Args:
        tables: The tables of the runs.
        roots: Label and run directory of each.

    Returns:
        What is wrong with them, as sentences.
    """
    problems: list[str] = []
    missing: dict[str, list[str]] = {}
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("captures", "capture_ranges", "capture_work")
    }
    for label, root in roots:
        for capture in _summary(root / "nsight" / SUMMARY, problems):
            row = _capture_row(label, capture)
            rows["captures"].append(row)
            if capture["problem"]:
                whose = f"{row['name']} in step {capture['step']}"
                problems.append(f"capture of {whose}: {capture['problem']}")
            path = root / "nsight" / str(capture["file"]).replace(".nsys-rep", ".sqlite")
            if path.suffix != ".sqlite" or not os.path.lexists(path):
                continue
            try:
                found = read(path)
            except ReadingError as error:
                problems.append(str(error))
                continue
            for problem in found.problems:
                missing.setdefault(problem, []).append(path.name)
            whose = (label, capture["step"], row["name"], capture["file"], capture["host"])
            for name, each in (("capture_ranges", found.ranges), ("capture_work", found.work)):
                rows[name] += (
                    dict(zip(SCHEMAS[name], (*whose, *values), strict=True)) for values in each
                )
    problems += [
        f"{names[0]}: {problem}" + (f"; and {len(names) - 1} other exports" if names[1:] else "")
        for problem, names in missing.items()
    ]
    for name, listed in rows.items():
        tables.create_table(name, listed)
    return problems


def _summary(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the captures that `verl-profiler collect` listed, without invalid entries."""
    if not os.path.lexists(path):
        return []
    shown = f"nsight/{SUMMARY}"
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{shown} cannot be read ({reason_of(error)}); captures are missing")
        return []
    listed: list[Any] = content if is_list(content) else [content]
    captures: list[dict[str, Any]] = []
    for each in listed:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(each, Capture)
            captures.append(each)
    if len(captures) < len(listed):
        problems.append(f"{shown}: {len(listed) - len(captures)} entries are not captures")
    return captures


def _capture_row(label: str, capture: dict[str, Any]) -> dict[str, Any]:
    whose = [capture[key] for key in ("role", "rank", "host", "pid")]
    return {
        "run": label,
        # As the event files are named, so that both can be joined.
        "name": process_name(*whose),
        **{key: capture[key] for key in SCHEMAS["captures"] if key in capture},
    }
