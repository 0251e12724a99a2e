"""Explain what a step waited for, and how long it would take with changes.

    verl-profiler why logs/my-run
    verl-profiler why logs/my-run --steps 12
    verl-profiler why logs/my-run --steps 12 --json
    verl-profiler why logs/my-run -v
    verl-profiler why train.log

Without --steps, all finished steps are combined. The answer fits on one
screen; -v shows findings with their causes, the path of one step in order, all
replays and their errors, device time and requests. Replays are simulations of
the run with one thing changed; their intervals are for 90 %.
"""

from __future__ import annotations

import argparse
import sys

from verl_profiler.cli.options import JSON, READING, Argument, opened_run
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.render.visible import shown

ARGUMENTS = (
    *READING,
    Argument("-v", "--verbose", action="store_true", help="show everything"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Print critical path, replays and stragglers; return 0, or 1 if no step finished."""
    from verl_profiler.cli.logs import are_logs, summarize_logs

    if are_logs(args.runs):
        return summarize_logs(args.runs, steps=args.steps, as_json=args.json, verbose=True)
    from verl_profiler.analysis.overview import headline
    from verl_profiler.analysis.registry import explanations
    from verl_profiler.analysis.selection import left_out as without
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.views.why_text import why

    with opened_run(args) as opened:
        found = explanations(opened.tables, args.steps)
        problems, notes = opened.problems, opened.notes
        warm_up = without(opened.tables, args.steps)
        figures = headline(step_times(opened.tables, args.steps), found["bubble_ledger"], warm_up)
        finished = opened.rows("SELECT 1 FROM steps WHERE finished LIMIT 1")
    if not found["bubble_ledger"]:
        why_not = "no step can be analyzed" if finished else "no step finished"
        print_error(f"nothing to report: {why_not}", *problems)
        return 1
    ranked = found["findings"]
    if args.json:
        tables, left_out = bounded(found)
        content = {
            "format": 2,
            "runs": opened.labels,
            "headline": figures,
            "findings": ranked,
            "tables": tables,
            "left_out": left_out,
            "notes": notes,
            "problems": problems,
        }
        print_json(content)
    else:
        sys.stdout.write(
            why(
                *shown((found, ranked)),
                left_out=warm_up,
                verbose=args.verbose,
            )
        )
    return 0
