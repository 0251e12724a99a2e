"""Show where the time of a run went, and what to change first, in 20 lines.

    verl-profiler summary logs/my-run
    verl-profiler summary -v logs/my-run
    verl-profiler summary logs/my-run --step 5
    verl-profiler summary --follow logs/my-run
    verl-profiler summary logs/my-run logs/my-run-2 --json
    verl-profiler summary train.log

Of a console log or a file of metrics (verl's file logger, W&B, MLflow), the
timers are summarized. -v shows everything: all phases, findings with their
causes, warnings, and a line for each step. --step N adds the tables of
that step. --follow refreshes the summary of a running training until it
ends, and waits for a run that does not exist yet. NO_COLOR disables colors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from verl_profiler.cli.options import JSON, READING, Argument, check_steps, opened_run
from verl_profiler.cli.output import bounded, json_text
from verl_profiler.cli.terminal import control, has_color, print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import escaped, shown

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import LeftOut, Steps
    from verl_profiler.reading.reader import Run

__all__ = ["ARGUMENTS", "run", "write_summary"]


ARGUMENTS = (
    *READING,
    Argument("-v", "--verbose", action="store_true", help="show findings and steps in full"),
    (
        JSON,
        Argument(
            "--follow", action="store_true", help="refresh the summary until the training ends"
        ),
    ),
)


def run(args: argparse.Namespace) -> int:
    """Print the summary; return 0, or 1 if there is nothing to report."""
    from verl_profiler.cli.logs import are_logs, summarize_logs

    if args.follow:
        return _follow(args)
    if are_logs(args.runs):
        return summarize_logs(args.runs, steps=args.steps, as_json=args.json, verbose=args.verbose)
    if not args.json:
        for path in args.runs:
            _print_stuck(path)
    with opened_run(args) as opened:
        status = write_summary(
            opened,
            args.steps,
            sys.stdout,
            as_json=args.json,
            verbose=args.verbose,
            color=has_color(),
        )
        if status and not args.json:
            print_error("nothing to report:", *_doing(args.runs, opened), *opened.problems)
        return status


def _follow(args: argparse.Namespace) -> int:
    from verl_profiler.cli.following import follow

    if len(args.runs) > 1 or args.steps is not None or args.verbose:
        raise ReadingError(
            "--follow shows the summary of one run as a whole.\nOmit -v, --steps and the other runs",
            "option-not-heeded",
        )
    return follow(args.runs[0])


def _print_stuck(path: Path) -> None:
    """Begin with what a run is stuck on, or was when it was killed."""
    from verl_profiler.live.open_processes import ProcessFiles
    from verl_profiler.live.stuck import pointer

    line = pointer(ProcessFiles(path)) if os.path.isdir(path) else None
    if line is not None:
        print(escaped(line), end="\n\n")


def _doing(paths: Sequence[Path], opened: Run) -> Iterator[str]:
    """Yield what runs without a finished step do, if they go on, and what explains it."""
    from verl_profiler.live.open_processes import ProcessFiles
    from verl_profiler.live.present import present

    for path in filter(os.path.isdir, paths):
        now = present(ProcessFiles(path), opened.tables)
        if now.state in ("running", "killed"):
            yield f"{now.line(time.time())}; verl-profiler stuck {path} shows what it waits for"


def write_summary(
    opened: Run,
    steps: Steps,
    stream: TextIO,
    *,
    as_json: bool,
    verbose: bool = False,
    color: bool = False,
) -> int:
    """Write the summary of an opened run; return 0, or 1 if there is nothing to report."""
    from verl_profiler.analysis.overview import headline
    from verl_profiler.analysis.registry import EXPLANATIONS, explained, summarized
    from verl_profiler.analysis.selection import left_out as without
    from verl_profiler.reading.progress import doing
    from verl_profiler.views.about_run import recorded_events
    from verl_profiler.views.findings import finding_list
    from verl_profiler.views.overview_text import TABLES, head_text, overview_text, totals_text
    from verl_profiler.views.summary_text import step_tables, summary

    check_steps(opened, steps)
    one_step = steps is not None and steps[0] == steps[1]
    whole = as_json or verbose or one_step
    tables = summarized(opened.tables, steps, None if whole else TABLES)
    with doing("explanations"):
        why = explained(opened.tables, steps)
    tables |= {name: why[name] for name in EXPLANATIONS}
    found = why["findings"]
    warm_up = without(opened.tables, steps)
    recorded = recorded_events(opened.tables, steps)
    about: dict[str, Any] = {
        "runs": opened.labels,
        "events": sum(recorded.values()),
        "recorded": set(recorded),
        "notes": opened.notes,
    }
    if as_json:
        kept, left_out = bounded(tables | _totals(opened, steps, tables, warm_up))
        names, names_left_out = bounded({"recorded": sorted(about["recorded"])})
        content = {
            "format": 2,
            **about,
            **names,
            "headline": headline(tables["step_times"], why["bubble_ledger"], warm_up),
            "findings": found,
            "tables": kept,
            "left_out": left_out | names_left_out,
            "problems": opened.problems,
        }
        stream.write(json_text(content))
    else:
        if not tables["step_times"]:
            return 1
        rows = {**tables, **_totals(opened, steps, tables, warm_up)}
        rows["device_use"] = why["device_use"]
        rows = shown({name: rows[name] for name in TABLES})
        tables, found, about, problems = shown((tables, found, about, opened.problems))
        if verbose:
            about["head"] = head_text(rows, about["runs"], warm_up, found)
            about["findings"] = finding_list(found, warm_up)
            about["totals"] = totals_text(rows, about["runs"], warm_up)
            stream.write(summary(tables, about, problems))
        else:
            text = overview_text(rows, about, found, problems, warm_up, color=color)
            (control if color else stream.write)(text)
        if one_step:
            stream.write(f"\n{step_tables(tables, about)}")
    return 0 if tables["step_times"] else 1


def _totals(opened: Run, steps: Steps, tables: dict[str, Any], warm_up: LeftOut) -> dict[str, Any]:
    from verl_profiler.analysis.overview import own_spans, phase_totals, request_totals
    from verl_profiler.analysis.tools import tool_latencies
    from verl_profiler.analysis.workers import worker_balance

    requests = request_totals(opened.tables, steps)
    return {
        "phase_totals": phase_totals(tables["step_phases"], left_out=warm_up),
        "request_totals": requests,
        "tool_latencies": tool_latencies(opened.tables, steps),
        "own_spans": own_spans(opened.tables, steps),
        # Shown where there are no requests.
        "worker_balance": [] if requests else worker_balance(opened.tables, steps),
    }
