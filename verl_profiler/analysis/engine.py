"""What generate calls consist of, and how fast they returned tokens."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, estimated, in_steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

_TOKENS = "prompt_tokens, generated_tokens, cached_tokens"
_PARTS = f"""calls, served, total_us / 1e6 AS total_s, q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s,
    max_us / 1e6 AS max_s, queue_us / 1e6 AS queue_s, prefill_us / 1e6 AS prefill_s,
    decode_us / 1e6 AS decode_s, outside_us / 1e6 AS outside_s, {_TOKENS},
    generated_tokens / nullif(busy_s, 0) AS engine_tokens_per_s, retractions,
    accepted_draft_tokens / nullif(draft_tokens, 0) AS draft_acceptance, estimated"""
_RATES = f"""calls, {_TOKENS}, busy_s, generated_tokens / nullif(busy_s, 0) AS engine_tokens_per_s,
    timed_tokens / nullif(total_us / 1e6, 0) AS call_tokens_per_s, estimated"""


def _calls(group: str, where: str) -> str:
    """Return the SQL of generate calls, summed up by `group`, for `_PARTS` and `_RATES`.

    Args:
        group: Columns, `place` among them or not: the engine's process, else the server's address.
        where: Which calls.
    """
    return f"""(
        SELECT {group}, count(*) AS calls, count(engine_duration_us) AS served,
            sum(duration_us) AS total_us, {quantiles("duration_us", 0.5, 0.95)} AS q,
            max(duration_us) AS max_us, sum(queue_us) AS queue_us, sum(prefill_us) AS prefill_us,
            sum(decode_us) AS decode_us, sum(outside_us) AS outside_us,
            try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
            try_cast(sum(response_tokens) AS BIGINT) AS generated_tokens,
            try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
            try_cast(sum(retractions) AS BIGINT) AS retractions,
            sum(draft_tokens) AS draft_tokens, sum(accepted_draft_tokens) AS accepted_draft_tokens,
            -- Of sampled calls nobody can tell when others ran.
            CASE WHEN coalesce(max(sampled), 1) = 1
                THEN sum(greatest(end_us - greatest(begin_us, covered_us), 0)) / 1e6 END AS busy_s,
            sum(response_tokens) FILTER (duration_us IS NOT NULL) AS timed_tokens,
            bool_or(sampled > 1) AS estimated
        FROM (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY {group} ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM (
                SELECT *, coalesce(engine_name, server, '(not recorded)') AS place
                FROM {estimated("engine_calls")}
            ) WHERE {where}
        ) GROUP BY {group}
    )"""


def engine_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize generate calls by step.

    Returns:
        Table `engine_times`: one row per run, step and validate.
    """
    keys = "run, step, validate"
    return tables.rows(
        f"SELECT {keys}, {_PARTS} FROM {_calls(keys, in_steps(steps))} ORDER BY {keys}"
    )


def replica_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the replicas in training.

    Returns:
        Table `replica_balance`: one row per run, step and server, most time first.
    """
    calls = _calls("run, step, place", f"NOT validate AND {in_steps(steps)}")
    return tables.rows(
        f"SELECT run, step, nullif(place, '(not recorded)') AS server, {_PARTS} FROM {calls} "
        "ORDER BY run, step, total_s DESC, server"
    )


def token_rates(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Count the tokens of each step, as generate calls report them.

    A conversation's tokens are prompt tokens again in every later turn of it.

    Returns:
        Table `token_rates`: one row per run and step.
    """
    whole = "NULL::DOUBLE" if validate else "generated_tokens_per_s"
    return tables.rows(
        f"""
        SELECT c.run, c.step, {_RATES}, {whole} AS generated_tokens_per_s
        FROM {_calls("run, step", rows_of(steps, validate=validate))} AS c
        LEFT JOIN (
            SELECT run, step, generated_tokens_per_s FROM steps WHERE finished AND {in_steps(steps)}
        ) AS s ON s.run = c.run AND s.step = c.step
        ORDER BY c.run, c.step
        """
    )


def request_token_rates(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize the tokens of finished requests.

    Returns:
        Table `request_token_rates`: one row per run and step.
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
