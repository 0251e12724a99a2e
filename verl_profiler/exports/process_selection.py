"""Which processes and devices of a large run have tracks: of each role the slowest, the fastest and others.

A viewer shows a track per lane and counter; a thousand processes have thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from verl_profiler.reading.tables.tables import Tables

__all__ = ["DEVICES", "choose_processes", "estimated_tracks", "spread"]

_Item = TypeVar("_Item")
# Processes by run and role, the busiest first.
_Roles = dict[tuple[str, str], list[tuple[str, str]]]

# Of a large run, so many devices have counters.
DEVICES = 4
# About so many tracks a process has: its folder, lanes and counters.
_TRACKS = {"agent_loop": 4, "reward": 3, "engine": 13, "trainer": 12}
_OTHERS = 7

# How much time each process spent, by the events that show it.
_BUSY = """
SELECT run, name, any_value(role) AS role, coalesce(any_value(busy_us), 0) AS busy_us
FROM (
    SELECT DISTINCT run, name, role FROM processes
    UNION ALL SELECT DISTINCT run, name, role FROM event_fields
) LEFT JOIN (
    SELECT run, name, sum(duration_us) AS busy_us FROM (
        SELECT run, name, duration_us FROM rank_spans
        UNION ALL SELECT run, name, duration_us FROM requests
        UNION ALL SELECT run, name, duration_us FROM engine_requests
    ) GROUP BY run, name
) USING (run, name) GROUP BY run, name ORDER BY role, busy_us DESC, run, name
"""


def estimated_tracks(tables: Tables) -> int:
    """Return about how many tracks all processes of the run have."""
    rows = tables.rows("SELECT role, count(DISTINCT (run, name)) AS many FROM processes GROUP BY 1")
    return sum(_TRACKS.get(row["role"], _OTHERS) * row["many"] for row in rows)


def choose_processes(tables: Tables, room: int) -> tuple[int, int]:
    """Make the table `traced_processes` (run, name) of those that get tracks.

    Args:
        tables: The tables of the run.
        room: About how many tracks they may have; one process of each role always has its own.

    Returns:
        How many are drawn, and of how many.
    """
    roles: _Roles = {}
    for row in tables.rows(_BUSY):
        roles.setdefault((row["run"], row["role"] or ""), []).append((row["run"], row["name"]))
    each = 1
    while _taken(roles, each + 1) <= room and each < max(map(len, roles.values()), default=1):
        each += 1
    chosen = [process for own in roles.values() for process in spread(own, each)]
    tables.connection.execute(
        "CREATE OR REPLACE TEMP TABLE traced_processes (run VARCHAR, name VARCHAR)"
    )
    if chosen:
        tables.connection.executemany("INSERT INTO traced_processes VALUES (?, ?)", chosen)
    return len(chosen), sum(map(len, roles.values()))


def _taken(roles: _Roles, each: int) -> int:
    return sum(_TRACKS.get(role, _OTHERS) * min(each, len(own)) for (_, role), own in roles.items())


def spread(ordered: Sequence[_Item], count: int) -> list[_Item]:
    """Choose `count` of a list at even distances, the first and the last among them."""
    if len(ordered) <= count:
        return list(ordered)
    distance = (len(ordered) - 1) / max(1, count - 1)
    return [ordered[round(place * distance)] for place in range(count)]
