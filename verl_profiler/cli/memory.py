"""Report memory by phase, time in sleep and wake, and what releases freed.

verl-profiler memory logs/my-run
verl-profiler memory logs/my-run --steps 10:20 --json
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from verl_profiler.cli.options import add_cache, add_runs, add_steps, check_steps
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.render.visible import shown

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_runs(parser)
    add_steps(parser)
    parser.add_argument("--json", action="store_true", help="print all tables as one JSON object")
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Print the memory report; return 0, or 1 if no memory was recorded.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.analysis import memory
    from verl_profiler.reading.reader import load
    from verl_profiler.views.memory_text import memory_text

    with load(args.runs, cache=not args.no_cache) as opened:
        check_steps(opened, args.steps)
        content: dict[str, Any] = {
            "format": 2,
            "runs": opened.labels,
            "findings": memory.memory_findings(opened.tables, args.steps, launches=opened.launches),
            "tables": {
                ask.__name__: ask(opened.tables, args.steps)
                for ask in (
                    memory.memory_timeline,
                    memory.sleep_times,
                    memory.release_effects,
                )
            },
            "problems": opened.problems,
        }
    empty = not any(content["tables"].values())
    if args.json:
        kept, left_out = bounded(content["tables"])
        print_json({**content, "tables": kept, "left_out": left_out})
    elif empty:
        hint = (
            "nothing to report: no memory was recorded. A run records it unless profiler.events.exclude "
            "has memory."
        )
        print_error(hint, *content["problems"])
    else:
        sys.stdout.write(memory_text(shown(content)))
    return 1 if empty else 0
