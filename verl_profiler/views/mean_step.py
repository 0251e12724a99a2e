"""Where a mean step of each run goes, as data of the report page: one bar whose parts add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.explain.rules import BETWEEN, CATEGORIES
from verl_profiler.analysis.selection import LeftOut, by_run, steady, summed
from verl_profiler.render.colors import ACCOUNT_COLORS, category_color
from verl_profiler.render.frames import short_text
from verl_profiler.views.text_tables import Rows


def mean_step(explained: Mapping[str, Rows], left_out: LeftOut) -> list[dict[str, Any]]:
    """Divide the mean time from the start of a step to the start of the next, without the warm-up.

    Args:
        explained: The rows of `steady_path`, `between_path` and `bubble_ledger`, by name.
        left_out: The steps that means leave out.

    Returns:
        Per run: run, whole_s, and parts (name, seconds per step, what it is, color), largest first: the
        causes on the critical path; of an asynchronous run the accounts of the trainer's devices.
    """
    found: list[dict[str, Any]] = []
    paths = by_run(explained["steady_path"])
    for run, rows in paths.items():
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
    of_trainer = (
        {**row, "each_s": row["device_s"] / row["devices"]}
        for row in explained["bubble_ledger"]
        if row["run"] not in paths and row["pool"] != "rollout"
    )
    for run, rows in by_run(of_trainer).items():
        kept = steady(rows, left_out)
        steps = len({row["step"] for row in kept})
        parts = [
            (account, each_s / steps, ACCOUNTS[account], ACCOUNT_COLORS[account])
            for account, each_s in summed(kept, "each_s", "account").items()
        ]
        found.append(step_bar(run, parts))
    return found


def _about(category: str) -> str:
    if category == BETWEEN:
        return "between the end of a step and the start of the next, covered by no timer"
    return CATEGORIES.get(category, "a phase of the trainer")


def step_bar(run: str, parts: Sequence[tuple[str, float, str, str]]) -> dict[str, Any]:
    """Return the bar of a run, the largest part first; for the parts see `mean_step`."""
    ordered = sorted(parts, key=lambda part: -part[1])
    return {
        "run": short_text(run),
        "whole_s": sum(part[1] for part in parts),
        "parts": [[short_text(name), *more] for name, *more in ordered],
    }
