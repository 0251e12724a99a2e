"""What the report page shows of a log alone: the same first screen, and the timers as charts and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_profiler.analysis.console_timers import metric_summary
from verl_profiler.analysis.log_findings import log_facts, log_phases
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.colors import color
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.columns import page_view, section
from verl_profiler.views.log_text import beyond, headline
from verl_profiler.views.sections import step_bar
from verl_profiler.views.timing_figures import PICTURES
from verl_profiler.views.view import charts_of

_METRICS = "metric_summary"


def log_document(
    runs: Sequence[LoggedRun], findings: Rows, ends: Sequence[str], problems: Sequence[str]
) -> dict[str, Any]:
    """Gather what the page shows of logged runs.

    Args:
        runs: Of the logs, with a step each.
        findings: The rows of `log_findings` of all runs.
        ends: What ended the trainings.
        problems: What is wrong with the logs.

    Returns:
        As `sections.document`; steps, requests and processes are empty.
    """
    views = {name: _picture(runs, name) for name in PICTURES} | {_METRICS: _metrics(runs)}
    facts = [short_text("; ".join(known)) for run in runs if (known := log_facts(run))]
    missing = [text for view in views.values() for text in view["missing"]]
    sections = [
        section(name, name.replace("_", " ").capitalize(), None, [name])
        for name, view in views.items()
        if view["charts"] or view["table"]["rows"]
    ]
    sections += [section("notes", "Notes", None, notes=missing)] * bool(missing)
    sections += [section("problems", "Data quality", None)] * bool(problems)
    empty = frame([])
    return {
        "about": {
            "runs": [run.label for run in runs],
            "line": [],
            "notes": [*ends, *facts, beyond(runs)],
            "launches": [],
        },
        "steps": empty,
        "time_tree": empty,
        "columns": {"steps": [], "requests": []},
        "detailed": [],
        "computing": [],
        "notes": {},
        "timelines": {
            "requests": {**empty, "spans": [], "calls": []},
            "scenes": [],
            "names": [],
            "of": 0,
        },
        "problems": [short_text(problem, 2_000) for problem in problems],
        "findings": findings,
        "views": views,
        "sections": sections,
        "mean_step": [_mean_step(run) for run in runs],
        "sentences": [headline(run) for run in runs],
    }


def _picture(runs: Sequence[LoggedRun], name: str) -> dict[str, Any]:
    charts, missing = charts_of(runs, PICTURES[name])
    return page_view(name, "", frame([]), charts, [f"{name}: {reason}" for reason in missing])


def _metrics(runs: Sequence[LoggedRun]) -> dict[str, Any]:
    rows = [
        {**({"run": run.label} if len(runs) > 1 else {}), **row}
        for run in runs
        for row in metric_summary(run)
    ]
    return page_view(_METRICS, "Each metric over the steps", frame(rows))


def _mean_step(run: LoggedRun) -> dict[str, Any]:
    abouts = {"step": "a timer of the step", "outside": "outside the step"}
    parts = [
        (row["phase"], row["mean_s"], abouts[row["place"]], color(row["phase"]))
        for row in log_phases(run)
        if row["place"] in abouts
    ]
    return step_bar(run.label, parts)
