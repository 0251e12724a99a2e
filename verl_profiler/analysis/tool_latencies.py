"""How long each tool took over all selected steps, and how often it failed."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tool_latencies"]


def tool_latencies(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize tool calls by tool, over all selected steps.

    Returns:
        One row per run and tool, most time first: calls, failed, failed_share, errors (types and
        counts, most frequent first), total_s, share (of the time of all tool calls),
        requests_share (of the time of all finished requests; calls made at the same time count
        each), mean_s, p50_s, p80_s, p95_s, p99_s, max_s, slowest_step and slowest_request_id.
    """
    selection = rows_of(steps, worker=worker, validate=validate)
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT *, coalesce(tool, '(no name)') AS tool_name FROM tool_calls
            WHERE duration_us IS NOT NULL AND {selection}
        ), wholes AS (
            SELECT run, sum(duration_us) AS requests_us FROM requests
            WHERE {selection} GROUP BY run
        ), errors AS (
            SELECT run, tool_name, string_agg(what || ' ' || times, ', '
                ORDER BY times DESC, what) AS errors
            FROM (
                SELECT run, tool_name, coalesce(error, status) AS what, count(*) AS times
                FROM calls WHERE status IS NOT NULL GROUP BY ALL
            ) GROUP BY run, tool_name
        ), summed AS (
            SELECT run, tool_name, count(*) AS calls, count(*) FILTER (status IS NOT NULL) AS failed,
                sum(duration_us) AS total_us, avg(duration_us) AS mean_us,
                {quantiles("duration_us", 0.5, 0.8, 0.95, 0.99)} AS q, max(duration_us) AS max_us,
                arg_max({{'step': step, 'request_id': request_id}},
                    (duration_us, -begin_us, request_id)) AS slowest
            FROM calls GROUP BY run, tool_name
        )
        SELECT s.run, s.tool_name AS tool, calls, failed, failed / calls AS failed_share, e.errors,
            total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY s.run), 0) AS share,
            total_us / nullif(requests_us, 0) AS requests_share, mean_us / 1e6 AS mean_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p95_s, q[4] / 1e6 AS p99_s,
            max_us / 1e6 AS max_s, slowest.step AS slowest_step,
            slowest.request_id AS slowest_request_id
        FROM summed AS s
        LEFT JOIN errors AS e ON e.run = s.run AND e.tool_name = s.tool_name
        LEFT JOIN wholes AS w ON w.run = s.run
        ORDER BY s.run, total_us DESC, tool
        """
    )
