"""Read what `nsys export --type sqlite` makes of the captures of a run into tables.

nsys makes a table only when it has rows for it, and versions differ, so every table and column is
looked for before it is asked.  Times become nanoseconds since 1970; they agree with the events of
the same process to a few tenths of a millisecond.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from verl_profiler.errors import ReadingError
from verl_profiler.events import process_name
from verl_profiler.schemas import SCHEMAS
from verl_profiler.tables import Tables

__all__ = ["Export", "export", "read", "take_captures"]

SUMMARY = "captures.json"
# Event types of NVTX_EVENTS.
_CATEGORY, _PUSH_POP, _START_END, _DOMAIN = 33, 59, 60, 75
# Work of a GPU: table → what it is, and the column with its name.
_WORK = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("kernel", "demangledName"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("graph", None),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("memcpy", None),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("memset", None),
}
# The process in a `globalTid` or `globalPid`: the same bits in both.
_PROCESS = "0x0000FFFFFF000000"


@dataclass
class Export:
    """What one export holds.

    Args:
        ranges: NVTX ranges: domain, name, category, payload, kind, pid, tid, begin_ns, end_ns.
        work: Kernels, graphs and copies: kind, name, gpu, stream, pid, tid, launch_ns, begin_ns,
            end_ns; pid and tid are those of the call that launched it.
        problems: What is missing in it, in plain words.
        dated: Whether it says at what time of day it began; otherwise all times count from there.
    """

    ranges: list[tuple[Any, ...]] = field(default_factory=list)
    work: list[tuple[Any, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    dated: bool = True


def export(report: Path) -> Path:
    """Turn a report into SQLite beside it, unless that is there already.

    Raises:
        ReadingError: If nsys is not here, or cannot read the report.
    """
    target = report.with_suffix(".sqlite")
    if target.exists() and target.stat().st_mtime >= report.stat().st_mtime:
        return target
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ReadingError(
            "nsys is not on PATH, and only nsys can read its reports.\nExport them where it is: "
            f"nsys export --type sqlite -o {target} {report}",
            "no-nsys",
        )
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite=true", "-q", "true"]
    done = subprocess.run(  # noqa: S603
        [*command, "-o", str(target), str(report)], capture_output=True, text=True, check=False
    )
    if done.returncode or not target.exists():
        said = (done.stderr or done.stdout).strip()[-300:]
        raise ReadingError(
            f"nsys cannot export {report}: {said}\nA newer nsys reads older reports, not the other "
            "way round.",
            "no-nsys",
        )
    return target


def read(path: Path) -> Export:
    """Read one export.

    Raises:
        ReadingError: If the file is not an export of nsys.
    """
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return _read(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ReadingError(f"{path} is not an export of nsys: {error}.", "unreadable") from None


def _read(connection: sqlite3.Connection) -> Export:
    columns = {
        name: {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    found = Export()
    start_ns = 0
    if "TARGET_INFO_SESSION_START_TIME" in columns:
        row = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        start_ns = row[0] if row else 0
    found.dated = bool(start_ns)
    if not found.dated:
        found.problems.append("it has no wall-clock start, so it cannot be joined with the events")
    if "NVTX_EVENTS" in columns:
        found.ranges = list(_ranges(connection, start_ns))
    else:
        found.problems.append("it has no NVTX ranges")
    for table, (kind, name) in _WORK.items():
        if table in columns:
            found.work += _work(connection, columns, table, kind, name, start_ns)
    if not found.work:
        found.problems.append("it has no work of a GPU")
    return found


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
        # Processes number their visible GPUs from 0; the uuid tells them apart.
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


def take_captures(tables: Tables, roots: Iterable[tuple[str, Path]], scratch: Path) -> list[str]:
    """Put the captures of runs into `captures`, `capture_ranges` and `capture_work`.

    Args:
        tables: The tables of the runs.
        roots: Label and run directory of each.
        scratch: A folder for temporary files.

    Returns:
        What is wrong with them, in plain words.
    """
    captures: list[dict[str, Any]] = []
    problems: list[str] = []
    lacking: dict[str, list[str]] = {}
    files = {name: scratch / f"{name}.csv" for name in ("capture_ranges", "capture_work")}
    with contextlib.ExitStack() as stack:
        ranges, work = (csv.writer(stack.enter_context(_opened(path))) for path in files.values())
        for label, root in roots:
            for capture in _summary(root / "nsight" / SUMMARY):
                row = _capture_row(label, capture)
                captures.append(row)
                if capture["problem"]:
                    whose = f"{row['name']} in step {capture['step']}"
                    problems.append(f"capture of {whose}: {capture['problem']}")
                path = root / "nsight" / str(capture["file"]).replace(".nsys-rep", ".sqlite")
                if path.suffix != ".sqlite" or not path.is_file():
                    continue
                try:
                    found = read(path)
                except ReadingError as error:
                    problems.append(str(error))
                    continue
                for problem in found.problems:
                    lacking.setdefault(problem, []).append(path.name)
                whose = [label, capture["step"], row["name"], capture["file"], capture["host"]]
                ranges.writerows([*whose, *each] for each in found.ranges)
                work.writerows([*whose, *each] for each in found.work)
    problems += [
        f"{names[0]}: {problem}" + (f"; {len(names) - 1} more are like it" if names[1:] else "")
        for problem, names in lacking.items()
    ]
    tables.put("captures", captures)
    for name, path in files.items():
        # duckdb finds no columns in an empty file.
        if path.stat().st_size:
            tables.put_csv(name, path)
        else:
            tables.put(name, ())
        path.unlink()
    return problems


def _opened(path: Path) -> TextIO:
    return path.open("w", newline="", encoding="utf-8", errors="replace")


def _summary(path: Path) -> list[dict[str, Any]]:
    """Return the captures that `verl-profiler collect` listed; anything else is left out."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    needed = {"role", "rank", "host", "pid", "step", "file", "problem"}
    listed = content if isinstance(content, list) else []
    return [entry for entry in listed if isinstance(entry, dict) and needed <= entry.keys()]


def _capture_row(label: str, capture: dict[str, Any]) -> dict[str, Any]:
    whose = [capture[key] for key in ("role", "rank", "host", "pid")]
    return {
        "run": label,
        # As the event files are named, so that both can be joined.
        "name": process_name(*whose),
        **{key: capture[key] for key in SCHEMAS["captures"] if key in capture},
    }
