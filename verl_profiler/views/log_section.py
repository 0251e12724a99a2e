"""What the page shows of a console log: its timers, and how they agree with the recorded spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.console_timers import metric_summary
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.timer_differences import logged_and_recorded, timer_differences
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.timing_text import run_facts

__all__ = ["log_section"]

_COLUMNS = ("timer", "logged_s", "recorded_s", "difference_s", "reason", "explained")


def log_section(
    tables: Tables,
    run: LoggedRun,
    problems: Sequence[str],
    steps: Steps,
    places: Mapping[tuple[Any, Any], int],
    whole: int,
) -> dict[str, Any]:
    """Gather what the page shows of a console log.

    Args:
        tables: Of the recorded run.
        run: From the log.
        problems: What was found while the log was read.
        steps: Those to compare.
        places: The number on the page of each recorded run and step.
        whole: The number that stands for all steps together.

    Returns:
        `label`, `facts` and `problems` in words; `timers` (statistics) and `differences` as frames.
    """
    found = list(problems)
    rows = logged_and_recorded(tables, run, steps, found)
    shown: Rows = [
        {"s": places[key], **{name: row[name] for name in _COLUMNS}}
        for row in rows
        if (key := (row["run"], row["step"])) in places
    ]
    shown += [
        {"s": whole, **{name: row[name] for name in _COLUMNS}} for row in timer_differences(rows)
    ]
    timers = [
        {"timer": row["metric"].removeprefix("timing_s/"), **row}
        for row in metric_summary(run)
        if row["metric"].startswith("timing_s/")
    ]
    return {
        "label": short_text(run.label),
        "facts": [short_text(fact) for fact in run_facts(run)],
        "problems": [short_text(problem, 2_000) for problem in found],
        "timers": frame(timers, drop=("metric", "place")),
        "differences": frame(shown),
    }
