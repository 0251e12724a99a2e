"""Tokens, and tokens per second, of steps, replicas and single requests."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "ENGINE_RATE",
    "calls_covered",
    "replica_token_rates",
    "request_token_rates",
    "token_rates",
]


def calls_covered(group: str, where: str) -> str:
    """Return the SQL of generate calls with `place` and `covered_us`, for `ENGINE_RATE` by `group`.

    Args:
        group: Columns, `place` among them or not: the engine's process, else the server's address.
        where: Which calls.
    """
    return f"""(
        SELECT *, coalesce(max(end_us) OVER (
            PARTITION BY {group} ORDER BY begin_us, end_us
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
        FROM (
            SELECT *, coalesce(engine_name, server, '(not recorded)') AS place FROM engine_calls
        ) WHERE {where}
    )"""


_BUSY_S = "sum(greatest(end_us - greatest(begin_us, covered_us), 0)) / 1e6"
ENGINE_RATE = f"sum(response_tokens) / nullif({_BUSY_S}, 0)"
"""Generated tokens by the time in which at least one call was under way, of `calls_covered`."""
_CALL_RATE = """sum(response_tokens) FILTER (duration_us IS NOT NULL)
        / nullif(sum(duration_us) / 1e6, 0)"""

_TOKENS = f"""
    count(*) AS calls, try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
    try_cast(sum(response_tokens) AS BIGINT) AS generated_tokens,
    try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
    {_BUSY_S} AS busy_s, {ENGINE_RATE} AS engine_tokens_per_s, {_CALL_RATE} AS call_tokens_per_s
"""


def token_rates(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Count the tokens of each step, as generate calls report them.

    A conversation's tokens are prompt tokens again in every later turn of it.

    Returns:
        One row per run and step: calls, prompt_tokens, generated_tokens, cached_tokens (prompt
        tokens that the engine had already; None where it does not say), busy_s (time in which at
        least one call was under way), engine_tokens_per_s (by busy_s, all replicas),
        call_tokens_per_s (by the time of calls), generated_tokens_per_s (of finished requests, by
        the length of the whole step; None for validation and unfinished steps).
    """
    whole = "NULL::DOUBLE" if validate else "s.generated_tokens_per_s"
    return tables.rows(
        f"""
        WITH counted AS (
            SELECT run, step, {_TOKENS}
            FROM {calls_covered("run, step", rows_of(steps, validate=validate))}
            GROUP BY run, step
        ), lengths AS (
            SELECT run, step, generated_tokens_per_s FROM steps WHERE finished AND {in_steps(steps)}
        )
        SELECT c.*, {whole} AS generated_tokens_per_s
        FROM counted AS c LEFT JOIN lengths AS s ON s.run = c.run AND s.step = c.step
        ORDER BY c.run, c.step
        """
    )


def replica_token_rates(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Count the tokens of each replica, over all selected steps.

    Returns:
        One row per run and replica: replica (the engine's process, or the server's address), and
        the columns of `token_rates` but the last.
    """
    return tables.rows(
        f"""
        SELECT run, place AS replica, {_TOKENS}
        FROM {calls_covered("run, place", rows_of(steps, validate=validate))}
        GROUP BY run, place ORDER BY run, place
        """
    )


def request_token_rates(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize the tokens of finished requests.

    Returns:
        One row per run and step: requests, prompt_p50, prompt_max, generated_p50, generated_p95,
        generated_max (tokens), rate_p5, rate_p50 and rate_p95 (generated tokens by the time in
        engine calls, per second and request; None where engine calls were not recorded).
    """
    return tables.rows(
        f"""
        SELECT run, step, requests, prompt_p50, prompt_max, generated_q[1] AS generated_p50,
            generated_q[2] AS generated_p95, generated_max, rates[1] AS rate_p5, rates[2] AS rate_p50,
            rates[3] AS rate_p95
        FROM (
            SELECT run, step, count(*) AS requests,
                {quantiles("prompt_tokens", 0.5)}[1] AS prompt_p50, max(prompt_tokens) AS prompt_max,
                {quantiles("generated_tokens", 0.5, 0.95)} AS generated_q,
                max(generated_tokens) AS generated_max,
                {quantiles("generated_tokens * 1e6 / nullif(engine_us, 0)", 0.05, 0.5, 0.95)}
                    AS rates
            FROM requests
            WHERE finished AND generated_tokens IS NOT NULL
                AND {rows_of(steps, worker=worker, validate=validate)}
            GROUP BY run, step
        ) ORDER BY run, step
        """
    )
