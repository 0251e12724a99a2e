"""When event loops stood still: everything that awaited in them looks slow, and is not."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["loop_lags"]


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
