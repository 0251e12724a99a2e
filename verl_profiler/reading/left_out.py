"""Leave lines out of a part that cannot be: exact copies of others, and calls longer than their request."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import duckdb

from verl_profiler.reading.event_sql import AS_PARQUET
from verl_profiler.reading.scans import quoted, scan
from verl_profiler.reading.tables.derivations import NESTING_US
from verl_profiler.units import counted, some

__all__ = ["LeftOut", "leave_out"]

# Of more processes than this, one sentence names so many.
_SHOWN = 4
_NOT_COMPARED = ("file_id", "flawed")
_KEY = "hash(name, step, event, end_us, duration_us, request_id, turn)"
_SPANS = "family = 'rollout' AND request_id IS NOT NULL AND duration_us IS NOT NULL"
# Requests with a call that took longer than all of the request.
_SHORTER = f"""
    SELECT name, step, validate, request_id,
        min(end_us - duration_us) FILTER (event = 'request') AS request_us
    FROM {{part}} WHERE {_SPANS} GROUP BY ALL
    HAVING max(duration_us) FILTER (event <> 'request')
        > max(duration_us) FILTER (event = 'request') + {NESTING_US}
"""
_EARLY = f"""coalesce({_SPANS} AND event <> 'request'
    AND end_us - duration_us < request_us - {NESTING_US}, false)"""


class LeftOut(NamedTuple):
    """What was left out of a part.

    Args:
        copies: Lines that are copies of others, by process.
        early: Lines of calls that would have begun before their request, by process.
        problems: Sentences about both.
    """

    copies: dict[str, int]
    early: dict[str, int]
    problems: list[str]


def leave_out(
    connection: duckdb.DuckDBPyConnection, path: Path, headed: Collection[str]
) -> LeftOut:
    """Write a part again without lines that cannot be; most parts have none and stay as they are.

    Args:
        connection: Does the work.
        path: The part.
        headed: The processes with a header.  Their times are in microseconds, so that no two of their
            events are the same; those of other logs may be.

    Raises:
        duckdb.Error: The part cannot be written.
    """
    part = scan("read_parquet", [path])
    own = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted(headed)) or "NULL"
    shorter = _SHORTER.format(part=part)
    ((more, some_early),) = connection.execute(
        f"SELECT (SELECT count(*) - count(DISTINCT {_KEY}) FROM {part} WHERE name IN ({own})), "
        f"EXISTS ({shorter})"
    ).fetchall()
    if not more and not some_early:
        return LeftOut({}, {}, [])
    columns = [row[0] for row in connection.execute(f"DESCRIBE FROM {part}").fetchall()]
    alike = ", ".join(f'"{name}"' for name in columns if name not in _NOT_COMPARED)
    numbered = scan("read_parquet", [path], "file_row_number = true")
    # Only lines whose few fields occur again are compared in all.
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE left_out AS
        WITH again AS (
            SELECT {_KEY} AS key FROM {part} WHERE name IN ({own}) GROUP BY ALL HAVING count(*) > 1
        ), copies AS (
            SELECT file_row_number FROM {numbered}
            WHERE name IN ({own}) AND {_KEY} IN (SELECT key FROM again)
            QUALIFY row_number() OVER (PARTITION BY {alike}) > 1
        ), early AS (
            SELECT file_row_number FROM {numbered} AS p JOIN ({shorter})
                USING (name, step, validate, request_id) WHERE {_EARLY}
        )
        SELECT file_row_number, name, step, event, request_id, duration_us,
            file_row_number IN (SELECT file_row_number FROM copies) AS is_copy
        FROM {numbered} WHERE file_row_number IN (FROM copies UNION ALL FROM early)
        """
    )
    try:
        told = _told(connection)
        if told.problems:
            kept = ", ".join(f'"{name}"' for name in columns)
            connection.execute(
                f"CREATE OR REPLACE TEMP TABLE kept AS SELECT {kept} FROM {numbered} "
                "WHERE file_row_number NOT IN (SELECT file_row_number FROM left_out)"
            )
            connection.execute(f"COPY kept TO '{quoted(path)}' {AS_PARQUET}")
        return told
    finally:
        connection.execute("DROP TABLE left_out; DROP TABLE IF EXISTS kept")


def _told(connection: duckdb.DuckDBPyConnection) -> LeftOut:
    """Return what is marked as left out."""
    copies: dict[str, int] = {}
    steps: dict[str, list[str]] = {}
    for name, step, lines in connection.execute(
        "SELECT name, step, count(*) FROM left_out WHERE is_copy GROUP BY ALL ORDER BY ALL"
    ).fetchall():
        copies[name] = copies.get(name, 0) + lines
        steps.setdefault(name, []).append(f"step {step}" if step is not None else "no step")
    problems = [
        f"{name} has {counted(lines, 'line')} twice ({some(steps[name], _SHOWN)}); each is counted once"
        for name, lines in copies.items()
    ]
    if len(copies) > _SHOWN:
        total = counted(sum(copies.values()), "line")
        names = some(list(copies), _SHOWN)
        problems = [f"{len(copies)} processes have {total} twice ({names}); each is counted once"]
    early: dict[str, int] = {}
    for name, event, lines, request, duration_us in connection.execute(
        "SELECT name, event, count(*), min(request_id), max(duration_us) FROM left_out "
        "WHERE NOT is_copy GROUP BY ALL ORDER BY ALL"
    ).fetchall():
        early[name] = early.get(name, 0) + lines
        problems.append(
            f"{name} has {lines} {event} of up to {duration_us / 1e6:,.1f} s, longer than the request and "
            f"begun before it (for example {request}); left out"
        )
    return LeftOut(copies, early, problems)
