"""What went through TransferQueue and what that took."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["transfer_totals"]


def transfer_totals(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up TransferQueue calls.

    Returns:
        One row per run, step, role and event, most time first: calls, failed, total_s, p95_s,
        max_s, size_bytes (None for calls that move no data), rows.
    """
    return tables.rows(
        f"""
        SELECT run, step, role, event, count(*) AS calls,
            count(*) FILTER (status IS NOT NULL) AS failed,
            sum(duration_us) / 1e6 AS total_s, {quantiles("duration_us", 0.95)}[1] / 1e6 AS p95_s,
            max(duration_us) / 1e6 AS max_s, try_cast(sum(size_bytes) AS BIGINT) AS size_bytes,
            try_cast(sum("rows") AS BIGINT) AS "rows"
        FROM transfers WHERE {in_steps(steps)}
        GROUP BY run, step, role, event ORDER BY run, step, total_s DESC, role, event
        """
    )
