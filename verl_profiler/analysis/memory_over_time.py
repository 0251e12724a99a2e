"""How full devices, processes and machines were over time, and what the trainer did meanwhile."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["memory_over_time", "phase_spans"]

# More readings of a process than this are drawn by the highest in each of so many equal parts.
PARTS = 600


def memory_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Give the readings of each process; of more than `PARTS`, the highest of each part of the time.

    Returns:
        One row per run, process and part of the time: name, role, begin_s (of the reading with the
        highest used_bytes, or else rss_bytes, of the part; from the run's first reading), step,
        readings, used_bytes, total_bytes, rss_bytes and host_used_bytes (each the highest of the
        part), moves (releases minus resumes that ended in it: positive where memory was given back).
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT *, at_us - min(at_us) OVER (PARTITION BY run) AS since_us
            FROM memory_readings WHERE {in_steps(steps)}
        ), parts AS (
            SELECT *, CASE WHEN count(*) OVER (PARTITION BY run, name) <= {PARTS}
                THEN row_number() OVER (PARTITION BY run, name ORDER BY at_us, "at")
                ELSE least(since_us * {PARTS} // greatest(max(since_us) OVER (PARTITION BY run), 1),
                    {PARTS - 1}) END AS part,
                CASE WHEN "at" = 'after memory_release' THEN 1
                    WHEN "at" = 'after memory_resume' THEN -1 ELSE 0 END AS move
            FROM chosen
        )
        SELECT run, name, any_value(role) AS role,
            arg_max(since_us, (coalesce(used_bytes, 0), coalesce(rss_bytes, 0), since_us)) / 1e6
                AS begin_s,
            min(step) AS step, count(*) AS readings, max(used_bytes) AS used_bytes,
            max(total_bytes) AS total_bytes, max(rss_bytes) AS rss_bytes,
            max(host_used_bytes) AS host_used_bytes, try_cast(sum(move) AS BIGINT) AS moves
        FROM parts GROUP BY run, name, part ORDER BY run, name, begin_s
        """
    )


def phase_spans(tables: Tables, steps: Steps = None) -> Rows:
    """Place the phases of the steps on the time of `memory_over_time`.

    Returns:
        One row per phase of a step, and per `testing` and `init`: run, step, phase, begin_s, end_s.
    """
    return tables.rows(
        f"""
        WITH starts AS (
            SELECT run, min(at_us) AS first_us FROM memory_readings
            WHERE {in_steps(steps)} GROUP BY run
        )
        SELECT run, p.step, phase, (begin_us - first_us) / 1e6 AS begin_s,
            (end_us - first_us) / 1e6 AS end_s
        FROM phases AS p JOIN starts USING (run)
        WHERE (parent = 'step' OR (parent IS NULL AND phase <> 'step')) AND {in_steps(steps)}
        ORDER BY run, begin_s, phase
        """
    )
