"""The two sides of a comparison: which steps of which run, and their metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import check_steps, step_range
from verl_profiler.errors import ReadingError
from verl_profiler.events.remote import is_url

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Rows, Steps
    from verl_profiler.reading.reader import Run

__all__ = ["Read", "Side", "read_both", "read_findings", "side"]

_SIDE = re.compile(r"(?P<path>.+)@(?P<steps>\d{1,9}(?::\d{1,9})?)", re.DOTALL)


@dataclass
class Side:
    """One of the two sides of the comparison.

    Args:
        shown: The argument as given.
        path: The run.
        steps: First and last step; None for all after the warm-up.
    """

    shown: str
    path: Path
    steps: Steps = None


def side(text: str) -> Side:
    """Parse `RUN` or `RUN@N:M`; an existing path is a path, even if its name contains `@`."""
    match = _SIDE.fullmatch(text)
    if match is None or Path(text).exists():
        return Side(text, _place(text))
    return Side(text, _place(match["path"]), step_range(match["steps"]))


def _place(text: str) -> Path:
    """Return the path of a run, which is downloaded where it is a URL."""
    if not is_url(text):
        return Path(text)
    from verl_profiler.reading.remote import fetched

    return fetched(text)


@dataclass
class Read:
    """The metrics of one side.

    Args:
        rows: Those of `step_metrics` for the compared steps.
        steps: The compared steps.
        warm_up: The steps left out before them.
        launch: The run's `run.json`; empty where there is none.
        asynchronous: Whether steps train on samples of earlier steps.
        ledger: The rows of `bubble_ledger`, where one of the sides is asynchronous.
    """

    rows: Rows
    steps: list[int]
    warm_up: list[int]
    launch: Mapping[str, Any]
    asynchronous: bool
    ledger: Rows = field(default_factory=list[dict[str, Any]])


def read_both(first: Side, second: Side, warmup: int | None, *, cache: bool) -> tuple[Read, Read]:
    """Return the metrics of both sides; with device time and staleness if one is asynchronous.

    Args:
        first: A.
        second: B.
        warmup: Finished steps to leave out at the start of a run without chosen steps.
        cache: Whether the runs' caches are used.
    """
    from verl_profiler.analysis.compare.asynchronous_metrics import device_metrics, sample_metrics
    from verl_profiler.analysis.explain.ledger import bubble_ledger
    from verl_profiler.reading.reader import load

    with ExitStack() as stack:
        runs = [stack.enter_context(load(each.path, cache=cache)) for each in (first, second)]
        a, b = (
            _read(each, opened, warmup) for each, opened in zip((first, second), runs, strict=True)
        )
        if a.asynchronous or b.asynchronous:
            for each, opened in zip((a, b), runs, strict=True):
                chosen = set(each.steps)
                span = (min(chosen), max(chosen))
                ledger = bubble_ledger(opened.tables, span)
                each.ledger = [row for row in ledger if row["step"] in chosen]
                sampled = sample_metrics(opened.tables, span)
                each.rows += [row for row in sampled if row["step"] in chosen]
            for each, rows in zip((a, b), device_metrics([a.ledger, b.ledger]), strict=True):
                each.rows += rows
    return a, b


def read_findings(each: Side, *, cache: bool) -> tuple[dict[str, Any], Rows]:
    """Return a run's findings by name, and its finished steps after the warm-up.

    Raises:
        ReadingError: No finished step is left.
    """
    from verl_profiler.analysis.explain.findings import explanations
    from verl_profiler.analysis.selection import steady, warm_ups
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.reading.reader import load
    from verl_profiler.views.findings import findings

    with load(each.path, cache=cache) as opened:
        check_steps(opened, each.steps, f"{each.path}@")
        rows = step_times(opened.tables, each.steps)
        found = findings(explanations(opened.tables, each.steps))
    rows = [row for row in rows if row["finished"] and row["step"] > 0]
    rows = steady(rows, warm_ups(rows, each.steps))
    if not rows:
        raise ReadingError(f"{each.shown} has no finished step to compare.", "too-few-steps")
    return {row["finding"]: row for row in found}, rows


def _read(each: Side, opened: Run, warmup: int | None) -> Read:
    """Return the metrics of one side's steps."""
    from verl_profiler.analysis.compare.step_metrics import step_metrics
    from verl_profiler.analysis.selection import warm_up

    check_steps(opened, each.steps, f"{each.path}@")
    rows = step_metrics(opened.tables, each.steps)
    launch = next((found for found in opened.launches.values() if found), dict[str, Any]())
    asynchronous = bool(opened.rows("SELECT run FROM asynchronous"))
    finished = sorted({row["step"] for row in rows})
    if warmup is None or each.steps is not None:
        dropped = warm_up(finished, each.steps)
    else:
        dropped = finished[: max(warmup, 0)]
    left = [step for step in finished if step not in dropped]
    if not left:
        raise ReadingError(
            f"{each.shown} has {len(finished)} finished training steps"
            f"{', all left out as warm-up' if finished else ''}, so nothing is left to "
            "compare.\nName steps, for example RUN@1:5, or give --warmup 0",
            "too-few-steps",
        )
    rows = [row for row in rows if row["step"] in set(left)]
    return Read(rows, left, dropped, launch, asynchronous)
