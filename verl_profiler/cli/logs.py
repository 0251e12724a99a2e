"""Answers from a log alone: a console, or the metrics file of a logger, given instead of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.cli.options import refuse_steps
from verl_profiler.cli.output import json_text
from verl_profiler.cli.terminal import print_error
from verl_profiler.reading.formats.console_log import is_log_file
from verl_profiler.reading.formats.console_steps import logged_runs
from verl_profiler.reading.formats.metric_files import metric_rows
from verl_profiler.reading.formats.registry import is_log_name
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from verl_profiler.reading.formats.console_steps import LoggedRun


def are_logs(paths: Sequence[Path]) -> bool:
    """Return whether all paths are files of logs, not of a run."""
    return all(
        is_log_file(path)
        and (
            is_log_name(path)
            or (
                path.name.endswith((".json", ".json.gz", ".jsonl", ".jsonl.gz"))
                and metric_rows(path, []) is not None
            )
        )
        for path in paths
    )


def opened(
    paths: Sequence[Path], steps: tuple[int, int] | None
) -> tuple[list[LoggedRun], list[str], list[str]]:
    """Return the runs of logs, of these steps, what ended them, and what is wrong with the logs."""
    from verl_profiler.reading.formats.console_end import log_end

    problems: list[str] = []
    runs = logged_runs(paths, problems)
    ends = [(path, log_end(path)) for path in paths]
    shown = [f"{path}: {end}" if paths[1:] else end for path, end in ends if end]
    return runs if steps is None else _chosen(runs, steps), shown, problems


def summarize_logs(
    paths: Sequence[Path], *, steps: tuple[int, int] | None, as_json: bool, verbose: bool
) -> int:
    """Print the headline, where a mean step goes, and what to change first; return 0, or 1 without steps."""
    from verl_profiler.analysis.log_findings import (
        log_facts,
        log_findings,
        log_headline,
        log_phases,
    )

    runs, ends, problems = opened(paths, steps)
    found = [log_findings(run) for run in runs]
    if as_json:
        from verl_profiler.analysis.console_timers import logged_steps

        content = {
            "format": 2,
            "runs": [run.label for run in runs],
            "headline": [log_headline(run) for run in runs],
            "findings": [row for rows in found for row in rows],
            "tables": {
                analysis.__name__: [
                    {"run": run.label, **row} for run in runs for row in analysis(run)
                ]
                for analysis in (logged_steps, log_phases)
            },
            "notes": [f"{run.label}: {fact}" for run in runs for fact in log_facts(run)],
            "ended": ends,
            "problems": problems,
        }
        sys.stdout.write(json_text(content))
        return 0 if runs else 1
    if not runs:
        print_error(*(ends or ("nothing to report:", *problems)))
        return 1
    from verl_profiler.views.log_text import beyond, log_overview
    from verl_profiler.views.text_tables import warnings

    for run, rows in zip(runs, found, strict=True):
        print(log_overview(run, rows, verbose=verbose), end="\n\n")
    for end in ends:
        print(visible(end))
    print(beyond(runs))
    if problems:
        print(warnings(problems))
    return 0


def _chosen(runs: Sequence[LoggedRun], steps: tuple[int, int]) -> list[LoggedRun]:
    """Keep these steps of each run.

    Raises:
        ReadingError: No run has any of them.
    """
    if runs:
        known = sorted({line.step for run in runs for line in run.lines})
        refuse_steps(steps, known, known, "the log")
    return [
        replace(run, lines=lines)
        for run in runs
        if (lines := [line for line in run.lines if steps[0] <= line.step <= steps[1]])
    ]
