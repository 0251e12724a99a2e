"""How much time on the clock TransferQueue took, calls at the same time counted once."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_selection import of_function
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_wall"]


def tq_wall(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Lay the calls of each process on one line of time.

    Sums of durations count calls that run at the same time several times; here a moment counts once
    in a process.

    Returns:
        One row per run and function, and one per run with func None for all functions together but
        those that wait for others:
        busy_s (a call was under way), tq_busy_s (a get or put was), tq_alone_s (one was, and nothing
        was computed meanwhile), wall_share (tq_busy_s of busy_s), alone_share (tq_alone_s of busy_s),
        concurrency (time of all calls over busy_s).  Processes are summed.  All None where only some
        calls were traced or begins are not known.
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT * FROM tq_calls WHERE {in_steps(steps)} AND {of_function(function)}
        ), groups AS (
            SELECT run, func, sum(duration_us) AS total_us,
                bool_and(coalesce(sampled, 1) = 1 AND NOT coalesce(estimated, false)
                    AND (duration_us IS NULL OR begin_us IS NOT NULL)) AS known
            FROM calls GROUP BY run, func
            UNION ALL
            SELECT run, NULL, sum(duration_us), bool_and(coalesce(sampled, 1) = 1
                AND NOT coalesce(estimated, false) AND (duration_us IS NULL OR begin_us IS NOT NULL))
            FROM calls WHERE NOT coalesce(waits, false) GROUP BY run
        ), spans AS (
            SELECT run, func, name, call, 'call' AS what, begin_us, end_us FROM calls
            WHERE duration_us IS NOT NULL
            UNION ALL
            SELECT run, func, name, call, stage, begin_us, end_us FROM tq_stages
            WHERE {in_steps(steps)} AND {of_function(function)}
        ), wider AS (
            SELECT run, func, name, what, begin_us, end_us FROM spans
            UNION ALL
            SELECT run, NULL, name, what, begin_us, end_us FROM spans
            WHERE (run, func) NOT IN (SELECT (run, func) FROM calls WHERE waits)
        ), kinds AS (
            SELECT run, func, name, begin_us, end_us, 'busy' AS kind FROM wider WHERE what = 'call'
            UNION ALL SELECT run, func, name, begin_us, end_us, 'tq' FROM wider
                WHERE what IN ('get', 'put')
            UNION ALL SELECT run, func, name, begin_us, end_us, 'compute' FROM wider
                WHERE what = 'compute'
            UNION ALL SELECT run, func, name, begin_us, end_us, 'either' FROM wider
                WHERE what <> 'call'
        ), covered AS (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY run, func, name, kind ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM kinds
        ), lengths AS (
            SELECT run, func, kind,
                sum(greatest(end_us - greatest(begin_us, covered_us), 0)) AS length_us
            FROM covered GROUP BY run, func, kind
        ), laid AS (
            SELECT g.run, g.func, g.known, g.total_us,
                sum(length_us) FILTER (kind = 'busy') AS busy_us,
                coalesce(sum(length_us) FILTER (kind = 'tq'), 0) AS tq_us,
                coalesce(sum(length_us) FILTER (kind = 'either'), 0)
                    - coalesce(sum(length_us) FILTER (kind = 'compute'), 0) AS alone_us
            FROM groups AS g
            LEFT JOIN lengths AS l ON l.run = g.run AND l.func IS NOT DISTINCT FROM g.func
            GROUP BY g.run, g.func, g.known, g.total_us
        )
        SELECT run, func,
            CASE WHEN known THEN busy_us / 1e6 END AS busy_s,
            CASE WHEN known THEN tq_us / 1e6 END AS tq_busy_s,
            CASE WHEN known THEN alone_us / 1e6 END AS tq_alone_s,
            CASE WHEN known THEN tq_us / nullif(busy_us, 0) END AS wall_share,
            CASE WHEN known THEN alone_us / nullif(busy_us, 0) END AS alone_share,
            CASE WHEN known THEN total_us / nullif(busy_us, 0) END AS concurrency
        FROM laid ORDER BY run, func NULLS FIRST
        """
    )
