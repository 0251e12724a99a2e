"""Which steps and rows an analysis covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "Rows",
    "Steps",
    "after_warm_up",
    "estimated",
    "in_steps",
    "left_out",
    "rows_of",
    "steady",
    "warm_up",
]

# First and last step, both included; None for all.
Steps = tuple[int, int] | None
Rows = list[dict[str, Any]]
_Row = TypeVar("_Row", bound=Mapping[str, Any])

# With fewer finished steps the first one counts, too.
_LEAST = 3


def in_steps(steps: Steps, column: str = "step") -> str:
    """Return the SQL condition for `steps`."""
    return "true" if steps is None else f"{column} BETWEEN {int(steps[0])} AND {int(steps[1])}"


def warm_up(finished: Sequence[int], steps: Steps = None) -> list[int]:
    """Return the steps that means, findings, what-if and comparisons leave out: the first of a run.

    Workers, engines and caches warm up in it.  It counts where the user names steps, and where
    fewer than two others have finished.

    Args:
        finished: The run's finished training steps.
        steps: The steps that the user selected.
    """
    return [min(finished)] if steps is None and len(finished) >= _LEAST else []


def after_warm_up(tables: Tables, steps: Steps = None) -> Steps:
    """Return the range without the warm-up; see `warm_up`."""
    finished = _finished(tables)
    return (finished[1], finished[-1]) if warm_up(finished, steps) else steps


def left_out(tables: Tables, steps: Steps = None) -> list[int]:
    """Return the steps that means leave out; see `warm_up`."""
    return warm_up(_finished(tables), steps)


def steady(rows: Sequence[_Row], left_out: Sequence[int]) -> list[_Row]:
    """Return the rows of the steps that means cover, or all where there are no others."""
    return [row for row in rows if row["step"] not in left_out] or [*rows]


def _finished(tables: Tables) -> list[int]:
    rows = tables.rows("SELECT DISTINCT step FROM steps WHERE finished AND step > 0 ORDER BY step")
    return [row["step"] for row in rows]


def estimated(table: str) -> str:
    """Return the SQL of a table of details in which each row is as often as it counts.

    Where the details of one request in `sampled` were recorded, its rows stand for those of as many
    requests: counts, sums, means and quantiles over the result are Horvitz-Thompson estimates of all
    requests'.  Where nothing is sampled, it is the table.

    Args:
        table: `turns`, `tool_calls`, `engine_calls`, `server_routes` or `event_fields`.
    """
    return (
        f"(SELECT * FROM {table} UNION ALL SELECT * EXCLUDE (copy) FROM "
        f"(SELECT *, unnest(range(1, sampled)) AS copy FROM {table} WHERE sampled > 1))"
    )


def rows_of(
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool | None = None,
    table: str = "",
) -> str:
    """Return the SQL condition for a selection.

    Args:
        steps: First and last step; None for all.
        worker: The rank of an agent-loop worker (`worker_<rank>`, restarted ones too); None for all.
        validate: True for validation alone, False for training alone, None for both.
        table: The alias of the table, where the query has several.
    """
    prefix = f"{table}." if table else ""
    conditions = [in_steps(steps, f"{prefix}step")]
    if worker is not None:
        conditions.append(f"regexp_full_match({prefix}name, 'worker_{int(worker)}(-\\d+)?')")
    if validate is not None:
        conditions.append(f"{prefix}validate = {bool(validate)}")
    return " AND ".join(conditions)
