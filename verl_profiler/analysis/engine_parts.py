"""What engine calls consist of: queue, prefill, decode, and the way to the engine and back."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["engine_parts"]


def engine_parts(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Cut the time of engine calls, as agent loops see it, into parts that add up to it.

    An engine server knows neither the step nor whether a request is of validation; both are
    those of the agent loop's call.

    Returns:
        One row per run, step and part, in this order: `queue`, `prefill` and `decode` (as the
        engine reports them), `engine` (inside the engine, but not reported in parts), `outside`
        (the call's time outside the engine: transport, load balancing, waiting for the event
        loop), `unseen` (calls whose engine was not recorded).  calls, total_s, share (of the time
        of all calls), mean_s, p50_s, p95_s, p99_s, max_s.  Parts that nobody recorded have no row.
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT *, engine_duration_us IS NOT NULL AS served,
                queue_us IS NOT NULL OR prefill_us IS NOT NULL OR decode_us IS NOT NULL AS reported,
                coalesce(queue_us, 0) + coalesce(prefill_us, 0) + coalesce(decode_us, 0) AS known_us
            FROM engine_calls
            WHERE duration_us IS NOT NULL AND {rows_of(steps, worker=worker, validate=validate)}
        ), parts AS (
            SELECT run, step, 1 AS place, 'queue' AS part, queue_us AS us FROM calls WHERE served
            UNION ALL SELECT run, step, 2, 'prefill', prefill_us FROM calls WHERE served
            UNION ALL SELECT run, step, 3, 'decode', decode_us FROM calls WHERE served
            UNION ALL SELECT run, step, 4, 'engine', engine_duration_us - known_us
                FROM calls WHERE served
            UNION ALL SELECT run, step, 5, 'outside', duration_us - engine_duration_us
                FROM calls WHERE served
            UNION ALL SELECT run, step, 6, 'unseen', duration_us FROM calls WHERE NOT served
        )
        SELECT run, step, part, count(*) AS calls, sum(us) / 1e6 AS total_s,
            sum(us) / nullif(sum(sum(us)) OVER (PARTITION BY run, step), 0) AS share,
            avg(us) / 1e6 AS mean_s, {quantiles("us", 0.5)}[1] / 1e6 AS p50_s,
            {quantiles("us", 0.95)}[1] / 1e6 AS p95_s, {quantiles("us", 0.99)}[1] / 1e6 AS p99_s,
            max(us) / 1e6 AS max_s
        FROM parts WHERE us IS NOT NULL
        GROUP BY run, step, place, part HAVING count(*) FILTER (us <> 0) > 0
        ORDER BY run, step, place
        """
    )
