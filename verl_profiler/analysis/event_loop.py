"""When event loops stood still: everything that awaited in them looks slow, and is not."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.reading.tables.tables import Tables

__all__ = ["longest_lags", "loop_lags"]


def loop_lags(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up event-loop lags by process.

    Returns:
        One row per run, step, process and loop, worst first: name, role, loop, lags, total_s,
        max_s, worst_begin_us.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, role, loop, count(*) AS lags, sum(duration_us) / 1e6 AS total_s,
            max(duration_us) / 1e6 AS max_s,
            arg_max(begin_us, (duration_us, begin_us)) AS worst_begin_us
        FROM lags WHERE {in_steps(steps)}
        GROUP BY run, step, name, role, loop ORDER BY run, step, max_s DESC, name, loop
        """
    )


def longest_lags(tables: Tables, steps: Steps = None, *, count: int = 40) -> Rows:
    """List the longest event-loop lags, without those of loops that compute by design.

    Returns:
        One row per lag, longest first: run, step, name, role, loop, during (the event that held the
        loop; None when no probed call did), duration_s, at_s (since the step's begin).
    """
    computing = ", ".join(f"'{role}'" for role in COMPUTING_ROLES)
    return tables.rows(
        f"""
        SELECT l.run, l.step, l.name, l.role, l.loop, l.during, l.duration_us / 1e6 AS duration_s,
            (l.begin_us - s.begin_us) / 1e6 AS at_s
        FROM lags AS l JOIN steps AS s USING (run, step)
        WHERE coalesce(l.role, '') NOT IN ({computing}) AND {in_steps(steps, "l.step")}
        ORDER BY l.duration_us DESC, l.begin_us, l.name LIMIT {int(count)}
        """
    )
