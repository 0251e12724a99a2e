"""Which steps an analysis looks at."""

from __future__ import annotations

__all__ = ["Rows", "Steps", "in_steps"]

from typing import Any

# First and last step, both included; None for all.
Steps = tuple[int, int] | None
Rows = list[dict[str, Any]]


def in_steps(steps: Steps, column: str = "step") -> str:
    """Return the SQL condition for `steps`."""
    return "true" if steps is None else f"{column} BETWEEN {int(steps[0])} AND {int(steps[1])}"
