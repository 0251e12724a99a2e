"""What the profiler itself cost."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["profiler_cost"]

_SUMS = ", ".join(
    f"sum({name}) AS {name}" for name in ("wrapper_s", "wrapper_cpu_s", "writer_s", "writer_cpu_s")
)


def profiler_cost(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the profiler's own accounts with the step.

    Returns:
        Table `profiler_cost`: one row per run and step.
    """
    return tables.rows(
        f"""
        WITH each AS (
            SELECT run, step, name, sum(events) AS events, sum(size_bytes) AS size_bytes,
                sum(dropped) AS dropped, {_SUMS}
            FROM costs WHERE {in_steps(steps)} GROUP BY run, step, name
        )
        SELECT e.run, e.step, count(*) AS processes, try_cast(sum(events) AS BIGINT) AS events,
            try_cast(sum(size_bytes) AS BIGINT) AS size_bytes, try_cast(sum(dropped) AS BIGINT) AS dropped,
            {_SUMS},
            arg_max(e.name, (wrapper_s, e.name)) AS costliest, max(wrapper_s) AS costliest_s,
            arg_max(wrapper_cpu_s, (wrapper_s, e.name)) AS costliest_cpu_s,
            max(wrapper_s) / nullif(any_value(s.duration_us) FILTER (s.finished), 0) * 1e6 AS share
        FROM each AS e JOIN steps AS s USING (run, step)
        GROUP BY e.run, e.step ORDER BY e.run, e.step
        """
    )
