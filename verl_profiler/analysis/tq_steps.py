"""What TransferQueue took in each step, and over the time of the run."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_selection import SPEED, of_function
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_over_time", "tq_steps"]

_SUMS = f"""
    SELECT *, mib / nullif(moving_s, 0) AS mib_per_s FROM (
        SELECT run, place,
            try_cast(coalesce(sum(weight) FILTER (whole), 0) AS BIGINT) AS calls,
            sum(duration_us * weight) FILTER (whole) / 1e6 AS total_s,
            sum(get_us * weight) FILTER (whole) / 1e6 AS get_s,
            sum(compute_us * weight) FILTER (whole) / 1e6 AS compute_s,
            sum(put_us * weight) FILTER (whole) / 1e6 AS put_s,
            coalesce(sum((coalesce(get_us, 0) + coalesce(put_us, 0)) * weight) FILTER (whole AND
                duration_us IS NOT NULL), 0)
                / nullif(sum(duration_us * weight) FILTER (whole), 0) AS overhead_share,
            try_cast(coalesce(sum(weight) FILTER (NOT whole), 0) AS BIGINT) AS transfers,
            try_cast(sum(size_bytes * weight) AS BIGINT) AS size_bytes,
            sum(size_bytes * weight) / {1 << 20} AS mib,
            sum(duration_us * weight) FILTER (size_bytes IS NOT NULL) / 1e6 AS moving_s,
            {{rates}}
        FROM both_kinds GROUP BY run, place
    )
"""
_RATE = """
    sum(size_bytes * weight) FILTER (event = 'tq_{op}') / 1048576
        / nullif(sum(duration_us * weight) FILTER (event = 'tq_{op}' AND size_bytes IS NOT NULL)
            / 1e6, 0) AS {op}_mib_per_s"""
_RATES = ",".join(_RATE.format(op=op) for op in ("get", "put"))


def _both(steps: Steps, function: str | None) -> str:
    condition = f"{in_steps(steps)} AND {of_function(function)}"
    return f"""
        SELECT run, step, begin_us, duration_us, get_us, compute_us, put_us, NULL AS size_bytes,
            NULL AS event, coalesce(sampled, 1)::HUGEINT AS weight, true AS whole
        FROM tq_calls WHERE NOT coalesce(waits, false) AND {condition}
        UNION ALL
        SELECT run, step, begin_us, duration_us, NULL, NULL, NULL, size_bytes, event,
            coalesce(sampled, 1), false
        FROM transfers WHERE event IN ('tq_get', 'tq_put') AND {condition}
    """


def tq_steps(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Sum up traced calls, gets and puts by step.

    Returns:
        One row per run and step: calls, total_s, get_s, compute_s, put_s, overhead_share (of traced
        functions that do not wait for others); transfers, size_bytes, mib_per_s, speed, get_mib_per_s, put_mib_per_s (of gets and
        puts).  Calls of no known step are in the row with step None.
    """
    return tables.rows(
        f"""
        WITH both_kinds AS (SELECT *, step AS place FROM ({_both(steps, function)})),
        summed AS ({_SUMS.format(rates=_RATES)})
        SELECT run, place AS step, calls, total_s, get_s, compute_s, put_s, overhead_share, transfers,
            size_bytes, mib_per_s, {SPEED} AS speed, get_mib_per_s, put_mib_per_s
        FROM summed ORDER BY run, step NULLS LAST
        """
    )


def tq_over_time(
    tables: Tables, steps: Steps = None, *, function: str | None = None, parts: int = 60
) -> Rows:
    """Cut the run into equal parts of time, and sum up the calls that begin in each.

    Args:
        tables: The tables.
        steps: First and last step; None for all.
        function: One function; None for all.
        parts: How many; empty ones are left out.

    Returns:
        One row per run and part: part, begin_s and end_s (after the first call), and the columns of
        `tq_steps`.
    """
    return tables.rows(
        f"""
        WITH timed AS (SELECT * FROM ({_both(steps, function)}) WHERE begin_us IS NOT NULL),
        extents AS (
            SELECT run, min(begin_us) AS first_us,
                greatest(max(begin_us) - min(begin_us), 1) / {int(parts)} AS width_us
            FROM timed GROUP BY run
        ), both_kinds AS (
            SELECT t.*, least(floor((begin_us - first_us) / width_us), {int(parts) - 1})::INTEGER
                AS place
            FROM timed AS t JOIN extents USING (run)
        ), summed AS ({_SUMS.format(rates=_RATES)})
        SELECT s.run, place AS part, place * width_us / 1e6 AS begin_s,
            (place + 1) * width_us / 1e6 AS end_s, calls, total_s, get_s, compute_s, put_s,
            overhead_share, transfers, size_bytes, mib_per_s, {SPEED} AS speed, get_mib_per_s,
            put_mib_per_s
        FROM summed AS s JOIN extents USING (run) ORDER BY s.run, part
        """
    )
