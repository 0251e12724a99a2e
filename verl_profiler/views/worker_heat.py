"""The heat map of the page: how late each agent-loop worker ends, step by step.

Of many workers, those that end last are rows of their own, and one more row has the latest of the
others; of many steps, neighbors share a column, which has the latest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.selection import Steps, in_steps
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.frames import short_text

__all__ = ["worker_heat"]

_WORKERS = 24
_COLUMNS = 180
_LEAST_WORKERS = 3
_LEAST_STEPS = 3


def worker_heat(
    tables: Tables, steps: Steps, places: Mapping[tuple[Any, Any], int]
) -> dict[str, Any] | None:
    """Return how long after the median worker each one ended.

    Args:
        tables: The tables of the run.
        steps: First and last step; all when None.
        places: Place of a step on the page by run and step.

    Returns:
        `workers` (name, or how many share the last row) from the latest on; `columns` (first and
        last step of each, by place); `cells`, per worker and column the seconds after the median
        worker and the step in which that was, None where it had no request; None where there are
        too few workers or steps for a map.
    """
    connection = tables.connection
    tables.make("requests")
    try:
        connection.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE worker_ends AS
            SELECT run, step, name, end_us - median(end_us) OVER (PARTITION BY run, step) AS behind_us
            FROM (
                SELECT run, step, name, max(end_us) AS end_us FROM requests
                WHERE finished AND NOT validate AND step IS NOT NULL AND {in_steps(steps)}
                GROUP BY run, step, name
            )
            """
        )
        counted = tables.row(
            "SELECT count(DISTINCT name) AS workers, count(DISTINCT (run, step)) AS steps "
            "FROM worker_ends"
        )
        if counted["workers"] < _LEAST_WORKERS or counted["steps"] < _LEAST_STEPS:
            return None
        ranked = [
            row["name"]
            for row in tables.rows(
                "SELECT name FROM worker_ends GROUP BY name "
                "ORDER BY sum(greatest(behind_us, 0)) DESC, length(name), name"
            )
        ]
        listed = sorted(
            place
            for row in tables.rows("SELECT DISTINCT run, step FROM worker_ends")
            if (place := places.get((row["run"], row["step"]))) is not None
        )
        columns = _columns(listed)
        column_of = {
            place: number for number, column in enumerate(columns) for place in range(*column)
        }
        own = ranked[:_WORKERS] if len(ranked) > _WORKERS + 1 else ranked
        row_of = {name: number for number, name in enumerate(own)}
        cells: list[list[list[Any] | None]] = [
            [None] * len(columns) for _ in range(len(own) + (len(own) < len(ranked)))
        ]
        # The others of a step are one row already.
        shown = ", ".join("?" * len(own))
        found = connection.execute(
            f"""
            SELECT run, step, name, behind_us FROM worker_ends WHERE name IN ({shown})
            UNION ALL
            SELECT run, step, NULL, max(behind_us) FROM worker_ends WHERE name NOT IN ({shown})
            GROUP BY run, step
            """,
            [*own, *own],
        ).fetchall()
    finally:
        connection.execute("DROP TABLE IF EXISTS worker_ends")
    for run, step, name, behind_us in found:
        place = places.get((run, step))
        if place is None:
            continue
        line = cells[row_of.get(name, len(own))]
        column = column_of[place]
        before = line[column]
        value = round(behind_us / 1e6, 2)
        if before is None or value > before[0]:
            line[column] = [value, place]
    others = len(ranked) - len(own)
    return {
        "workers": [short_text(name) for name in own],
        "others": others,
        "columns": [[first, last - 1] for first, last in columns],
        "cells": cells,
    }


def _columns(places: list[int]) -> list[tuple[int, int]]:
    """Cut the steps into equal columns: the first place of each, and the one behind its last."""
    count = min(_COLUMNS, len(places))
    bounds = [places[round(number * len(places) / count)] for number in range(count)]
    return list(zip(bounds, [*bounds[1:], places[-1] + 1], strict=True))
