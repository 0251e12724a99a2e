"""How long tools took, by name."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tool_times"]


def tool_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize tool calls by tool.

    Returns:
        One row per run, step, validate and tool, most time first: calls, failed, total_s, p50_s,
        p95_s, p99_s, max_s, share (of all tool time of the step).
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, tool, calls, failed, total_us / 1e6 AS total_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s, q[3] / 1e6 AS p99_s, max_us / 1e6 AS max_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY run, step, validate), 0) AS share
        FROM (
            SELECT run, step, validate, coalesce(tool, '(no name)') AS tool, count(*) AS calls,
                count(*) FILTER (status IS NOT NULL) AS failed, sum(duration_us) AS total_us,
                {quantiles("duration_us", 0.5, 0.95, 0.99)} AS q, max(duration_us) AS max_us
            FROM tool_calls WHERE {in_steps(steps)} GROUP BY ALL
        ) ORDER BY run, step, validate, total_us DESC, tool
        """
    )
