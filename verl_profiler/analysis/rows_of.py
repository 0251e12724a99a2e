"""Which rows of a rollout table an analysis looks at: steps, worker, training or validation."""

from __future__ import annotations

from verl_profiler.analysis.selection import Steps, in_steps

__all__ = ["rows_of"]


def rows_of(
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool | None = None,
    table: str = "",
) -> str:
    """Return the SQL condition for a selection.

    Args:
        steps: First and last step; None for all.
        worker: The rank of an agent-loop worker (`worker_<rank>`, restarted ones too); None for all.
        validate: True for validation alone, False for training alone, None for both.
        table: The alias of the table, where the query has several.
    """
    prefix = f"{table}." if table else ""
    conditions = [in_steps(steps, f"{prefix}step")]
    if worker is not None:
        conditions.append(f"regexp_full_match({prefix}name, 'worker_{int(worker)}(-\\d+)?')")
    if validate is not None:
        conditions.append(f"{prefix}validate = {bool(validate)}")
    return " AND ".join(conditions)
