"""How long tools took, what rewards came out, and how long scoring took."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, estimated, in_steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables


def _summed(group: str, where: str) -> str:
    """Return the SQL of tool calls, summed up by `group` (columns of `tool_calls`) and tool."""
    return f"""
        SELECT {group}, coalesce(tool, '(no name)') AS tool_name, count(*) AS calls,
            count(*) FILTER (status IS NOT NULL) AS failed, sum(duration_us) AS total_us,
            avg(duration_us) AS mean_us, {quantiles("duration_us", 0.5, 0.8, 0.95, 0.99)} AS q,
            max(duration_us) AS max_us, bool_or(sampled > 1) AS estimated,
            arg_max({{'step': step, 'request_id': request_id}},
                (duration_us, -begin_us, request_id)) FILTER (duration_us IS NOT NULL) AS slowest
        FROM {estimated("tool_calls")} WHERE {where} GROUP BY {group}, tool_name
    """


def tool_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize tool calls by tool.

    Returns:
        Table `tool_times`: one row per run, step, validate and tool, most time first.
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, tool_name AS tool, calls, failed, total_us / 1e6 AS total_s,
            q[1] / 1e6 AS p50_s, q[3] / 1e6 AS p95_s, q[4] / 1e6 AS p99_s, max_us / 1e6 AS max_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY run, step, validate), 0) AS share,
            estimated
        FROM ({_summed("run, step, validate", in_steps(steps))})
        ORDER BY run, step, validate, total_us DESC, tool
        """
    )


def tool_latencies(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize tool calls by tool, over all selected steps.

    Returns:
        Table `tool_latencies`: one row per run and tool, most time first.
    """
    selection = rows_of(steps, worker=worker, validate=validate)
    return tables.rows(
        f"""
        WITH wholes AS (
            SELECT run, sum(duration_us) AS requests_us FROM requests
            WHERE {selection} GROUP BY run
        ), errors AS (
            SELECT run, tool_name, string_agg(what || ' ' || times, ', '
                ORDER BY times DESC, what) AS errors
            FROM (
                SELECT run, coalesce(tool, '(no name)') AS tool_name,
                    coalesce(error, status) AS what, count(*) AS times
                FROM {estimated("tool_calls")} WHERE status IS NOT NULL AND {selection}
                GROUP BY ALL
            ) GROUP BY run, tool_name
        )
        SELECT s.run, s.tool_name AS tool, calls, failed, failed / calls AS failed_share, e.errors,
            total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY s.run), 0) AS share,
            total_us / nullif(requests_us, 0) AS requests_share, mean_us / 1e6 AS mean_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p95_s, q[4] / 1e6 AS p99_s,
            max_us / 1e6 AS max_s, slowest.step AS slowest_step,
            slowest.request_id AS slowest_request_id, estimated
        FROM ({_summed("run", selection)}) AS s
        LEFT JOIN errors AS e ON e.run = s.run AND e.tool_name = s.tool_name
        LEFT JOIN wholes AS w ON w.run = s.run
        ORDER BY s.run, total_us DESC, tool
        """
    )


def reward_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the time that requests spend after their conversation.

    Reward workers receive neither the step nor whether a request is of validation: both are those of
    the request with the same `uid`.

    Returns:
        Table `reward_times`: one row per run, step and part.
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT run, step, uid, duration_us, postprocess_us, reward_us FROM requests
            WHERE finished AND {rows_of(steps, validate=False)}
        ), origins AS (
            SELECT DISTINCT run, step, uid FROM chosen WHERE uid IS NOT NULL
        ), parts AS (
            SELECT run, step, 'postprocess' AS part, postprocess_us AS us FROM chosen
            UNION ALL SELECT run, step, 'reward', reward_us FROM chosen
            UNION ALL SELECT o.run, o.step, 'score', coalesce(s.compute_us, s.duration_us)
                FROM reward_scores AS s JOIN origins AS o ON o.run = s.run AND o.uid = s.uid
        ), wholes AS (
            SELECT run, step, sum(duration_us) AS requests_us FROM chosen GROUP BY run, step
        ), summed AS (
            SELECT run, step, part, count(*) AS count, sum(us) AS total_us, avg(us) AS mean_us,
                {quantiles("us", 0.5, 0.95, 0.99)} AS q, max(us) AS max_us
            FROM parts WHERE us IS NOT NULL GROUP BY run, step, part
        )
        SELECT run, step, part, count, total_us / 1e6 AS total_s, mean_us / 1e6 AS mean_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s, q[3] / 1e6 AS p99_s, max_us / 1e6 AS max_s,
            total_us / nullif(requests_us, 0) AS requests_share
        FROM summed JOIN wholes USING (run, step) ORDER BY run, step, part
        """
    )
