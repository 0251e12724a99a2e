"""Device memory at each of verl's own checkpoints in a step."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["memory_phases"]


def memory_phases(tables: Tables, steps: Steps = None) -> Rows:
    """List the readings of device memory of each role, in the order of a step.

    Devices without a memory counter (a CPU) have none.

    Returns:
        One row per run, step, role and checkpoint: at (verl's own words), place (1 is the first in
        the step), readings, processes, allocated_bytes, reserved_bytes and used_bytes (the highest
        of all processes), lowest_used_bytes, total_bytes, fullest (the process with the highest).
    """
    return tables.rows(
        f"""
        WITH known AS (
            SELECT *, coalesce(used_bytes, reserved_bytes, allocated_bytes) AS measure_bytes
            FROM memory WHERE coalesce(total_bytes, 2) > 1 AND {in_steps(steps)}
        ), summed AS (
            SELECT run, step, role, coalesce("at", '(no name)') AS "at", min(end_us) AS first_us,
                count(*) AS readings, count(DISTINCT name) AS processes,
                max(allocated_bytes) AS allocated_bytes, max(reserved_bytes) AS reserved_bytes,
                max(used_bytes) AS used_bytes, min(used_bytes) AS lowest_used_bytes,
                max(total_bytes) AS total_bytes,
                arg_min(name, (-measure_bytes, name)) AS fullest
            FROM known GROUP BY run, step, role, "at"
        )
        SELECT run, step, role, "at", row_number() OVER (PARTITION BY run, step, role
                ORDER BY first_us, "at") AS place, readings, processes, allocated_bytes,
            reserved_bytes, used_bytes, lowest_used_bytes, total_bytes, fullest
        FROM summed ORDER BY run, step, role, place
        """
    )
