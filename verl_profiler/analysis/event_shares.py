"""Which share of its whole every event took, step by step."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps, rows_of
from verl_profiler.reading.tables.tables import Tables

__all__ = ["event_shares"]


def event_shares(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Compare the time of every event with the whole that it is a part of.

    Events contain each other (`docs/events.md` says which), so shares of one whole add up to more
    than 1; `exclusive_times` has those that add up.  What lies outside of steps (start-up,
    validation) is left out.

    Returns:
        One row per run, step, role and event, most time first: whole (`step` for the trainer's
        events; `requests`, the time of all requests together, for what belongs to a request;
        `processes`, the step's time in each process of the role, for the rest), events, processes,
        total_s, whole_s, share (of the whole; None for an unfinished step, where there is no
        whole).  In a process that does several things at once a share can exceed 1.
    """
    return tables.rows(
        f"""
        WITH totals AS (
            SELECT run, step, role, event,
                CASE WHEN family = 'trainer' AND role = 'trainer' THEN 'step'
                    WHEN family = 'rollout' THEN 'requests' ELSE 'processes' END AS whole,
                count(*) AS events, count(DISTINCT name) AS processes,
                sum(duration_us) AS total_us
            FROM event_fields
            WHERE duration_us IS NOT NULL AND family NOT IN ('profiler', 'engine')
                AND event NOT IN ('init', 'testing', 'validation')
                AND {rows_of(steps, validate=validate)}
            GROUP BY ALL
            UNION ALL
            SELECT run, step, 'engine', 'engine_request', 'requests', count(*),
                count(DISTINCT engine_name), sum(engine_duration_us)
            FROM engine_calls
            WHERE engine_name IS NOT NULL AND {rows_of(steps, validate=validate)}
            GROUP BY run, step
        ), asked AS (
            SELECT run, step, sum(duration_us) AS requests_us FROM requests
            WHERE {rows_of(steps, validate=validate)} GROUP BY run, step
        ), lengths AS (
            SELECT run, step, CASE WHEN finished THEN duration_us END AS step_us FROM steps
            WHERE {in_steps(steps)}
        ), compared AS (
            SELECT t.*, CASE whole WHEN 'step' THEN step_us WHEN 'requests' THEN requests_us
                ELSE step_us * processes END AS whole_us
            FROM totals AS t
            LEFT JOIN asked AS a ON a.run = t.run AND a.step = t.step
            LEFT JOIN lengths AS s ON s.run = t.run AND s.step = t.step
        )
        SELECT run, step, role, event, whole, events, processes, total_us / 1e6 AS total_s,
            whole_us / 1e6 AS whole_s, total_us / nullif(whole_us, 0) AS share
        FROM compared ORDER BY run, step, role, total_us DESC, event
        """
    )
