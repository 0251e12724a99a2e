"""Where the clocks of different hosts contradict what must be: nothing arrives before it is sent."""

from __future__ import annotations

__all__ = ["contradictions_query"]


def contradictions_query() -> str:
    """Return the SQL that holds generate calls against what engines of other hosts saw of them."""
    return """
    WITH calls AS (
        SELECT c.run, p.host AS host, e.host AS engine_host,
            c.begin_us - c.engine_begin_us AS before_us, c.end_us - c.engine_end_us AS after_us,
            coalesce(p.clock_bound_us, 0) + coalesce(e.clock_bound_us, 0) AS bound_us
        FROM engine_calls AS c
        JOIN processes AS p ON p.run = c.run AND p.name = c.name
        JOIN processes AS e ON e.run = c.run AND e.name = c.engine_name
        WHERE p.boot_id <> e.boot_id
    )
    SELECT run, host, engine_host, count(*) AS calls,
        count(*) FILTER (before_us > 0 OR after_us < 0) AS early,
        greatest(max(before_us), -min(after_us), 0) AS contradiction_us,
        max(before_us) AS low_us, min(after_us) AS high_us, max(bound_us) AS bound_us
    FROM calls WHERE before_us IS NOT NULL AND after_us IS NOT NULL
    GROUP BY run, host, engine_host ORDER BY run, host, engine_host
    """
