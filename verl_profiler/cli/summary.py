"""Say where the time of a run went: step by step, the conclusion first.

verl-profiler summary logs/my-run
verl-profiler summary logs/my-run --step 10:20
verl-profiler summary logs/my-run logs/my-run-2 --json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.analysis import Steps
    from verl_profiler.reader import Run

__all__ = ["add_arguments", "check_steps", "run", "step_range", "summarize"]

_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="run directory, archive of one, step folder or event file; several for a resumed run",
    )
    parser.add_argument(
        "--step", metavar="N[:M]", type=step_range, help="one step, or those from N to M"
    )
    parser.add_argument("--json", action="store_true", help="print all tables as one JSON object")
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor write the run's .cache folder"
    )


def run(args: argparse.Namespace) -> int:
    """Print the summary; return 0, or 1 when there is nothing to report.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.reader import load

    with load(args.runs, cache=not args.no_cache) as opened:
        return _print(opened, args.step, sys.stdout, as_json=args.json)


def summarize(run_dir: Path, stream: TextIO) -> None:
    """Write the summary of a run to `stream`."""
    from verl_profiler.reader import load

    with load(run_dir) as opened:
        _print(opened, None, stream, as_json=False)


def step_range(text: str) -> tuple[int, int]:
    """Read `N` or `N:M`, both included."""
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; write 3, or 3:10 for 3 to 10")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write {last}:{first}")
    return first, last


def _print(opened: Run, steps: Steps, stream: TextIO, *, as_json: bool) -> int:
    from verl_profiler.analysis import ANALYSES
    from verl_profiler.report.findings import findings
    from verl_profiler.report.text import summary

    if steps is not None:
        check_steps(opened, steps)
    tables = {name: analysis(opened.tables, steps) for name, analysis in ANALYSES.items()}
    tables = {"findings": findings(tables), **tables}
    recorded = opened.rows("SELECT event, count(*) AS events FROM events GROUP BY event")
    about: dict[str, Any] = {
        "runs": opened.labels,
        "events": sum(row["events"] for row in recorded),
        "recorded": {row["event"] for row in recorded},
    }
    if as_json:
        about["recorded"] = sorted(about["recorded"])
        content = {"format": 1, **about, "tables": tables, "problems": opened.problems}
        json.dump(content, stream, indent=1, default=str)
        stream.write("\n")
    else:
        if not tables["step_times"]:
            print("\n".join(["nothing to report:", *opened.problems]), file=sys.stderr)
            return 1
        stream.write(summary(tables, about, opened.problems))
    return 0 if tables["step_times"] else 1


def check_steps(opened: Run, steps: tuple[int, int], option: str = "--step") -> None:
    """Refuse steps that the run does not have, and name those that it has."""
    known = [row["step"] for row in opened.rows("SELECT DISTINCT step FROM steps ORDER BY step")]
    if known and not any(steps[0] <= step <= steps[1] for step in known):
        wanted = str(steps[0]) if steps[0] == steps[1] else f"{steps[0]}:{steps[1]}"
        raise ReadingError(
            f"step {wanted} is not in this run; it has {known[0]} to {known[-1]}.\n"
            f"For example {option} {known[-1]}",
            "no-such-step",
        )
