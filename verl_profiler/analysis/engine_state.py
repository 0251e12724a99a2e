"""How full the engines were, from their own readings."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables


def engine_load(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the load of each engine by step.

    An engine receives no step: a reading belongs to the step whose weights it has.  Means and
    shares are by time, each reading until the next one.

    Returns:
        Table `engine_load`: one row per run, step, engine process and data-parallel rank.
    """
    return tables.rows(
        f"""
        WITH readings AS (
            SELECT *, coalesce(held_us, 0) AS us
            FROM engine_states WHERE {in_steps(steps)}
        )
        SELECT run, step, name, dp_rank, replica, count(*) AS readings, sum(us) / 1e6 AS covered_s,
            {_mean("running_requests")} AS running, max(running_requests) AS max_running,
            {_mean("waiting_requests")} AS waiting, max(waiting_requests) AS max_waiting,
            max(running_limit) AS running_limit,
            {_mean("kv_share")} AS kv_share, max(kv_share) AS max_kv_share,
            {_mean("(running_requests = 0)::INTEGER")} AS idle_share,
            {_mean("(waiting_requests > 0)::INTEGER")} AS waiting_share,
            sum(iterations)::BIGINT AS iterations, sum(prefill_tokens)::BIGINT AS prefill_tokens,
            sum(decode_tokens)::BIGINT AS decode_tokens, sum(retractions)::BIGINT AS retractions,
            sum(prefix_hit_tokens) / nullif(sum(prefix_queried_tokens), 0) AS prefix_hit_share
        FROM readings GROUP BY run, step, name, dp_rank, replica
        ORDER BY run, step, name, dp_rank
        """
    )


def _mean(value: str) -> str:
    """Return the SQL of a mean by time, over the readings that have the value."""
    return f"sum({value} * us) / nullif(sum(us) FILTER ({value} IS NOT NULL), 0)"


def engine_load_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Return the readings of each engine in order.

    Returns:
        Table `engine_load_over_time`: one row per run, engine process, data-parallel rank and
        reading.
    """
    return tables.rows(
        f"""
        SELECT run, name, dp_rank, step, (at_us - min(at_us) OVER (PARTITION BY run)) / 1e6 AS at_s,
            held_us / 1e6 AS held_s, running_requests, waiting_requests, running_limit,
            kv_share
        FROM engine_states WHERE {in_steps(steps)} ORDER BY run, name, dp_rank, at_us
        """
    )
