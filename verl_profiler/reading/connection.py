"""The duckdb connection that runs are read with."""

from __future__ import annotations

import contextlib
from pathlib import Path

import duckdb

from verl_profiler.errors import ReadingError
from verl_profiler.reading.scans import quoted

__all__ = ["connect"]


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
    # an older one reads the ends of the files for each query.
    for setting in ("TimeZone = 'UTC'", "parquet_metadata_cache = true"):
        with contextlib.suppress(duckdb.Error):
            connection.execute(f"SET GLOBAL {setting}")
    if threads is not None:
        connection.execute(f"SET threads = {int(threads)}")
    return connection
