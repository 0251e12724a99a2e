"""What TransferQueue calls moved, how fast, and for how long any was under way."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["transfer_rates"]


def transfer_rates(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up TransferQueue calls, training and validation together.

    Returns:
        One row per run, step, role and event, most time first: calls, failed, processes, total_s
        (all calls), busy_s (time in which a process had at least one call under way, summed over
        processes), busy_share (of the step in each process; None for unfinished steps), p50_s,
        p95_s, max_s, size_bytes (None for calls that move no data), rows, bytes_per_s (of the calls
        that say how much they moved, each by its own time).
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY run, step, name, event ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM transfers WHERE duration_us IS NOT NULL AND {in_steps(steps)}
        ), lengths AS (
            SELECT run, step, duration_us AS step_us FROM steps WHERE finished
        ), summed AS (
            SELECT run, step, role, event, count(*) AS calls,
                count(*) FILTER (status IS NOT NULL) AS failed, count(DISTINCT name) AS processes,
                sum(duration_us) AS total_us,
                sum(greatest(end_us - greatest(begin_us, covered_us), 0)) AS busy_us,
                {quantiles("duration_us", 0.5, 0.95)} AS q, max(duration_us) AS max_us,
                try_cast(sum(size_bytes) AS BIGINT) AS size_bytes, try_cast(sum("rows") AS BIGINT) AS "rows",
                sum(size_bytes) / nullif(sum(duration_us) FILTER (size_bytes IS NOT NULL), 0) * 1e6
                    AS bytes_per_s
            FROM calls GROUP BY run, step, role, event
        )
        SELECT c.run, c.step, role, event, calls, failed, processes, total_us / 1e6 AS total_s,
            busy_us / 1e6 AS busy_s, busy_us / nullif(step_us * processes, 0) AS busy_share,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s, max_us / 1e6 AS max_s, size_bytes, "rows",
            bytes_per_s
        FROM summed AS c LEFT JOIN lengths AS s ON s.run = c.run AND s.step = c.step
        ORDER BY c.run, c.step, total_us DESC, role, event
        """
    )
