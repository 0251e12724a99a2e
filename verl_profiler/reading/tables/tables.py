"""The tables of a run on one duckdb connection, each made when it is first requested."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from verl_profiler.errors import ReadingError
from verl_profiler.reading.progress import doing
from verl_profiler.reading.scans import quoted, scan
from verl_profiler.reading.table_cache import CLOCKS_APART_US, TableCache, parts_query
from verl_profiler.reading.tables.derivations import Derivation, derivations, macros
from verl_profiler.reading.tables.schemas import SCHEMAS

# `get_table_names` of duckdb 2.0 binds the query, which fails before its tables are made.
_TABLE_NAME = re.compile(r"\b(?:FROM|JOIN)\s+([a-z_]+)", re.IGNORECASE)

# Made from about `CHUNK_EVENTS` events at a time; the identity of a row has its step.
BY_STEPS = (
    "requests",
    "turns",
    "engine_calls",
    "engine_call_times",
    "tool_calls",
    "transfers",
    "request_caused_wait",
    "tool_caused_wait",
)
# Tables of one event: where it was not recorded, a query plans much faster over an empty table.
_EVENTS = {
    "device_readings": "device",
    "dispatched": "dispatch",
    "engine_attempts": "engine_attempt",
    "engine_parked": "engine_parked",
    "engine_states": "engine_state",
}
CHUNK_EVENTS = 4_000_000
# Of a table's files.
_IN_MEMORY_BYTES = 1 << 20


@dataclass
class Chunk:
    """Some steps, and the time around them.

    Args:
        steps: First and last; None for none.
        without_step: Events of no step belong to it.
        around_us: The time in which servers may have worked for it.
    """

    steps: tuple[int, int] | None
    without_step: bool
    around_us: tuple[int, int]

    def condition(self) -> str:
        """Return SQL that is true for the events of the chunk."""
        steps = (
            "false" if self.steps is None else f"step BETWEEN {self.steps[0]} AND {self.steps[1]}"
        )
        return f"({steps} OR step IS NULL)" if self.without_step else steps


def connect(scratch: Path, memory_limit: str, threads: int | None) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory.

    Args:
        scratch: A folder for what does not fit into memory.
        memory_limit: What duckdb may use, such as `1GB`.
        threads: All cores when None.

    Raises:
        ReadingError: The limit is not an amount of memory.
    """
    connection = duckdb.connect()
    try:
        connection.execute(f"SET memory_limit = '{memory_limit}'".replace(";", ""))
    except duckdb.Error as error:
        raise ReadingError(
            f"{memory_limit!r} is not an amount of memory.\nWrite for example 2GB", "memory-limit"
        ) from error
    connection.execute(f"SET temp_directory = '{quoted(scratch / 'spill')}'")
    connection.execute("SET preserve_insertion_order = false")
    connection.execute("SET enable_progress_bar = false")
    # GLOBAL: cursors have them too.  A duckdb without time zones rejects the first, which it does not need;
    # an older one reads the ends of the files for each query.  An ASOF join that duckdb expects to have few rows
    # compares each with each, and it expects few of any CTE on CTEs.
    for setting in (
        "TimeZone = 'UTC'",
        "parquet_metadata_cache = true",
        "asof_loop_join_threshold = 0",
    ):
        with contextlib.suppress(duckdb.Error):
            connection.execute(f"SET GLOBAL {setting}")
    if threads is not None:
        connection.execute(f"SET threads = {int(threads)}")
    return connection


class Tables:
    """The tables of one or several runs, on one duckdb connection.

    A table is made when a query first names it after FROM or JOIN.

    Attributes:
        launches: `run.json` by run label, where there is one.
        events_in_memory: Whether `event_fields` is a table.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, table_cache: TableCache | None = None
    ) -> None:
        self.connection = connection
        connection.execute(macros())
        self.table_cache = table_cache
        self.launches: Mapping[str, Mapping[str, Any]] = {}
        self.events_in_memory = False
        self._made: set[str] = set()
        self._chunk_files: dict[str, list[tuple[str, Path]]] = {}

    @classmethod
    def of(cls, tables: Mapping[str, Iterable[Mapping[str, Any]]] | None = None) -> Tables:
        """Make tables from rows; columns that a row lacks are NULL.

        Args:
            tables: Rows by table name.  Tables that are not given are derived from `events`.
        """
        made = cls(duckdb.connect())
        made.expect_few_events()
        read = {name: () for name in SCHEMAS if name == "events" or name not in derivations()}
        given = {**read, **(tables or {})}
        for name, rows in given.items():
            made.create_table(name, rows)
        return made

    def expect_few_events(self) -> None:
        """Keep tables in memory, and plan quickly: to plan queries of few events takes longer than to run them."""
        self.events_in_memory = True
        self.connection.execute("SET threads = 1; PRAGMA disable_optimizer")

    def create_table(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make the table `name` of exactly these rows."""
        columns, listed = SCHEMAS[name], list(rows)
        if not listed:
            typed = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
            self.connection.execute(f"CREATE OR REPLACE TABLE {name} ({typed})")
            self._made.add(name)
            return
        with tempfile.TemporaryDirectory(prefix="verl_profiler-") as folder:
            path = Path(folder) / "rows.json"
            path.write_bytes(_json_lines(name, listed))
            typed = ", ".join(f"\"{column}\": '{kind}'" for column, kind in columns.items())
            self.connection.execute(
                f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM "
                + scan("read_json", [path], f"format = 'newline_delimited', columns = {{{typed}}}")
            )
        self._made.add(name)

    def create_view(self, name: str, query: str, kind: str = "VIEW") -> None:
        """Make `name` a view of `query`, or a TABLE; it must have the table's columns."""
        columns = ", ".join(f'"{column}"' for column in SCHEMAS[name])
        self.connection.execute(
            f"CREATE OR REPLACE {kind} {name} AS SELECT {columns} FROM ({query})"
        )
        self._made.add(name)

    def make(self, *names: str) -> None:
        """Make these tables now, with those that they are made from."""
        for name in names:
            if name in self._made or name not in derivations():
                continue
            if name in _EVENTS and not self.has_events(_EVENTS[name]):
                self.create_table(name, ())
                continue
            query, kept = _typed(name)
            self.make(*_named(query))
            files = self._files()
            if not kept or files is None:
                kind = "TABLE" if kept or self.events_in_memory else "VIEW"
                self.connection.execute(f"CREATE {kind} {name} AS {query}")
            elif name in BY_STEPS:
                self._make_by_steps(files, name, query)
            else:
                self._cache_table(files, name, {query: files.everything})
            self._made.add(name)

    def _files(self) -> TableCache | None:
        """Where tables are files; those of few events that no other command finds are in memory."""
        files = self.table_cache
        return None if files is None or (self.events_in_memory and not files.lasts) else files

    def _make_by_steps(self, files: TableCache, name: str, query: str) -> None:
        """Make a table from some steps at a time, so that memory does not grow with the run."""
        queries = {
            f"WITH {self._sources(files, query, number, chunk)} {query}": self._made_from(
                files, query, number, chunk
            )
            for number, chunk in enumerate(self.chunks)
        }
        self._chunk_files[name] = self._cache_table(files, name, queries)

    def _cache_table(
        self, table_cache: TableCache, name: str, queries: Mapping[str, Iterable[str]]
    ) -> list[tuple[str, Path]]:
        """Make a view of files with the rows of these queries; return their names and files."""
        files: list[tuple[str, Path]] = []
        for number, (query, made_from) in enumerate(queries.items(), 1):
            with doing(f"table {name}", number, len(queries)):
                files.append(table_cache.table(self.connection, name, query, made_from))
        table_cache.forget_others(name)
        # To name a file in a query opens it each time.
        few = sum(path.stat().st_size for _, path in files) < _IN_MEMORY_BYTES
        rows = f"SELECT * FROM {scan('read_parquet', (path for _, path in files))}"
        runs = {part.run.replace("'", "''") for part in table_cache.parts}
        if len(runs) == 1:
            # What is the same in all rows is not read, compared or hashed.
            rows = f"SELECT * REPLACE ('{runs.pop()}' AS run) FROM ({rows})"
        self.create_view(name, rows, "TABLE" if few else "VIEW")
        return files

    def _sources(self, files: TableCache, query: str, number: int, chunk: Chunk) -> str:
        """Return the SQL that puts the rows of a chunk in the place of all rows."""
        fields = parts_query(files.of_steps(chunk.steps, chunk.without_step))
        sources = (
            f"event_fields AS NOT MATERIALIZED (SELECT * FROM ({fields}) WHERE {chunk.condition()})"
        )
        named = _named(query)
        if "engine_requests" in named:
            first_us, last_us = chunk.around_us
            sources += (
                ", engine_requests AS NOT MATERIALIZED (SELECT * FROM main.engine_requests "
                f"WHERE end_us >= {first_us} AND begin_us <= {last_us})"
            )
        for name in named:
            if name in BY_STEPS:
                _, file = self._chunk_files[name][number]
                rows = f"SELECT * FROM {scan('read_parquet', [file])}"
                sources += f", {name} AS NOT MATERIALIZED ({rows})"
        return sources

    def _made_from(
        self, table_cache: TableCache, query: str, number: int, chunk: Chunk
    ) -> list[str]:
        """Say what decides the rows of a chunk."""
        parts = table_cache.of_steps(chunk.steps, chunk.without_step)
        named = _named(query)
        if "engine_requests" in named:
            parts += (part for part in table_cache.parts if part.may_hold_times(*chunk.around_us))
        # Later steps may show that a run is asynchronous.
        runs = "SELECT run FROM asynchronous ORDER BY run"
        return [
            chunk.condition(),
            *(row["run"] for row in (self.rows(runs) if "asynchronous" in named else ())),
            *(part.fingerprint for part in parts),
            self._of_runs,
            # Whatever the order in which they were made.
            *(self._chunk_files[name][number][0] for name in named if name in BY_STEPS),
        ]

    @cached_property
    def _of_runs(self) -> str:
        """What decides the rows of every chunk: which events were recorded, and where replicas were."""
        seen = self.rows(
            "SELECT DISTINCT run, event FROM event_counts "
            "WHERE family = 'rollout' AND of_requests > 0 ORDER BY ALL"
        )
        return json.dumps(
            [seen, self.rows("SELECT run, name, replica FROM processes ORDER BY ALL")]
        )

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The run, cut at step boundaries."""
        self.make("event_counts")
        rows = self.connection.execute(
            f"""
            SELECT min(step), max(step), count(*) > count(step), min(begin_us), max(end_us) FROM (
                SELECT step, min(begin_us) AS begin_us, max(end_us) AS end_us,
                    (sum(sum(events)) OVER (ORDER BY step NULLS FIRST) - 1) // {CHUNK_EVENTS} AS chunk
                FROM event_counts GROUP BY step
            ) GROUP BY chunk ORDER BY chunk
            """
        ).fetchall()
        return [
            Chunk(
                None if first is None else (first, last),
                without_step,
                ((begin_us or 0) - CLOCKS_APART_US, (end_us or 0) + CLOCKS_APART_US),
            )
            for first, last, without_step, begin_us, end_us in rows
        ] or [Chunk(None, False, (0, 0))]

    def relation(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return the table as a duckdb relation, to filter, join or export."""
        if name not in SCHEMAS:
            raise KeyError(f"no table {name}; there are {', '.join(SCHEMAS)}")
        self.make(name)
        return self.connection.table(name)

    def has_events(self, event: str) -> bool:
        """Whether any were recorded: to plan a long query over none takes 40 ms."""
        self.make("event_counts")
        found = self.connection.execute("SELECT 1 FROM event_counts WHERE event = ?", [event])
        return found.fetchone() is not None

    def rows(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run a query over the tables and return its rows as dicts."""
        self.make(*_named(query))
        cursor = self.connection.execute(query, parameters)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def arrays(self, query: str) -> dict[str, Any]:
        """Run a query over the tables and return its columns as NumPy arrays, for many rows."""
        self.make(*_named(query))
        return self.connection.execute(query).fetchnumpy()

    def row(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the first row of a query, or an empty dict."""
        rows = self.rows(query, parameters)
        return rows[0] if rows else {}


def _json_lines(name: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    known = SCHEMAS[name].keys()
    for row in rows:
        if unknown := row.keys() - known:
            raise KeyError(f"table {name} has no column {', '.join(sorted(unknown))}")
    try:
        return msgspec.json.Encoder().encode_lines(rows)
    except UnicodeEncodeError:
        # A name from a path that is not UTF-8.
        lines = (json.dumps(dict(row), ensure_ascii=False) for row in rows)
        return "\n".join(lines).encode(errors="replace")


def _typed(name: str) -> Derivation:
    """Return how a table is made, with the types of its columns."""
    query, kept = derivations()[name]
    columns = ", ".join(
        f'try_cast("{column}" AS {kind}) AS "{column}"' for column, kind in SCHEMAS[name].items()
    )
    return Derivation(f"SELECT {columns} FROM ({query})", kept)


def _named(query: str) -> list[str]:
    return [name for name in dict.fromkeys(_TABLE_NAME.findall(query)) if name in derivations()]
