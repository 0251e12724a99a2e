"""The slowest process of each phase, and how long the others waited for it.

Ranks wait for each other at each piece of work: the k-th of one is compared with the k-th of the
others, and only then is anything added up.  Where ranks have unequal numbers of pieces, their sums are
compared.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps, summed
from verl_profiler.reading.tables.tables import Tables


def _rollouts(steps: Steps) -> str:
    """Return the SQL of each agent-loop worker's rollout: first request of the step to its own last."""
    return f"""
        SELECT r.run, r.step, r.name, count(*) AS requests,
            max(r.end_us) - any_value(f.first_us) AS duration_us, avg(r.duration_us) AS mean_us
        FROM requests AS r JOIN (
            SELECT run, step, min(begin_us) AS first_us FROM requests
            WHERE NOT validate AND {in_steps(steps)} GROUP BY run, step
        ) AS f USING (run, step)
        WHERE r.finished AND NOT r.validate GROUP BY r.run, r.step, r.name
    """


def _pieces(spans: str) -> str:
    """Return the SQL of pieces of work: `spans`, with the event as phase and each one's place."""
    return f"""
        SELECT run, step, role, name, event AS phase, CASE WHEN paired THEN number ELSE 1 END AS place,
            sum(duration_us) AS duration_us
        FROM (
            SELECT *, min(own) OVER (PARTITION BY run, step, role, event)
                = max(own) OVER (PARTITION BY run, step, role, event) AS paired
            FROM (
                SELECT *, row_number() OVER (
                        PARTITION BY run, step, role, event, name ORDER BY begin_us, end_us) AS number,
                    count(*) OVER (PARTITION BY run, step, role, event, name) AS own
                FROM ({spans})
            )
        ) GROUP BY ALL
    """


def _balance(pieces: str) -> str:
    """Return the SQL of the columns of `worker_balance` by run, step, role and phase."""
    return f"""
        WITH pieces AS ({pieces}), places AS (
            SELECT run, step, role, phase, place, count(*) AS processes,
                max(duration_us) AS most_us, median(duration_us) AS median_us,
                min(duration_us) AS least_us, sum(duration_us) AS all_us
            FROM pieces GROUP BY ALL
        ), late AS (
            SELECT run, step, role, phase, name, sum(duration_us - median_us) AS late_us
            FROM pieces JOIN places USING (run, step, role, phase, place) GROUP BY ALL
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
        GROUP BY run, step, role, phase
    """


def _phases(steps: Steps) -> str:
    """Return the SQL of the pieces of phases that several processes share, each with its process.

    Of the ranks, only intervals that no other interval of the same process contains count.  The
    files of the original logger have phases of each rollout worker instead of its rollout.
    """
    tops = f"""
        SELECT run, step, role, name, event, begin_us, end_us, duration_us FROM rank_spans
        WHERE {in_steps(steps)}
        QUALIFY coalesce(max(end_us) OVER (
            PARTITION BY run, step, name ORDER BY begin_us, end_us DESC, event
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) <= begin_us
    """
    return f"""
        WITH originals AS (
            SELECT p.run, p.step, o.role, p.name, p.phase, 1 AS place,
                sum(p.duration_us) AS duration_us
            FROM phases AS p JOIN processes AS o USING (run, name)
            WHERE o.role = 'agent_loop' AND p.parent = 'gen' AND {in_steps(steps, "p.step")}
            GROUP BY p.run, p.step, o.role, p.name, p.phase
        )
        SELECT run, step, 'agent_loop' AS role, name, 'rollout' AS phase, 1 AS place, duration_us
        FROM ({_rollouts(steps)}) WHERE (run, step) NOT IN (SELECT (run, step) FROM originals)
        UNION ALL FROM ({_pieces(tops)}) UNION ALL FROM originals
    """


def rollout_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the agent-loop workers: when each finished its last training request.

    Returns:
        Table `rollout_balance`: one row per run, step and worker, slowest first.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, requests, duration_us / 1e6 AS busy_s, mean_us / 1e6 AS mean_s,
            (duration_us - median(duration_us) OVER (PARTITION BY run, step)) / 1e6 AS behind_s
        FROM ({_rollouts(steps)})
        ORDER BY run, step, duration_us DESC, name
        """
    )


def rank_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the ranks at each piece of work of the trainer workers and of the weight sync.

    Returns:
        Table `rank_balance`: one row per run, step, role and event, most time first.
    """
    pieces = _pieces(f"SELECT * FROM rank_spans WHERE {in_steps(steps)}")
    return tables.rows(
        f"""
        SELECT run, step, role, phase AS event, processes AS ranks, slowest, slowest_s, median_s,
            fastest_s, waited_s AS waste_s
        FROM ({_balance(pieces)}) ORDER BY run, step, slowest_s DESC, role, event
        """
    )


def worker_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the processes of a role, phase by phase.

    Returns:
        Table `worker_balance`: one row per run, step, role and phase, most waiting first.
    """
    return tables.rows(
        f"FROM ({_balance(_phases(steps))}) ORDER BY run, step, waited_s DESC, role, phase"
    )


def worker_phases(tables: Tables, steps: Steps = None) -> Rows:
    """List what each process spent on each phase that it shares with others.

    Returns:
        Table `worker_phases`: one row per run, step, role, process and phase.
    """
    return tables.rows(
        f"""
        WITH summed AS (
            SELECT run, step, role, name, phase, sum(duration_us) AS duration_us,
                sum(most_us - duration_us) AS waited_us
            FROM (
                SELECT *, max(duration_us) OVER (PARTITION BY run, step, role, phase, place) AS most_us
                FROM ({_phases(steps)})
            ) GROUP BY ALL
        )
        SELECT run, step, role, name, phase, duration_us / 1e6 AS duration_s,
            waited_us / 1e6 AS waited_s,
            row_number() OVER (PARTITION BY run, step, role, phase
                ORDER BY waited_us, duration_us DESC, name) = 1 AS slowest
        FROM summed
        ORDER BY run, step, role, name, duration_us DESC, phase
        """
    )


def most_waited(balance: Rows) -> dict[str, Any]:
    """Return the phase of a role whose processes wait most for the slowest one.

    Args:
        balance: Of `worker_balance`, of roles with several processes.

    Returns:
        role, phase, processes (at most), steps (how many have it) and step (the first), waited_s (of all others
        together, per step), name of the process that was the slowest most often, and times, how often.
    """
    waits = summed(balance, "waited_s", "role", "phase")
    role, phase = max(waits, key=lambda key: (waits[key], key))
    own = [row for row in balance if (row["role"], row["phase"]) == (role, phase)]
    names = [row["slowest"] for row in own]
    name = max(sorted(set(names)), key=names.count)
    return {
        "role": role,
        "phase": phase,
        "processes": max(row["processes"] for row in own),
        "steps": len(own),
        "step": own[0]["step"],
        "waited_s": waits[role, phase] / len(own),
        "name": name,
        "times": names.count(name),
    }
