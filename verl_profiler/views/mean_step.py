"""Where a mean step of each run goes, as data of the report page: one bar whose parts add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.explain.rules import BETWEEN, CATEGORIES
from verl_profiler.analysis.overview import mean_step
from verl_profiler.analysis.selection import LeftOut, Rows, by_run
from verl_profiler.render.colors import ACCOUNT_COLORS, category_color
from verl_profiler.render.frames import short_text


def step_bars(explained: Mapping[str, Rows], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return the bar of each run; see `analysis.overview.mean_step`.

    Returns:
        Per run: run, whole_s, and parts (name, seconds per step, what it is, color), largest first.
    """
    return [
        step_bar(
            run,
            [
                (row["part"], row["mean_s"], ACCOUNTS[row["part"]], ACCOUNT_COLORS[row["part"]])
                if row["account"]
                else (row["part"], row["mean_s"], _about(row["part"]), category_color(row["part"]))
                for row in rows
            ],
        )
        for run, rows in by_run(mean_step(explained, left_out)).items()
    ]


def _about(category: str) -> str:
    if category == BETWEEN:
        return "between the end of a step and the start of the next, covered by no timer"
    return CATEGORIES.get(category, "a phase of the trainer")


def step_bar(run: str, parts: Sequence[tuple[str, float, str, str]]) -> dict[str, Any]:
    """Return the bar of a run, the largest part first; for the parts see `step_bars`."""
    ordered = sorted(parts, key=lambda part: -part[1])
    return {
        "run": short_text(run),
        "whole_s": sum(part[1] for part in parts),
        "parts": [[short_text(name), *more] for name, *more in ordered],
    }
