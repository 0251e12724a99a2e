"""Where device memory was fullest."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["memory_peaks"]


def memory_peaks(tables: Tables, steps: Steps = None) -> Rows:
    """Find the highest reading of device memory in each step and role.

    Returns:
        One row per run, step and role: name (the process), at (verl's checkpoint), readings,
        allocated_bytes, reserved_bytes, used_bytes, total_bytes.  Devices without a memory
        counter (a CPU) have none.
    """
    return tables.rows(
        f"""
        SELECT run, step, role, top.name, top."at", readings, top.allocated_bytes,
            top.reserved_bytes, top.used_bytes, top.total_bytes
        FROM (
            SELECT run, step, role, count(*) AS readings,
                arg_max({{'name': name, 'at': "at", 'allocated_bytes': allocated_bytes,
                    'reserved_bytes': reserved_bytes, 'used_bytes': used_bytes,
                    'total_bytes': total_bytes}},
                    (coalesce(used_bytes, reserved_bytes, allocated_bytes), end_us, name)) AS top
            FROM memory WHERE coalesce(total_bytes, 2) > 1 AND {in_steps(steps)}
            GROUP BY run, step, role
        ) ORDER BY run, step, role
        """
    )
