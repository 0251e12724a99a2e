"""Which process was the slowest at what, and how far the others were from it."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["rank_balance", "rollout_balance"]


def rollout_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the agent-loop workers: when each had its last training request done.

    Returns:
        One row per run, step and worker, slowest first: name, requests, busy_s (from the step's
        first request to the worker's last end), mean_s (of its requests), behind_s (how much
        longer than the median worker).
    """
    return tables.rows(
        f"""
        WITH firsts AS (
            SELECT run, step, min(begin_us) AS first_us FROM requests
            WHERE NOT validate AND {in_steps(steps)} GROUP BY run, step
        ), workers AS (
            SELECT r.run, r.step, r.name, count(*) AS requests,
                max(r.end_us) - any_value(f.first_us) AS busy_us, avg(r.duration_us) AS mean_us
            FROM requests AS r JOIN firsts AS f USING (run, step)
            WHERE r.finished AND NOT r.validate GROUP BY r.run, r.step, r.name
        )
        SELECT run, step, name, requests, busy_us / 1e6 AS busy_s, mean_us / 1e6 AS mean_s,
            (busy_us - median(busy_us) OVER (PARTITION BY run, step)) / 1e6 AS behind_s
        FROM workers ORDER BY run, step, busy_us DESC, name
        """
    )


def rank_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the ranks at each piece of work of the trainer workers and of the weight sync.

    Returns:
        One row per run, step, role and event, most time first: ranks, slowest (the process),
        slowest_s, median_s, fastest_s, waste_s (what all ranks together wait for the slowest,
        if they wait).
    """
    return tables.rows(
        f"""
        WITH sums AS (
            SELECT run, step, role, event, name, sum(duration_us) AS total_us
            FROM rank_spans WHERE {in_steps(steps)} GROUP BY ALL
        )
        SELECT run, step, role, event, count(*) AS ranks,
            arg_max(name, (total_us, name)) AS slowest,
            max(total_us) / 1e6 AS slowest_s, median(total_us) / 1e6 AS median_s,
            min(total_us) / 1e6 AS fastest_s,
            (count(*) * max(total_us) - sum(total_us)) / 1e6 AS waste_s
        FROM sums GROUP BY run, step, role, event
        ORDER BY run, step, slowest_s DESC, role, event
        """
    )
