"""Tables made from events, kept as Parquet files, and which event files each of them needs.

A file is named after a digest of everything that it was made from: the SQL, the parts of the events
that can hold its rows, and what its query asks besides them.  A run that grows makes only the
tables of its last steps again, and no file is ever used for something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from verl_profiler.derivations import DERIVATIONS, from_rest
from verl_profiler.errors import ReadingError
from verl_profiler.event_query import AS_PARQUET, PART_COLUMNS
from verl_profiler.reading.scans import listed, quoted, scan
from verl_profiler.schemas import SCHEMAS

__all__ = ["EventPart", "Shelf", "event_parts", "parts_query"]


# A table may be made from others: a change of any of them makes all again.
_ALL_SQL = hashlib.sha256(json.dumps([DERIVATIONS, SCHEMAS]).encode()).hexdigest()


@dataclass(frozen=True)
class EventPart:
    """A Parquet file of events, and what its statistics say about it.

    Args:
        fingerprint: Changes whenever the content does.
        steps: First and last step; None when that is not known.
        without_step: Some of its events may have no step.
        span_us: A time before all of its events, and one after; None when that is not known.
        columns: Which of `PART_COLUMNS` it has; what the others would hold is in `rest`.
    """

    run: str
    path: Path
    fingerprint: str
    steps: tuple[int, int] | None
    without_step: bool
    span_us: tuple[int, int] | None
    columns: frozenset[str]


def event_parts(
    connection: duckdb.DuckDBPyConnection, run: str, paths: Sequence[Path]
) -> list[EventPart]:
    """Describe the Parquet files of a run."""
    if not paths:
        return []
    rows = connection.execute(
        f"""
        SELECT file_name, path_in_schema, min(try_cast(stats_min AS BIGINT)),
            max(try_cast(stats_max AS BIGINT)),
            bool_and(stats_min IS NOT NULL OR stats_null_count = num_values),
            sum(stats_null_count)
        FROM parquet_metadata([{listed(paths)}])
        WHERE path_in_schema IN ('step', 'end_us', 'duration_us') GROUP BY ALL
        """
    ).fetchall()
    known = {(row[0], row[1]): row[2:] for row in rows}
    columns: dict[str, set[str]] = {}
    for file, name in connection.execute(
        f"SELECT file_name, name FROM parquet_schema([{listed(paths)}])"
    ).fetchall():
        columns.setdefault(file, set()).add(name)
    unknown = (None, None, False, None)
    parts = []
    for path in paths:
        step, end, duration = (
            known.get((str(path.absolute()), column), unknown)
            for column in ("step", "end_us", "duration_us")
        )
        span = None
        if end[0] is not None and end[2] and duration[2]:
            span = end[0] - (duration[1] or 0), end[1]
        status = path.stat()
        parts.append(
            EventPart(
                run=run,
                path=path,
                fingerprint=f"{run}:{path.name}:{status.st_size}:{status.st_mtime_ns}",
                steps=(step[0], step[1]) if step[0] is not None and step[2] else None,
                without_step=step[3] != 0,
                span_us=span,
                columns=frozenset(columns[str(path.absolute())].intersection(PART_COLUMNS)),
            )
        )
    return parts


def parts_query(parts: Sequence[EventPart]) -> str:
    """Return the SQL of `event_fields` over these files."""
    queries = []
    for run in dict.fromkeys(part.run for part in parts):
        label = run.replace("'", "''")
        own = [part for part in parts if part.run == run]
        columns = ", ".join(
            _column(name, own) for name in PART_COLUMNS if name not in ("file_id", "flawed")
        )
        queries.append(
            f"SELECT '{label}' AS run, {columns}, "
            "end_us - coalesce(duration_us, 0) AS begin_us FROM "
            + scan("read_parquet", (part.path for part in own), "union_by_name = true")
        )
    return "\nUNION ALL\n".join(queries)


def _column(name: str, parts: Sequence[EventPart]) -> str:
    """Return the SQL of a column that not all parts need to have."""
    column = f'"{name}"'
    having = sum(name in part.columns for part in parts)
    if having == len(parts):
        return column
    left = from_rest(name)
    return f"coalesce({column}, {left}) AS {column}" if having else f"{left} AS {column}"


class Shelf:
    """A folder of tables as Parquet files.

    Args:
        folder: Where they lie.
        scratch: Where they go when nothing can be written there.
        parts: All files of events.
    """

    def __init__(self, folder: Path, scratch: Path, parts: Sequence[EventPart]) -> None:
        self.parts = parts
        self._folder = folder
        self._scratch = scratch
        self._used: set[str] = set()

    def of_steps(self, steps: tuple[int, int] | None, without_step: bool) -> list[EventPart]:
        """Return the parts that may hold events of these steps, or of none."""
        return [
            part
            for part in self.parts
            if (without_step and part.without_step)
            or part.steps is None
            or (steps is not None and part.steps[0] <= steps[1] and part.steps[1] >= steps[0])
        ]

    def of_times(self, first_us: int, last_us: int) -> list[EventPart]:
        """Return the parts that may hold events of these times."""
        return [
            part
            for part in self.parts
            if part.span_us is None or (part.span_us[0] <= last_us and part.span_us[1] >= first_us)
        ]

    def table(
        self,
        connection: duckdb.DuckDBPyConnection,
        name: str,
        query: str,
        made_from: Iterable[str],
    ) -> Path:
        """Return the file of a table, made now if it is not there.

        Args:
            connection: Makes it.
            name: The table.
            query: Its SQL.
            made_from: Whatever decides its rows.
        """
        identity = json.dumps([duckdb.__version__, _ALL_SQL, name, *made_from])
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        file = f"{name}-{digest}.parquet"
        self._used.add(file)
        path = self._folder / file
        if _readable(connection, path):
            return path
        for folder in dict.fromkeys((self._folder, self._scratch)):
            path = folder / file
            partial = path.with_suffix(f".{os.getpid()}.partial")
            try:
                connection.execute(f"COPY ({query}) TO '{quoted(partial)}' {AS_PARQUET}")
                partial.replace(path)
            except (OSError, duckdb.IOException) as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                failure = error
                continue
            self._folder = folder
            return path
        raise ReadingError(
            f"no room for the table {name} in {self._folder}: {failure}\n"
            "Free some space, or set TMPDIR to a larger disk",
            "no-space",
        )

    def forget_others(self, name: str) -> None:
        """Remove files of the table that were not asked for: the run has changed since."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{name}-*.parquet"):
                if path.name not in self._used:
                    path.unlink()


def _readable(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    if not path.exists():
        return False
    try:
        connection.execute(f"SELECT count(*) FROM parquet_file_metadata({listed([path])})")
    except duckdb.Error:
        return False
    return True
