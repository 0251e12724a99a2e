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
        given = {"events": (), "processes": (), **(tables or {})}
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
            self.connection.execute(
                f"CREATE {'TABLE' if kept else 'VIEW'} {name} AS SELECT {columns} FROM ({query})"
            )
            self._made.add(name)

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
