"""Tokens, and tokens per second, of steps, replicas and single requests."""

from __future__ import annotations

from verl_profiler.analysis.rows_of import rows_of
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["replica_token_rates", "request_token_rates", "token_rates"]

_TOKENS = """
    count(*) AS calls, try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
    try_cast(sum(response_tokens) AS BIGINT) AS response_tokens, try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
    sum(response_tokens) / nullif((max(end_us) - min(begin_us)) / 1e6, 0) AS response_tokens_per_s,
    sum(response_tokens) FILTER (duration_us IS NOT NULL)
        / nullif(sum(duration_us) / 1e6, 0) AS call_tokens_per_s
"""


def token_rates(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Count the tokens of each step, as generate calls report them.

    A conversation's tokens are prompt tokens again in every later turn of it.

    Returns:
        One row per run and step: calls, prompt_tokens, response_tokens, cached_tokens (prompt
        tokens that the engine had already; None where it does not say), response_tokens_per_s (from
        the first call's begin to the last one's end, all replicas), call_tokens_per_s (per call
        under way), step_tokens_per_s (response tokens by the length of the whole step; None for
        validation and unfinished steps).
    """
    whole = "NULL::DOUBLE" if validate else "c.response_tokens / nullif(s.duration_us / 1e6, 0)"
    return tables.rows(
        f"""
        WITH counted AS (
            SELECT run, step, {_TOKENS} FROM engine_calls
            WHERE {rows_of(steps, validate=validate)} GROUP BY run, step
        ), lengths AS (
            SELECT run, step, duration_us FROM steps WHERE finished AND {in_steps(steps)}
        )
        SELECT c.*, {whole} AS step_tokens_per_s
        FROM counted AS c LEFT JOIN lengths AS s ON s.run = c.run AND s.step = c.step
        ORDER BY c.run, c.step
        """
    )


def replica_token_rates(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Count the tokens of each replica, over all selected steps.

    Returns:
        One row per run and replica: replica (the engine's process, or the server's address), calls,
        prompt_tokens, response_tokens, cached_tokens, busy_s (time in which at least one call was
        under way), response_tokens_per_s (by busy_s), call_tokens_per_s (per call under way).
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT *, coalesce(engine_name, server, '(not recorded)') AS place FROM engine_calls
            WHERE {rows_of(steps, validate=validate)}
        ), reached AS (
            SELECT run, place, begin_us, end_us, coalesce(max(end_us) OVER (
                PARTITION BY run, place ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM calls
        ), busy AS (
            SELECT run, place, sum(greatest(end_us - greatest(begin_us, covered_us), 0)) AS busy_us
            FROM reached GROUP BY run, place
        ), counted AS (
            SELECT run, place, {_TOKENS} FROM calls GROUP BY run, place
        )
        SELECT run, place AS replica, calls, prompt_tokens, response_tokens, cached_tokens,
            busy_us / 1e6 AS busy_s,
            response_tokens / nullif(busy_us / 1e6, 0) AS response_tokens_per_s, call_tokens_per_s
        FROM counted JOIN busy USING (run, place) ORDER BY run, place
        """
    )


def request_token_rates(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize the tokens of finished requests.

    Returns:
        One row per run and step: requests, prompt_p50, prompt_max, response_p50, response_p95,
        response_max (tokens), rate_p5, rate_p50 and rate_p95 (response tokens by the time in
        engine calls, per second and request; None where engine calls were not recorded).
    """
    return tables.rows(
        f"""
        SELECT run, step, requests, prompt_p50, prompt_max, response_q[1] AS response_p50,
            response_q[2] AS response_p95, response_max, rates[1] AS rate_p5, rates[2] AS rate_p50,
            rates[3] AS rate_p95
        FROM (
            SELECT run, step, count(*) AS requests,
                quantile_cont(prompt_tokens, 0.5) AS prompt_p50, max(prompt_tokens) AS prompt_max,
                quantile_cont(response_tokens, [0.5, 0.95]) AS response_q,
                max(response_tokens) AS response_max,
                quantile_cont(response_tokens * 1e6 / nullif(engine_us, 0), [0.05, 0.5, 0.95])
                    AS rates
            FROM requests
            WHERE finished AND response_tokens IS NOT NULL
                AND {rows_of(steps, worker=worker, validate=validate)}
            GROUP BY run, step
        ) ORDER BY run, step
        """
    )
