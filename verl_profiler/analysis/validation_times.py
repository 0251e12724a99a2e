"""Validation, apart from training."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["validation_times"]


def validation_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize each validation; it is listed under the step during which it ran.

    Returns:
        One row per run and step with a validation: requests, unfinished, testing_s (the trainer's
        timer; None where not recorded), rollout_s (from the first request's begin to the last
        one's end), mean_s, p50_s, p95_s, p99_s, max_s (of requests), turns (mean), generated_tokens
        (sum), reward (mean), share (of the time from this step's begin to the next one's, which a
        validation takes; None where there is no next step).
    """
    return tables.rows(
        f"""
        WITH tests AS (
            SELECT run, step, sum(duration_us) AS testing_us FROM phases
            WHERE phase IN ('testing', 'validation')
                AND (parent IS NULL OR parent NOT IN ('testing', 'validation'))
            GROUP BY run, step
        ), asked AS (
            SELECT run, step, count(*) AS requests, count(*) FILTER (NOT finished) AS unfinished,
                max(end_us) - min(begin_us) AS rollout_us, avg(duration_us) AS mean_us,
                {quantiles("duration_us", 0.5, 0.95, 0.99)} AS q, max(duration_us) AS max_us,
                avg(turns) AS turns, try_cast(sum(generated_tokens) AS BIGINT) AS generated_tokens,
                avg(reward) AS reward
            FROM requests WHERE validate AND {in_steps(steps)} GROUP BY run, step
        ), ordered AS (
            SELECT run, step, begin_us, lead(begin_us) OVER w - begin_us AS to_next_us
            FROM steps WINDOW w AS (PARTITION BY run ORDER BY step)
        )
        SELECT run, step, requests, unfinished, testing_us / 1e6 AS testing_s,
            rollout_us / 1e6 AS rollout_s, mean_us / 1e6 AS mean_s, q[1] / 1e6 AS p50_s,
            q[2] / 1e6 AS p95_s, q[3] / 1e6 AS p99_s, max_us / 1e6 AS max_s, turns, generated_tokens,
            reward, testing_us / nullif(to_next_us, 0) AS share
        FROM asked LEFT JOIN tests USING (run, step) LEFT JOIN ordered USING (run, step)
        ORDER BY run, step
        """
    )
