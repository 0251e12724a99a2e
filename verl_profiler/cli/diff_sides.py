"""The two sides of a comparison: which steps of which run, and their metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.logs import are_logs
from verl_profiler.cli.options import check_steps, step_range
from verl_profiler.errors import ReadingError
from verl_profiler.events.remote import is_url

if TYPE_CHECKING:
    from verl_profiler.analysis.compare.differences import Measured
    from verl_profiler.analysis.selection import Rows, Steps
    from verl_profiler.reading.reader import Run

__all__ = ["Side", "read_both", "read_findings", "side", "sides"]

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


def sides(text: str) -> tuple[Side, ...]:
    """Parse `RUN,RUN…`, launches of the same; an existing path is a path, even if it contains `,`."""
    parts = [text] if Path(text).exists() or is_url(text) else text.split(",")
    parts = [part for part in parts if part]
    if len(set(parts)) < len(parts):
        raise ReadingError(f"{text} names a run twice.\nName each launch once", "option-not-heeded")
    return tuple(map(side, parts))


def _place(text: str) -> Path:
    """Return the path of a run, which is downloaded where it is a URL."""
    if not is_url(text):
        return Path(text)
    from verl_profiler.reading.remote import fetched

    return fetched(text)


def read_both(
    first: Sequence[Side], second: Sequence[Side], *, cache: bool
) -> tuple[Measured, Measured]:
    """Return the metrics of both sides; with device time and staleness if one is asynchronous.

    Args:
        first: The launches of A.
        second: Those of B.
        cache: Whether the runs' caches are used.
    """
    from verl_profiler.analysis.compare.asynchronous_metrics import device_metrics, sample_metrics
    from verl_profiler.analysis.explain.ledger import bubble_ledger
    from verl_profiler.reading.reader import load

    with ExitStack() as stack:
        reads: list[list[Measured]] = []
        opened_runs: list[tuple[Measured, Run]] = []
        for side in (first, second):
            reads.append([])
            for each in side:
                if are_logs([each.path]):
                    reads[-1].append(_read_log(each))
                    continue
                opened = stack.enter_context(load(each.path, cache=cache))
                reads[-1].append(_read(each, opened))
                opened_runs.append((reads[-1][-1], opened))
        every = [*reads[0], *reads[1]]
        if any(each.asynchronous for each in every):
            for each, opened in opened_runs:
                chosen = set(each.steps)
                span = (min(chosen), max(chosen))
                ledger = bubble_ledger(opened.tables, span)
                each.ledger = [row for row in ledger if row["step"] in chosen]
                sampled = sample_metrics(opened.tables, span)
                each.rows += [row for row in sampled if row["step"] in chosen]
            for each, rows in zip(every, device_metrics([e.ledger for e in every]), strict=True):
                each.rows += rows
    return _together(reads[0]), _together(reads[1])


def _together(launches: Sequence[Measured]) -> Measured:
    """Return the launches of one side as one."""
    from verl_profiler.analysis.compare.comparison import key

    first = launches[0]
    rows = [
        {**row, "step": key(number, row["step"])}
        for number, each in enumerate(launches)
        for row in each.rows
    ]
    steps = [key(number, step) for number, each in enumerate(launches) for step in each.steps]
    asynchronous = any(each.asynchronous for each in launches)
    return replace(first, rows=rows, steps=steps, asynchronous=asynchronous, launches=len(launches))


def _read_log(each: Side) -> Measured:
    """Return the metrics of a console log."""
    from verl_profiler.analysis.compare.step_metrics import logged_metrics
    from verl_profiler.reading.formats.console_steps import logged_runs

    problems: list[str] = []
    runs = logged_runs([each.path], problems)
    if len(runs) != 1:
        raise ReadingError(
            f"{each.path} holds {len(runs)} runs; diff compares logs of one run.\n"
            f"{problems[0] if problems else 'Split it: verl-profiler timing lists them'}",
            "several-runs" if runs else "no-events",
        )
    first, last = each.steps or (1, max(line.step for line in runs[0].lines))
    rows = [row for row in logged_metrics(runs[0]) if first <= row["step"] <= last]
    return _chosen(each, rows, {}, asynchronous=False)


def read_findings(each: Side, *, cache: bool) -> tuple[dict[str, Any], Rows]:
    """Return a run's findings by name, and its finished steps after the warm-up.

    Raises:
        ReadingError: No finished step is left.
    """
    from verl_profiler.analysis.registry import explained
    from verl_profiler.analysis.selection import steady, warm_ups
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.reading.reader import load

    with load(each.path, cache=cache) as opened:
        check_steps(opened, each.steps, f"{each.path}@")
        rows = step_times(opened.tables, each.steps)
        found = explained(opened.tables, each.steps)["findings"]
    rows = [row for row in rows if row["finished"] and row["step"] > 0]
    rows = steady(rows, warm_ups(rows, each.steps))
    if not rows:
        raise ReadingError(f"{each.shown} has no finished step to compare.", "too-few-steps")
    return {row["finding"]: row for row in found}, rows


def _read(each: Side, opened: Run) -> Measured:
    """Return the metrics of one side's steps."""
    from verl_profiler.analysis.compare.step_metrics import step_metrics

    check_steps(opened, each.steps, f"{each.path}@")
    rows = step_metrics(opened.tables, each.steps)
    launch = next((found for found in opened.launches.values() if found), dict[str, Any]())
    asynchronous = bool(opened.rows("SELECT run FROM asynchronous"))
    return _chosen(each, rows, launch, asynchronous=asynchronous)


def _chosen(each: Side, rows: Rows, launch: Mapping[str, Any], *, asynchronous: bool) -> Measured:
    """Return one side without its warm-up."""
    from verl_profiler.analysis.compare.differences import Measured
    from verl_profiler.analysis.selection import warm_up

    finished = sorted({row["step"] for row in rows})
    dropped = warm_up(finished, each.steps)
    left = [step for step in finished if step not in dropped]
    if not left:
        raise ReadingError(
            f"{each.shown} has no finished training step to compare.\nCompare a run that finished one",
            "too-few-steps",
        )
    rows = [row for row in rows if row["step"] in set(left)]
    return Measured(rows, left, dropped, launch, asynchronous)
