"""What rewards came out, and how long scoring and post-processing took."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["reward_times", "rewards"]


def rewards(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize the rewards of finished requests.

    Returns:
        One row per run and step: requests, scored (requests with a reward), mean, p5, p50, p95,
        lowest, highest.  Steps without a reward have no row.
    """
    return tables.rows(
        f"""
        SELECT run, step, requests, scored, mean, q[1] AS p5, q[2] AS p50, q[3] AS p95, lowest,
            highest
        FROM (
            SELECT run, step, count(*) AS requests, count(reward) AS scored, avg(reward) AS mean,
                {quantiles("reward", 0.05, 0.5, 0.95)} AS q, min(reward) AS lowest,
                max(reward) AS highest
            FROM requests WHERE finished AND {rows_of(steps, worker=worker, validate=validate)}
            GROUP BY run, step
        ) WHERE scored > 0 ORDER BY run, step
        """
    )


def reward_times(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize the time that requests spend after their conversation.

    Reward workers are not told the step, nor whether a request is of validation: both are those of
    the request with the same `uid`.

    Returns:
        One row per run, step and part: `postprocess` (without the reward), `reward` (as the
        request waits for it), `score` (inside the reward function; part of `reward`, the rest of
        which is waiting for a reward worker).  count, total_s, mean_s, p50_s, p95_s, p99_s, max_s,
        requests_share (of the time of all finished requests).
    """
    selection = rows_of(steps, worker=worker, validate=validate)
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT run, step, uid, duration_us, postprocess_us, reward_us FROM requests
            WHERE finished AND {selection}
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
