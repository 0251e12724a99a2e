"""What step models are rebuilt from besides requests and calls: the trainer's polls, and its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis.selection import grouped, summed
from verl_profiler.reading.tables.tables import Tables

# From this share on, the KV cache counts as full.
KV_FULL = 0.9

# TransferQueue calls of the trainer that are further apart belong to different polls; a trainer
# that polls does so for the first time within this time after it starts to wait.
APART_US = 50_000
# Events of a rank that may contain collectives.
TOGETHER = "'train_mini_batch', 'train_batch', 'infer_batch', 'forward_backward'"


def among(steps: Sequence[int], column: str = "step") -> str:
    """Return the SQL condition for these steps."""
    return f"{column} IN ({', '.join(str(int(step)) for step in steps)})"


def memory_bound_steps(tables: Tables, steps: Sequence[int]) -> set[tuple[str, int]]:
    """Return the steps whose engines had requests waiting mostly while their KV cache was full.

    A reading belongs to the time until the next one; the readings of a step are those within its `gen`.
    """
    rows = tables.rows(
        f"""
        SELECT g.run, g.step FROM gens AS g JOIN engine_states AS e ON e.run = g.run
            AND e.at_us >= g.begin_us AND e.at_us < g.end_us
        WHERE g.in_step AND {among(steps, "g.step")} AND e.waiting_requests > 0 AND e.held_us > 0
        GROUP BY g.run, g.step HAVING sum(CASE WHEN kv_share >= {KV_FULL}
            AND coalesce(running_requests < running_limit, true) THEN held_us ELSE 0 END)
            > sum(held_us) / 2
        """
    )
    return {(row["run"], row["step"]) for row in rows}


def polls_of(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    """Find the trainer's polls: its first TransferQueue call after a pause."""
    rows = tables.rows(
        f"""
        WITH calls AS (
            SELECT t.run, t.step, t.begin_us, p.begin_us AS wait_begin_us,
                lag(t.end_us) OVER (PARTITION BY t.run, t.step ORDER BY t.begin_us) AS before_us
            FROM transfers AS t JOIN phases AS p ON p.run = t.run AND p.step = t.step
                AND p.name = t.name AND p.phase = 'sample_wait' AND p.parent = 'gen'
                AND NOT p.validate AND t.begin_us BETWEEN p.begin_us AND p.end_us
            WHERE t.role = 'trainer' AND {among(steps, "t.step")}
        )
        SELECT run, step, begin_us FROM calls
        WHERE before_us IS NULL OR begin_us - before_us > {APART_US} ORDER BY run, step, begin_us
        """
    )
    polls = grouped(rows, "run", "step").items()
    return {key: [row["begin_us"] for row in own] for key, own in polls}


def uneven_us(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], float]:
    """Sum up the excess of the slowest rank over the mean, over the phases of each step.

    The time that a rank waits in collectives for ranks that start a batch later is not its own.
    """
    rows = tables.rows(
        f"""
        WITH ranks AS (
            SELECT p.run, p.step, p.phase, p.begin_us, r.event, r.name,
                sum(r.duration_us) AS rank_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.family = 'workers'
                AND within(r.begin_us, r.end_us, p.begin_us, p.end_us)
            WHERE p.parent = 'step' AND {among(steps, "p.step")} GROUP BY ALL
        ), passes AS (
            SELECT p.run, p.step, p.begin_us, r.name, r.event, r.begin_us AS pass_us, r.duration_us,
                row_number() OVER (PARTITION BY p.run, p.step, p.begin_us, r.name, r.event
                    ORDER BY r.begin_us) AS place
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.event IN ({TOGETHER})
                AND within(r.begin_us, r.end_us, p.begin_us, p.end_us)
            WHERE p.parent = 'step' AND {among(steps, "p.step")}
        ), waits AS (
            SELECT run, step, begin_us, name, event, least(max(pass_us) OVER together - pass_us,
                duration_us - min(duration_us) OVER together) AS wait_us
            FROM passes WINDOW together AS (PARTITION BY run, step, begin_us, event, place)
        ), waited AS (
            -- Each event contains the next one, and so its waiting.
            SELECT run, step, begin_us, name, max(wait_us) AS wait_us FROM (
                SELECT run, step, begin_us, name, event, sum(wait_us) AS wait_us
                FROM waits GROUP BY ALL) GROUP BY ALL
        ), own AS (
            SELECT k.*, rank_us - coalesce(wait_us, 0) AS own_us
            FROM ranks AS k LEFT JOIN waited AS w USING (run, step, begin_us, name)
        ), kinds AS (
            SELECT run, step, phase, begin_us, max(rank_us) AS most_us,
                max(own_us) - avg(own_us) AS uneven_us
            FROM own GROUP BY run, step, phase, begin_us, event
        )
        SELECT run, step, max_by(uneven_us, most_us) AS uneven_us
        FROM kinds GROUP BY run, step, phase, begin_us ORDER BY run, step, begin_us
        """
    )
    return summed(rows, "uneven_us", "run", "step")
