"""What engine calls consist of: waiting, prefill, decode, and the way there and back."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.token_rates import ENGINE_RATE, calls_covered
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["engine_times", "replica_balance"]

_COLUMNS = f"""
    count(*) AS calls, count(engine_duration_us) AS served,
    sum(c.duration_us) / 1e6 AS total_s,
    {quantiles("c.duration_us", 0.5)}[1] / 1e6 AS p50_s,
    {quantiles("c.duration_us", 0.95)}[1] / 1e6 AS p95_s, max(c.duration_us) / 1e6 AS max_s,
    sum(queue_us) / 1e6 AS queue_s, sum(prefill_us) / 1e6 AS prefill_s,
    sum(decode_us) / 1e6 AS decode_s, sum(outside_us) / 1e6 AS outside_s,
    try_cast(sum(c.prompt_tokens) AS BIGINT) AS prompt_tokens,
    try_cast(sum(c.response_tokens) AS BIGINT) AS generated_tokens,
    try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
    {ENGINE_RATE} AS engine_tokens_per_s
"""


def engine_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize engine calls by step.

    Returns:
        One row per run, step and validate: calls, served (calls whose engine was recorded too),
        total_s, p50_s, p95_s, max_s; queue_s, prefill_s and decode_s (sums that the engine
        reports, None when it does not), outside_s (call time outside the engine); prompt_tokens,
        generated_tokens, cached_tokens, engine_tokens_per_s (by the time in which at least one
        call was under way).
    """
    return tables.rows(
        f"SELECT run, step, validate, {_COLUMNS} "
        f"FROM {calls_covered('run, step, validate', in_steps(steps))} AS c GROUP BY run, step, validate ORDER BY run, step, validate"
    )


def replica_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the replicas: as `engine_times`, for training, by `server`, most time first."""
    return tables.rows(
        f"SELECT run, step, coalesce(engine_name, server) AS server, {_COLUMNS} FROM "
        f"{calls_covered('run, step, place', f'NOT validate AND {in_steps(steps)}')} AS c "
        "GROUP BY ALL ORDER BY run, step, total_s DESC, server"
    )
