"""What the list of steps shows of each step, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# By table, its columns and their names in the list.
_COLUMNS = {
    "request_times": {"p50_s": "p50_s", "p95_s": "p95_s", "max_s": "max_s"},
    "step_tail": {"after_p80_s": "after_p80_s", "poll_s": "poll_s"},
    "step_phases": {"phase": "longest_phase", "share": "longest_share"},
    "engine_times": {"engine_tokens_per_s": "engine_tokens_per_s"},
}


def step_rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of `step_times`, each with its requests, tail, longest phase and rate."""
    rows = {
        (row["run"], row["step"]): {
            **row,
            **{name: None for columns in _COLUMNS.values() for name in columns.values()},
        }
        for row in found["step_times"]
    }
    for table, columns in _COLUMNS.items():
        # The first of a step's rows is its largest.
        for row in reversed(found[table]):
            step = rows.get((row["run"], row["step"]))
            if step is not None and not row.get("validate"):
                step |= {name: row[column] for column, name in columns.items()}
    return list(rows.values())
