"""Which process was the slowest at what, and how far the others were from it."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

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

    Ranks wait for each other at each piece: the k-th of one is compared with the k-th of the others,
    and only then is anything added up.  Where ranks have unequal numbers of pieces, their sums are
    compared.

    Returns:
        One row per run, step, role and event, most time first: ranks, slowest (the process that the
        others wait for most), slowest_s, median_s, fastest_s (sums over the pieces), waste_s (what all
        ranks together wait for the slowest, if they wait).
    """
    return tables.rows(
        f"""
        WITH numbered AS (
            SELECT run, step, role, event, name, duration_us, row_number() OVER (
                    PARTITION BY run, step, role, event, name ORDER BY begin_us, end_us) AS number,
                count(*) OVER (PARTITION BY run, step, role, event, name) AS own
            FROM rank_spans WHERE {in_steps(steps)}
        ), alike AS (
            SELECT run, step, role, event, min(own) = max(own) AS paired FROM numbered GROUP BY ALL
        ), pieces AS (
            SELECT run, step, role, event, name, CASE WHEN paired THEN number ELSE 1 END AS place,
                sum(duration_us) AS duration_us
            FROM numbered JOIN alike USING (run, step, role, event) GROUP BY ALL
        ), places AS (
            SELECT run, step, role, event, place, count(*) AS ranks, max(duration_us) AS most_us,
                median(duration_us) AS median_us, min(duration_us) AS least_us,
                count(*) * max(duration_us) - sum(duration_us) AS waste_us
            FROM pieces GROUP BY ALL
        ), late AS (
            SELECT run, step, role, event, name, sum(duration_us - median_us) AS late_us
            FROM pieces JOIN places USING (run, step, role, event, place) GROUP BY ALL
        ), slowest AS (
            SELECT run, step, role, event, arg_max(name, (late_us, name)) AS slowest
            FROM late GROUP BY ALL
        )
        SELECT run, step, role, event, max(ranks) AS ranks, any_value(slowest) AS slowest,
            sum(most_us) / 1e6 AS slowest_s, sum(median_us) / 1e6 AS median_s,
            sum(least_us) / 1e6 AS fastest_s, sum(waste_us) / 1e6 AS waste_s
        FROM places JOIN slowest USING (run, step, role, event)
        GROUP BY run, step, role, event ORDER BY run, step, slowest_s DESC, role, event
        """
    )
