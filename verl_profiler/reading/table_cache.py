"""Tables made from events, kept as Parquet files, and which event files each of them needs.

A file is named after a digest of everything that it was made from: the SQL, the parts of the events
that can hold its rows, and what its query reads besides them.  A run that grows makes only the
tables of its last steps again, and no file is ever used for something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

import verl_profiler
from verl_profiler.errors import ReadingError
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.vocabulary import step_of_folder
from verl_profiler.reading.cache_folder import CacheFolder, Kept, unwritable
from verl_profiler.reading.event_sql import AS_PARQUET, PART_COLUMNS
from verl_profiler.reading.scans import listed, quoted, scan
from verl_profiler.reading.tables.derivations import fingerprint, from_rest
from verl_profiler.reading.tables.schemas import FIELDS, SCHEMAS

# How far, where a run is cut, the corrected clocks of a client's and a server's host may be apart for
# their calls to be joined.
CLOCKS_APART_US = 60 * 1_000_000


class TableCache:
    """A folder of tables as Parquet files.

    Args:
        cache: Where they are kept.
        scratch: Where they go when nothing can be written there.
        parts: The files of events that are read.
        steps: The only steps that are read of them; None for all.
    """

    def __init__(
        self,
        cache: CacheFolder,
        scratch: CacheFolder,
        parts: Sequence[EventPart],
        *,
        steps: tuple[int, int] | None = None,
    ) -> None:
        self.parts = parts
        self._steps = steps
        self._folders = list(dict.fromkeys((cache, scratch)))

    @property
    def folder(self) -> CacheFolder:
        """Where tables are kept now."""
        return self._folders[0]

    @property
    def lasts(self) -> bool:
        """Whether another command finds what is kept."""
        return len(self._folders) > 1

    @property
    def everything(self) -> list[str]:
        """What decides the rows of a table of all events that are read."""
        read = [] if self._steps is None else [f"steps {self._steps[0]} to {self._steps[1]}"]
        return [*(part.fingerprint for part in self.parts), *read]

    def of_steps(self, steps: tuple[int, int] | None, without_step: bool) -> list[EventPart]:
        """Return the parts that may hold events of these steps, or of none."""
        return [part for part in self.parts if part.may_hold(steps, without_step)]

    def table(
        self,
        connection: duckdb.DuckDBPyConnection,
        name: str,
        query: str,
        made_from: Iterable[str],
    ) -> tuple[str, Path]:
        """Return a name of a table's rows, and their file, made now if it is not there.

        Args:
            connection: Makes it.
            name: The table.
            query: Its SQL.
            made_from: Whatever decides its rows.

        Raises:
            ReadingError: Its file cannot be written anywhere.
        """
        identity = json.dumps([duckdb.__version__, fingerprint(), name, *made_from])
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        key = f"{name}-{digest}"
        kept = self._folders[0].find(key)
        if kept is not None and kept.path is not None and _holds(connection, kept.path, name):
            return key, kept.path
        while True:
            folder = self._folders[0]
            try:
                with folder.new() as draft:
                    connection.execute(f"COPY ({query}) TO '{quoted(draft)}' {AS_PARQUET}")
                    made = folder.publish(draft, key)
            except (OSError, duckdb.IOException) as error:
                if len(self._folders) == 1:
                    raise unwritable(f"the table {name}", folder, error) from error
                del self._folders[0]
            else:
                return key, made.path or folder.path

    def document(self, name: str, made_from: Iterable[str], make: Callable[[], Any]) -> Any:
        """Return what `make` returns, as JSON has it, or what it returned before for the same.

        Args:
            name: Of small letters and underscores.
            made_from: Whatever decides it, besides the events and the code.
            make: Makes it if it is not kept.
        """
        identity = json.dumps(
            [duckdb.__version__, fingerprint(), _code(), *self.everything, *made_from]
        )
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        kept = self._folders[0].find(f"{name}-{digest}")
        if kept is not None and kept.note is not None:
            return kept.note
        made = make()
        with contextlib.suppress(OSError):
            self._folders[0].keep(f"{name}-{digest}", made)
        self.forget_others(name)
        return made

    def forget_others(self, name: str) -> None:
        """Remove files of the table that nothing requests any more: the run has changed since."""
        if self._steps is None:
            self._folders[0].retire(name)


@cache
def _code() -> str:
    """Return what changes with the code of this package."""
    package = Path(verl_profiler.__file__).parent
    found = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    return str([(str(path), status.st_size, status.st_mtime_ns) for path, status in found])


def _holds(connection: duckdb.DuckDBPyConnection, path: Path, name: str) -> bool:
    """Whether a file has the columns of a table."""
    columns = ", ".join(f'"{column}"' for column in SCHEMAS[name])
    try:
        connection.execute(f"SELECT {columns} FROM {scan('read_parquet', [path])} LIMIT 0")
    except duckdb.Error:
        return False
    return True


@dataclass(frozen=True)
class EventPart:
    """A Parquet file of events, and what its statistics say about it.

    Args:
        fingerprint: Changes whenever the content does.
        steps: First and last step; None when that is not known.
        without_step: Some of its events may have no step.
        span_us: A time before all of its events, and one after; None when that is not known.
        columns: Which of `PART_COLUMNS` it has; what the others would hold is in `rest`.
        absent: Which of `FIELDS` are in neither.
    """

    run: str
    path: Path
    fingerprint: str
    steps: tuple[int, int] | None
    without_step: bool
    span_us: tuple[int, int] | None
    columns: frozenset[str]
    absent: frozenset[str]

    def may_hold(self, steps: tuple[int, int] | None, without_step: bool = True) -> bool:
        """Whether there may be events of these steps, or of none."""
        return (
            (without_step and self.without_step)
            or self.steps is None
            or (steps is not None and self.steps[0] <= steps[1] and self.steps[1] >= steps[0])
        )

    def may_hold_times(self, first_us: int, last_us: int) -> bool:
        """Whether there may be events of these times."""
        span_us = self.span_us
        return span_us is None or (span_us[0] <= last_us and span_us[1] >= first_us)


def folder_step(path: Path) -> int | None:
    """Return the step of a file by its folder, `events/step_<N>`; None where it may hold any."""
    return step_of_folder(path.parent.name) if path.parent.parent.name == "events" else None


def event_parts(
    connection: duckdb.DuckDBPyConnection, run: str, kept: Sequence[Kept]
) -> list[EventPart]:
    """Describe the Parquet files of a run by what their ends state.

    Args:
        connection: Reads the ends.
        run: The run's label.
        kept: The files.

    Raises:
        ReadingError: One of them is not a table of events.
    """
    identities = {each.path: each.identity for each in kept if each.path is not None}
    notes = {each.path: each.note for each in kept}
    if not identities:
        return []
    rows = connection.execute(
        f"""
        SELECT file_name, path_in_schema, min(try_cast(stats_min AS BIGINT)),
            max(try_cast(stats_max AS BIGINT)),
            bool_and(stats_min IS NOT NULL OR stats_null_count = num_values),
            sum(stats_null_count)
        FROM parquet_metadata([{listed(identities)}])
        WHERE path_in_schema IN ('step', 'end_us', 'duration_us') GROUP BY ALL
        """
    ).fetchall()
    known = {(row[0], row[1]): row[2:] for row in rows}
    columns: dict[str, set[str]] = {}
    for file, name in connection.execute(
        f"SELECT file_name, name FROM parquet_schema([{listed(identities)}])"
    ).fetchall():
        columns.setdefault(file, set()).add(name)
    for file, names in columns.items():
        missing = [name for name in PART_COLUMNS if name not in {*names, *FIELDS}]
        if missing:
            raise ReadingError(
                f"{file} is not a table of events: it has no column {', '.join(missing[:5])}",
                "no-events",
            )
    nothing: tuple[Any, ...] = (None, None, False, None)
    parts: list[EventPart] = []
    for path, identity in identities.items():
        file = str(path.absolute())
        step, end, duration = (
            known.get((file, column), nothing) for column in ("step", "end_us", "duration_us")
        )
        span = None
        if end[0] is not None and end[2] and duration[2]:
            span = end[0] - (duration[1] or 0), end[1]
        steps = (step[0], step[1]) if step[0] is not None and step[2] else None
        having = frozenset(columns[file].intersection(PART_COLUMNS))
        left = mapping_or_empty(notes[path]).get("left", FIELDS)
        absent = frozenset(FIELDS).difference(having, left)
        parts.append(
            EventPart(run, path, f"{run}:{identity}", steps, step[3] != 0, span, having, absent)
        )
    return parts


def parts_within(parts: Sequence[EventPart], steps: tuple[int, int]) -> list[EventPart]:
    """Return the parts that may hold events of these steps, or of the time around them.

    Engines count steps by the weights that they have, so their events may be those of another step.
    """
    chosen = {part.path for part in parts if part.may_hold(steps)}
    spans = [
        part.span_us
        for part in parts
        if part.path in chosen and part.steps is not None and part.span_us is not None
    ]
    if spans:
        first_us = min(span[0] for span in spans) - CLOCKS_APART_US
        last_us = max(span[1] for span in spans) + CLOCKS_APART_US
        chosen.update(part.path for part in parts if part.may_hold_times(first_us, last_us))
    return [part for part in parts if part.path in chosen]


def parts_query(parts: Sequence[EventPart]) -> str:
    """Return the SQL of `event_fields` over these files."""
    queries: list[str] = []
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
    if not queries:
        nothing = (f"NULL::{kind} AS {name}" for name, kind in SCHEMAS["event_fields"].items())
        return f"SELECT {', '.join(nothing)} WHERE false"
    return "\nUNION ALL\n".join(queries)


def _column(name: str, parts: Sequence[EventPart]) -> str:
    """Return the SQL of a column that not all parts need to have."""
    column = f'"{name}"'
    having = any(name in part.columns for part in parts)
    if all(name in {*part.columns, *part.absent} for part in parts):
        return column if having else f"NULL::{FIELDS[name]} AS {column}"
    left = from_rest(name)
    return f"coalesce({column}, {left}) AS {column}" if having else f"{left} AS {column}"
