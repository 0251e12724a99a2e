"""Whether Parquet files that a user gives are tables of events."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb

from verl_profiler.errors import ReadingError
from verl_profiler.reading.event_sql import PART_COLUMNS
from verl_profiler.reading.scans import scan
from verl_profiler.reading.tables.schemas import FIELDS

__all__ = ["check_columns"]


def check_columns(connection: duckdb.DuckDBPyConnection, root: Path, paths: list[Path]) -> None:
    """Refuse Parquet files of something else than events.

    Args:
        connection: Reads their columns.
        root: Where they are, for messages.
        paths: The files.

    Raises:
        ReadingError: A file cannot be read, lacks columns, or has them with other types.
    """
    try:
        columns = _types(connection, paths)
        wrong = _of_other_types(connection, paths, columns)
    except duckdb.Error as error:
        raise ReadingError(f"{root} cannot be read: {error}", "unreadable") from error
    missing = [name for name in PART_COLUMNS if name not in columns and name not in FIELDS]
    if missing:
        raise ReadingError(
            f"{paths[0]} is not a table of events: it has no column {', '.join(missing[:5])}",
            "no-events",
        )
    if wrong:
        among = "" if len(paths) == 1 else f" or one of {len(paths) - 1} others"
        listed = ", ".join(
            f"`{name}` is {columns[name]}, not {PART_COLUMNS[name]}" for name in wrong[:5]
        )
        raise ReadingError(f"{paths[0]}{among} is not a table of events: {listed}", "no-events")


def _types(connection: duckdb.DuckDBPyConnection, paths: list[Path]) -> dict[str, str]:
    query = f"DESCRIBE FROM {scan('read_parquet', paths, 'union_by_name = true')}"
    return {row[0]: row[1] for row in connection.execute(query).fetchall()}


# Other programs write other widths of numbers, and text of few values as an enumeration.
_ALIKE = {
    "INTEGER": r"U?(TINY|SMALL|BIG)?INT(EGER)?|UINTEGER",
    "BIGINT": r"U?(TINY|SMALL|BIG)?INT(EGER)?|UINTEGER",
    "DOUBLE": r"U?(TINY|SMALL|BIG)?INT(EGER)?|UINTEGER|FLOAT|DOUBLE|DECIMAL\(.*",
    "BOOLEAN": "BOOLEAN",
    "VARCHAR": r"VARCHAR|JSON|ENUM\(.*",
    "JSON": r"VARCHAR|JSON|ENUM\(.*",
}


def _of_other_types(
    connection: duckdb.DuckDBPyConnection, paths: list[Path], columns: dict[str, str]
) -> list[str]:
    """Return the columns whose values are of other types than those of events."""
    others = [
        name
        for name, kind in PART_COLUMNS.items()
        if name in columns and not re.fullmatch(_ALIKE[kind], columns[name], re.DOTALL)
    ]
    if not others:
        return []
    # A column of NULLs only has any type.
    counts = ", ".join(f'count("{name}")' for name in others)
    rows = scan("read_parquet", paths, "union_by_name = true")
    (counted,) = connection.execute(f"SELECT {counts} FROM {rows}").fetchall()
    return [name for name, count in zip(others, counted, strict=True) if count]
