"""The tables of a run on one duckdb connection, each made when it is first asked for."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.derivations import DERIVATIONS
from verl_profiler.schemas import REQUEST_PARTS, SCHEMAS

__all__ = ["REQUEST_PARTS", "SCHEMAS", "Tables"]

_TABLE_NAME = re.compile(r"\b(?:FROM|JOIN)\s+([a-z_]+)", re.IGNORECASE)


# Made from about this many events at a time; the identity of a row has its step.
_BY_STEPS = ("requests", "turns", "engine_calls")
_CHUNK_EVENTS = 4_000_000
# How far the clocks of a client's and a server's host may be apart for their calls to be joined.
_CLOCKS_APART_US = 600 * 1_000_000


class Tables:
    """The tables of one or several runs, on one duckdb connection.

    A table is made when a query first names it after FROM or JOIN.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        self._made: set[str] = set()

    @classmethod
    def of(cls, tables: Mapping[str, Iterable[Mapping[str, Any]]] | None = None) -> Tables:
        """Make tables from rows; columns that a row lacks are NULL.

        Args:
            tables: Rows by table name.  Tables that are not given are derived from `events`.
        """
        made = cls(duckdb.connect())
        given = {**{name: () for name in SCHEMAS if name not in DERIVATIONS}, **(tables or {})}
        for name, rows in given.items():
            made.put(name, rows)
        return made

    def put(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Make the table `name` of exactly these rows."""
        columns = SCHEMAS[name]
        with tempfile.TemporaryDirectory(prefix="verl_profiler-") as folder:
            path = Path(folder) / "rows.json"
            with path.open("w", encoding="utf-8", errors="replace") as file:
                for row in rows:
                    unknown = set(row) - set(columns)
                    if unknown:
                        raise KeyError(f"table {name} has no column {', '.join(sorted(unknown))}")
                    file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            typed = ", ".join(f"\"{column}\": '{kind}'" for column, kind in columns.items())
            self.connection.execute(
                f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM read_json("
                f"'{path}', format = 'newline_delimited', columns = {{{typed}}})"
            )
        self._made.add(name)

    def put_csv(self, name: str, path: Path) -> None:
        """Make the table `name` of a CSV file without a header; an empty field is NULL."""
        typed = ", ".join(f"'{column}': '{kind}'" for column, kind in SCHEMAS[name].items())
        self.connection.execute(
            f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM read_csv("
            f"'{path}', header = false, nullstr = '', columns = {{{typed}}})"
        )
        self._made.add(name)

    def take(self, name: str, query: str) -> None:
        """Make `name` a view of `query`, which must have the table's columns."""
        columns = ", ".join(f'"{column}"' for column in SCHEMAS[name])
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT {columns} FROM ({query})")
        self._made.add(name)

    def make(self, *names: str) -> None:
        """Make these tables now, with those that they are made from."""
        for name in names:
            if name in self._made or name not in DERIVATIONS:
                continue
            query, kept = DERIVATIONS[name]
            self.make(*_named(query))
            columns = ", ".join(
                f'"{column}"::{kind} AS "{column}"' for column, kind in SCHEMAS[name].items()
            )
            if name in _BY_STEPS:
                self._make_by_steps(name, query, columns)
            else:
                kind = "TABLE" if kept else "VIEW"
                self.connection.execute(f"CREATE {kind} {name} AS SELECT {columns} FROM ({query})")
            self._made.add(name)

    def _make_by_steps(self, name: str, query: str, columns: str) -> None:
        """Make a table from some steps at a time, so that memory does not grow with the run."""
        beginning = f"CREATE TABLE {name} AS"
        for condition, first_us, last_us in self._chunks():
            around = f"WITH events AS (SELECT * FROM main.events WHERE {condition})"
            if "engine_requests" in _named(query):
                around += (
                    ", engine_requests AS (SELECT * FROM main.engine_requests "
                    f"WHERE end_us >= {first_us - _CLOCKS_APART_US} "
                    f"AND begin_us <= {last_us + _CLOCKS_APART_US})"
                )
            self.connection.execute(
                f"{beginning} SELECT {columns} FROM ({around} SELECT * FROM ({query}))"
            )
            beginning = f"INSERT INTO {name}"

    def _chunks(self) -> list[tuple[str, int, int]]:
        """Cut the run at step boundaries; return SQL conditions with the times that they span."""
        rows = self.connection.execute(
            "SELECT step, count(*), coalesce(min(begin_us), 0), coalesce(max(end_us), 0) "
            "FROM events GROUP BY step ORDER BY step NULLS FIRST"
        ).fetchall()
        chunks: list[list[tuple[int | None, int, int, int]]] = [[]]
        held = 0
        for row in rows:
            if held and held + row[1] > _CHUNK_EVENTS:
                chunks.append([])
                held = 0
            chunks[-1].append(row)
            held += row[1]
        if len(chunks) == 1:
            return [("true", 0, 1 << 62)]
        result = []
        for chunk in chunks:
            steps = [row[0] for row in chunk if row[0] is not None]
            condition = f"step BETWEEN {min(steps)} AND {max(steps)}" if steps else "false"
            if chunk[0][0] is None:
                condition = f"({condition} OR step IS NULL)"
            result.append((condition, min(row[2] for row in chunk), max(row[3] for row in chunk)))
        return result

    def relation(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return the table as a duckdb relation, to filter, join or export."""
        if name not in SCHEMAS:
            raise KeyError(f"no table {name}; there are {', '.join(SCHEMAS)}")
        self.make(name)
        return self.connection.table(name)

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Run a query over the tables and return its rows as dicts."""
        self.make(*_named(query))
        cursor = self.connection.execute(query, parameters)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def row(self, query: str, parameters: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the first row of a query, or an empty dict."""
        rows = self.rows(query, parameters)
        return rows[0] if rows else {}


def _named(query: str) -> list[str]:
    return [name for name in dict.fromkeys(_TABLE_NAME.findall(query)) if name in DERIVATIONS]
