"""Whether the clocks of different hosts agree with what must be: nothing arrives before it is sent."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["clock_agreement"]


def clock_agreement(tables: Tables, steps: Steps = None) -> Rows:
    """Hold generate calls against what their engines saw of them, where those are on other hosts.

    Returns:
        One row per run, agent loops' host and engines' host: calls, early (calls that begin in the
        engine before they were made, or end in it after they came back), contradiction_us (by how
        much at least the two clocks are wrong against each other; 0 where nothing contradicts),
        low_us and high_us (what could be added to the engines' times without a contradiction; low
        is above high where no single amount would do), bound_us (the error that is stated).
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT c.run, p.host AS host, e.host AS engine_host,
                c.begin_us - c.engine_begin_us AS before_us, c.end_us - c.engine_end_us AS after_us,
                coalesce(p.clock_bound_us, 0) + coalesce(e.clock_bound_us, 0) AS bound_us
            FROM engine_calls AS c
            JOIN processes AS p ON p.run = c.run AND p.name = c.name
            JOIN processes AS e ON e.run = c.run AND e.name = c.engine_name
            WHERE p.boot_id <> e.boot_id AND {in_steps(steps, "c.step")}
        )
        SELECT run, host, engine_host, count(*) AS calls,
            count(*) FILTER (before_us > 0 OR after_us < 0) AS early,
            greatest(max(before_us), -min(after_us), 0) AS contradiction_us,
            max(before_us) AS low_us, min(after_us) AS high_us, max(bound_us) AS bound_us
        FROM calls WHERE before_us IS NOT NULL AND after_us IS NOT NULL
        GROUP BY run, host, engine_host ORDER BY run, host, engine_host
        """
    )
