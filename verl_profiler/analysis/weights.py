"""How long the weights took from the trainer into the engines."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["weight_sync"]


def weight_sync(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the weight syncs.

    Returns:
        One row per run and step: trainer_s (the trainer's timer), slowest_rank_s and slowest_rank,
        transfer_s (the slowest rank's transfer), release_s and resume_s (the slowest process's
        giving back and taking memory); None where not recorded.
    """
    return tables.rows(
        f"""
        WITH ranks AS (
            SELECT run, step, name, event, sum(duration_us) AS total_us
            FROM rank_spans WHERE family = 'weights' AND {in_steps(steps)} GROUP BY ALL
        ), slowest AS (
            SELECT run, step,
                max(total_us) FILTER (event = 'update_weights') AS rank_us,
                arg_max(name, (total_us, name)) FILTER (event = 'update_weights') AS slowest_rank,
                max(total_us) FILTER (event = 'weight_transfer') AS transfer_us,
                max(total_us) FILTER (event = 'memory_release') AS release_us,
                max(total_us) FILTER (event = 'memory_resume') AS resume_us
            FROM ranks GROUP BY run, step
        ), trainer AS (
            SELECT run, step, sum(duration_us) AS trainer_us FROM phases
            WHERE phase = 'update_weights' AND {in_steps(steps)} GROUP BY run, step
        )
        SELECT run, step, trainer_us / 1e6 AS trainer_s, rank_us / 1e6 AS slowest_rank_s,
            slowest_rank, transfer_us / 1e6 AS transfer_s, release_us / 1e6 AS release_s,
            resume_us / 1e6 AS resume_s
        FROM slowest FULL JOIN trainer USING (run, step)
        WHERE coalesce(trainer_us, rank_us) IS NOT NULL ORDER BY run, step
        """
    )
