"""Names of files in SQL: whatever characters a path has, duckdb opens that file and no other.

duckdb expands patterns, `~` and `file:` in the names that it reads, and takes a folder named
`rank=9` for the column `rank` of every file below it, unless that is switched off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PATTERN = re.compile(r"[*?\[]")


def quoted(path: Path) -> str:
    """Return a path as the inside of an SQL string: a file to write, or the value of `filename`."""
    return str(path.absolute()).replace("'", "''")


def listed(paths: Iterable[Path]) -> str:
    """Return paths to read as the inside of an SQL list."""
    names = (_PATTERN.sub(r"[\g<0>]", quoted(path)) for path in paths)
    return ", ".join(f"'{name}'" for name in names)


def scan(function: str, paths: Iterable[Path], options: str = "") -> str:
    """Return the SQL that reads files.

    Args:
        function: `read_parquet`, `read_json`, `read_ndjson_objects` or `read_csv`.
        paths: The files.
        options: More arguments of it, as SQL.
    """
    more = f", {options}" if options else ""
    return f"{function}([{listed(paths)}], hive_partitioning = false{more})"
