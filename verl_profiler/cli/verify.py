"""Check whether a change achieved the gain that a finding predicted: kept, not kept, or undecided.

verl-profiler verify polling logs/before logs/after
verl-profiler verify slow_ranks logs/before logs/after --json

FINDING is a name from `verl-profiler why BEFORE --json`, such as polling, slow_tools or weight_sync.
Exits with 0 if at least half of the predicted gain was achieved, else 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import add_cache, did_you_mean, run_argument
from verl_profiler.cli.output import print_json
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Rows

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("finding", metavar="FINDING", help="the finding's name, such as polling")
    parser.add_argument(
        "before", metavar="BEFORE", type=run_argument, help="the run with the finding"
    )
    parser.add_argument("after", metavar="AFTER", type=run_argument, help="the run with the change")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 0 if it is `kept`, else 1.

    Raises:
        ReadingError: There is no such finding, or a run has no finished step (exit code 2).
    """
    from verl_profiler.analysis.explain.rules import RULES
    from verl_profiler.analysis.explain.verification import verified

    if args.finding not in RULES:
        raise ReadingError(
            f"{args.finding!r} is not a finding{did_you_mean(args.finding, RULES)}\n"
            f"Known findings: {', '.join(RULES)}",
            "no-such-finding",
        )
    found, before = _read(args.before, cache=not args.no_cache)
    remaining, after = _read(args.after, cache=not args.no_cache)
    if args.finding not in found:
        listed = ", ".join(found) or "none"
        raise ReadingError(
            f"{args.before} does not have the finding {args.finding}; it has: {listed}.",
            "no-such-finding",
        )
    left = remaining.get(args.finding)
    result = verified(
        found[args.finding], before, after, None if left is None else left["recoverable_s"]
    )
    if args.json:
        print_json({"format": 1, **result})
    else:
        sys.stdout.write(_text(shown(result)))
    return 0 if result["verdict"] == "kept" else 1


def _read(path: Path, *, cache: bool) -> tuple[dict[str, Any], Rows]:
    """Return a run's findings by name, and its steps after the warm-up."""
    from verl_profiler.analysis.explain.findings import explanations
    from verl_profiler.analysis.selection import warm_up
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.reading.reader import load
    from verl_profiler.views.findings import findings

    with load(path, cache=cache) as opened:
        rows = [row for row in step_times(opened.tables) if row["finished"] and row["step"] > 0]
        found = findings(explanations(opened.tables))
    left_out = warm_up([row["step"] for row in rows])
    rows = [row for row in rows if row["step"] not in left_out]
    if not rows:
        raise ReadingError(f"{path} has no finished step to compare.", "too-few-steps")
    return {row["finding"]: row for row in found}, rows


def _text(result: dict[str, Any]) -> str:
    from verl_profiler.units import seconds, share

    def span(low: float | None, high: float | None) -> str:
        return "" if low is None or high is None else f" ({seconds(low)} to {seconds(high)})"

    who = f" ({result['culprit_text']})" if result["culprit_text"] else ""
    left = result["remaining_s"]
    lines = [
        f"{result['finding']}{who}: {result['verdict']}; {result['reason']}",
        (
            f"  predicted  {seconds(result['predicted_s'])} per step"
            f"{span(result['low_s'], result['high_s'])}"
        ),
        (
            f"  measured   {seconds(result['measured_s'])} per step"
            f"{span(result['measured_low_s'], result['measured_high_s'])}: "
            f"{seconds(result['before_s'])} in {result['steps_before']} steps before, "
            f"{seconds(result['after_s'])} in {result['steps_after']} after"
        ),
        f"  missed by  {seconds(result['miss_s'])}",
        "  remaining  "
        + (
            "none; the finding no longer triggers"
            if left is None
            else f"up to {seconds(left)} per step"
        ),
    ]
    lines += [
        f"  WARNING {name} per step changed by {share(change)}; steps are not comparable"
        for name, change in result["work_changes"].items()
    ]
    return "\n".join(lines) + "\n"
