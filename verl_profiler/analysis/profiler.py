"""What the profiler recorded, and what it cost."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

# Processes that are listed.
_ROWS = 4_000

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


def recorded_events(tables: Tables, steps: Steps = None) -> dict[str, int]:
    """Return how many events of these steps there are of each name."""
    rows = tables.rows(
        "SELECT event, try_cast(sum(events) AS BIGINT) AS events FROM event_counts "
        f"WHERE {in_steps(steps)} GROUP BY event"
    )
    return {row["event"]: row["events"] for row in rows}


def processes(tables: Tables) -> Rows:
    """Return what each process wrote, and how it ended."""
    return tables.rows(
        "SELECT run, name, role, host, pid::VARCHAR AS pid, recorded_events, size_bytes, dropped, "
        f"write_errors, end_reason FROM processes ORDER BY run, role, rank, name LIMIT {_ROWS}"
    )
