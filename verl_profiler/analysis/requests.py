"""How long requests took, what they spent it on, and which were the slowest."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables

__all__ = ["request_parts", "request_times", "slowest_requests", "turns_per_request"]


def request_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize request durations.

    Returns:
        One row per run, step and validate: requests, unfinished, failed, mean_s, p50_s, p80_s,
        p90_s, p95_s, p99_s, p999_s, max_s, mean_turns, max_turns, prompt_tokens, response_tokens,
        generated_tokens, tool_tokens (sums; the response is both of the latter).  Percentiles are of finished requests.
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, requests, unfinished, failed, mean_us / 1e6 AS mean_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p90_s, q[4] / 1e6 AS p95_s,
            q[5] / 1e6 AS p99_s, q[6] / 1e6 AS p999_s, max_us / 1e6 AS max_s,
            mean_turns, max_turns, prompt_tokens, response_tokens, generated_tokens, tool_tokens
        FROM (
            SELECT run, step, validate, count(*) AS requests,
                count(*) FILTER (NOT finished) AS unfinished,
                count(*) FILTER (status IN ('error', 'cancelled')) AS failed,
                avg(duration_us) AS mean_us,
                {quantiles("duration_us", 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)} AS q,
                max(duration_us) AS max_us,
                avg(turns) FILTER (finished) AS mean_turns, max(turns) AS max_turns,
                try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
                try_cast(sum(response_tokens) AS BIGINT) AS response_tokens,
                try_cast(sum(generated_tokens) AS BIGINT) AS generated_tokens,
                try_cast(sum(tool_tokens) AS BIGINT) AS tool_tokens
            FROM requests WHERE {in_steps(steps)} GROUP BY run, step, validate
        ) ORDER BY run, step, validate
        """
    )


def request_parts(tables: Tables, steps: Steps = None) -> Rows:
    """Cut the time of all finished requests into parts that add up to the whole.

    Returns:
        One row per run, step, validate and part: total_s, share (of the parts' sum), mean_s.
        Parts that were not recorded are left out; `other` is what no event explains.
    """
    parts = [*REQUEST_PARTS, "other"]
    listed = ", ".join(f"sum({part}_us) AS {part}" for part in parts)
    return tables.rows(
        f"""
        WITH sums AS (
            SELECT run, step, validate, count(*) AS requests, {listed}
            FROM requests WHERE finished AND {in_steps(steps)} GROUP BY run, step, validate
        ), long AS (
            UNPIVOT sums ON {", ".join(parts)} INTO NAME part VALUE total_us
        )
        SELECT run, step, validate, part, total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY run, step, validate), 0) AS share,
            total_us / requests / 1e6 AS mean_s
        FROM long ORDER BY run, step, validate, total_us DESC, part
        """
    )


def turns_per_request(tables: Tables, steps: Steps = None) -> Rows:
    """Count requests by how many turns they took.

    Returns:
        One row per run, step, validate and turns: requests, share, mean_s (of finished ones).
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, turns, count(*) AS requests,
            count(*) / sum(count(*)) OVER (PARTITION BY run, step, validate) AS share,
            avg(duration_us) / 1e6 AS mean_s
        FROM requests WHERE turns IS NOT NULL AND {in_steps(steps)}
        GROUP BY run, step, validate, turns ORDER BY run, step, validate, turns
        """
    )


def slowest_requests(
    tables: Tables, steps: Steps = None, count: int = 1, *, validate: bool = False
) -> Rows:
    """Find the slowest requests of each step, and the one call that took longest in each.

    `count` is how many per step; `validate` looks at validation instead of training.

    Returns:
        One row per request, slowest first within its step: run, step, name, request_id, sample,
        session, status, turns, duration_s, one `<part>_s` per part (None where not recorded),
        other_s, longest (`engine` or the tool's name), longest_turn, longest_s.
    """
    listed = ", ".join(f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other"))
    return tables.rows(
        f"""
        WITH asked AS NOT MATERIALIZED (
            SELECT * FROM requests WHERE finished AND validate = {validate} AND {in_steps(steps)}
        ), bounds AS (
            -- They leave a few rows of each step to be sorted.
            SELECT run, step, max(duration_us, {max(1, int(count))}) AS longest_us
            FROM asked GROUP BY run, step
        ), chosen AS MATERIALIZED (
            SELECT a.*, row_number() OVER (PARTITION BY a.run, a.step
                ORDER BY duration_us DESC, begin_us, request_id) AS place
            FROM asked AS a JOIN bounds AS b
                ON a.run = b.run AND a.step IS NOT DISTINCT FROM b.step
            WHERE duration_us >= longest_us[-1]
            QUALIFY place <= {int(count)}
        ), calls AS (
            SELECT run, step, name, validate, request_id, turn, duration_us, 'engine' AS what
            FROM engine_calls SEMI JOIN chosen USING (run, request_id)
            UNION ALL
            SELECT run, step, name, validate, request_id, turn, duration_us, coalesce(tool, 'tool')
            FROM tool_calls SEMI JOIN chosen USING (run, request_id)
            UNION ALL
            -- All tool calls of a turn together, where they are not there one by one.
            SELECT run, step, name, validate, request_id, turn, tool_us, 'tool'
            FROM turns SEMI JOIN chosen USING (run, request_id)
            WHERE tool_calls = 0 AND tool_us > 0
        ), longest AS (
            SELECT run, step, name, validate, request_id,
                arg_max({{'what': what, 'turn': turn, 'duration_us': duration_us}},
                    (duration_us, -turn)) AS call
            FROM calls GROUP BY run, step, name, validate, request_id
        )
        SELECT c.run, c.step, c.name, c.request_id, c.sample, c.session, c.status, c.turns,
            c.duration_us / 1e6 AS duration_s, {listed},
            l.call.what AS longest, l.call.turn AS longest_turn,
            l.call.duration_us / 1e6 AS longest_s
        FROM chosen AS c LEFT JOIN longest AS l USING (run, step, name, validate, request_id)
        ORDER BY c.run, c.step, c.place
        """
    )
