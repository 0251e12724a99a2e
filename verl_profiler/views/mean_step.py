"""Where a mean step of each run goes, as data of the report page: one bar whose parts add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.critical_cycle import EDGES
from verl_profiler.analysis.explain.rules import BETWEEN, CATEGORIES
from verl_profiler.analysis.selection import by_run
from verl_profiler.render.colors import ACCOUNT_COLORS, category_color
from verl_profiler.render.frames import short_text
from verl_profiler.views.text_tables import Rows

__all__ = ["mean_step", "step_bar"]


# Edges of the cycle that are no accounts of the device time are drawn as what they stand for.
_EDGE_COLORS = {
    "generating": "decode",
    "tools": "tool",
    "rollout_other": "other",
    "noticing": "polling",
    "trainer_other": "unexplained",
}


def mean_step(explained: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Divide the mean time from the start of a step to the start of the next, without the warm-up.

    Args:
        explained: The rows of `steady_path`, `between_path` and `critical_cycle`, by name.

    Returns:
        Per run: run, whole_s, and parts (name, seconds per step, what it is, color), largest first: the
        causes on the critical path, or the edges of an asynchronous run's critical cycle.  Runs
        with neither are left out.
    """
    found: list[dict[str, Any]] = []
    for run, rows in by_run(explained["steady_path"]).items():
        between = by_run(explained["between_path"]).get(run, [])
        steps = {row["step"] for row in rows}
        # A gap is of the steps whose successor was recorded.
        gaps = {row["step"] for row in between} | {step for step in steps if step + 1 in steps}
        means: dict[str, float] = {}
        for own, count in ((rows, len(steps)), (between, len(gaps))):
            for row in own:
                name = row["category"]
                means[name] = means.get(name, 0.0) + row["duration_s"] / count
        parts = [
            (name, mean_s, _about(name), category_color(name)) for name, mean_s in means.items()
        ]
        found.append(step_bar(run, parts))
    for run, rows in by_run(explained["critical_cycle"]).items():
        parts = [
            (row["edge"], row["edge_s"], EDGES[row["edge"]], _edge(row["edge"])) for row in rows
        ]
        found.append(step_bar(run, parts))
    return found


def _about(category: str) -> str:
    if category == BETWEEN:
        return "between the end of a step and the start of the next, covered by no timer"
    return CATEGORIES.get(category, "a phase of the trainer")


def _edge(edge: str) -> str:
    if edge in _EDGE_COLORS:
        return category_color(_EDGE_COLORS[edge])
    return ACCOUNT_COLORS[edge]


def step_bar(run: str, parts: Sequence[tuple[str, float, str, str]]) -> dict[str, Any]:
    """Return the bar of a run, the largest part first; for the parts see `mean_step`."""
    ordered = sorted(parts, key=lambda part: -part[1])
    return {
        "run": short_text(run),
        "whole_s": sum(part[1] for part in parts),
        "parts": [[short_text(name), *more] for name, *more in ordered],
    }
