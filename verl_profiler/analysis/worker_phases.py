"""What every process worked on in a step, phase by phase, and who waited for whom."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["worker_balance", "worker_phases"]


def _spans(steps: Steps) -> str:
    """Return the spans of phases that several processes share, each with its process.

    Ranks wait for each other at each piece of work: the k-th of a phase has the place k,
    unless ranks have unequal numbers of them.
    An agent-loop worker's rollout lasts from the step's first request to its own last.  Of the
    ranks, only intervals that no other interval of the same process contains count.  The files of
    the original logger have phases of each rollout worker instead.
    """
    return f"""
    WITH firsts AS (
        SELECT run, step, min(begin_us) AS first_us FROM requests
        WHERE NOT validate AND {in_steps(steps)} GROUP BY run, step
    ), rollouts AS (
        SELECT r.run, r.step, 'agent_loop' AS role, r.name, 'rollout' AS phase, 1 AS place,
            max(r.end_us) - any_value(f.first_us) AS duration_us
        FROM requests AS r JOIN firsts AS f USING (run, step)
        WHERE r.finished AND NOT r.validate GROUP BY r.run, r.step, r.name
    ), tops AS (
        SELECT run, step, role, name, event, begin_us, end_us, duration_us FROM rank_spans
        WHERE {in_steps(steps)}
        QUALIFY coalesce(max(end_us) OVER (
            PARTITION BY run, step, name ORDER BY begin_us, end_us DESC, event
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) <= begin_us
    ), numbered AS (
        SELECT *, row_number() OVER (
                PARTITION BY run, step, role, name, event ORDER BY begin_us, end_us) AS number,
            count(*) OVER (PARTITION BY run, step, role, name, event) AS own
        FROM tops
    ), alike AS (
        SELECT run, step, role, event, min(own) = max(own) AS paired FROM numbered GROUP BY ALL
    ), ranks AS (
        SELECT run, step, role, name, event AS phase, CASE WHEN paired THEN number ELSE 1 END AS place,
            sum(duration_us) AS duration_us
        FROM numbered JOIN alike USING (run, step, role, event) GROUP BY ALL
    ), originals AS (
        SELECT p.run, p.step, o.role, p.name, p.phase, 1 AS place,
            sum(p.duration_us) AS duration_us
        FROM phases AS p JOIN processes AS o USING (run, name)
        WHERE o.role = 'agent_loop' AND p.parent = 'gen' AND {in_steps(steps, "p.step")}
        GROUP BY p.run, p.step, o.role, p.name, p.phase
    ), spans AS (
        SELECT * FROM rollouts
        WHERE (run, step) NOT IN (SELECT (run, step) FROM originals)
        UNION ALL SELECT * FROM ranks UNION ALL SELECT * FROM originals
    )
    """


def worker_phases(tables: Tables, steps: Steps = None) -> Rows:
    """List what each process spent on each phase that it shares with others.

    Returns:
        One row per run, step, role, process and phase: name, phase, duration_s, waited_s (how much
        less than the slowest process of that role, piece by piece: what it waits if the next piece needs
        all), slowest (True for the process that waits least, one per phase).  The phase of agent-loop workers is `rollout`,
        from the step's first request to the worker's last end.
    """
    return tables.rows(
        f"""
        {_spans(steps)}, waited AS (
            SELECT *, max(duration_us) OVER (PARTITION BY run, step, role, phase, place)
                - duration_us AS waited_us
            FROM spans
        ), summed AS (
            SELECT run, step, role, name, phase, sum(duration_us) AS duration_us,
                sum(waited_us) AS waited_us
            FROM waited GROUP BY ALL
        )
        SELECT run, step, role, name, phase, duration_us / 1e6 AS duration_s,
            waited_us / 1e6 AS waited_s,
            row_number() OVER (PARTITION BY run, step, role, phase
                ORDER BY waited_us, duration_us DESC, name) = 1 AS slowest
        FROM summed ORDER BY run, step, role, name, duration_us DESC, phase
        """
    )


def worker_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the processes of a role, phase by phase.

    Returns:
        One row per run, step, role and phase, most waiting first: processes, slowest (name),
        slowest_s, median_s, fastest_s, waited_s (of all others together, for the slowest),
        waited_share (of the time of all processes until the slowest was done).
    """
    return tables.rows(
        f"""
        {_spans(steps)}, places AS (
            SELECT run, step, role, phase, place, count(*) AS processes,
                max(duration_us) AS most_us, median(duration_us) AS median_us,
                min(duration_us) AS least_us, sum(duration_us) AS all_us
            FROM spans GROUP BY ALL
        ), late AS (
            SELECT run, step, role, phase, name, sum(duration_us - median_us) AS late_us
            FROM spans JOIN places USING (run, step, role, phase, place) GROUP BY ALL
        ), slowest AS (
            SELECT run, step, role, phase, arg_min(name, (-late_us, name)) AS slowest
            FROM late GROUP BY ALL
        )
        SELECT run, step, role, phase, max(processes) AS processes,
            any_value(slowest) AS slowest, sum(most_us) / 1e6 AS slowest_s,
            sum(median_us) / 1e6 AS median_s, sum(least_us) / 1e6 AS fastest_s,
            sum(processes * most_us - all_us) / 1e6 AS waited_s,
            1 - sum(all_us) / nullif(sum(processes * most_us), 0) AS waited_share
        FROM places JOIN slowest USING (run, step, role, phase)
        GROUP BY run, step, role, phase ORDER BY run, step, waited_s DESC, role, phase
        """
    )
