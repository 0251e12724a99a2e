"""Report memory by phase, time in sleep and wake, and what releases freed.

    verl-profiler memory logs/my-run
    verl-profiler memory logs/my-run --steps 10:20 --json
    verl-profiler memory train.log

From a console log, it reads verl's own memory lines, which verl prints with
VERL_LOGGING_LEVEL=DEBUG.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from verl_profiler.cli.options import JSON, NO_CACHE, RUNS, STEPS, opened_run
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.render.visible import shown

ARGUMENTS = (RUNS, STEPS, JSON, NO_CACHE)


def run(args: argparse.Namespace) -> int:
    """Print the memory report; return 0, or 1 if no memory was recorded."""
    from verl_profiler.analysis import memory
    from verl_profiler.cli.logs import are_logs
    from verl_profiler.reading.formats.console_memory import read_logs
    from verl_profiler.views.memory_text import memory_text

    of_logs = are_logs(args.runs)
    with ExitStack() as stack:
        if of_logs:
            tables, problems = read_logs(args.runs)
            found = tables.rows("SELECT DISTINCT run FROM memory ORDER BY run")
            labels, launches = [row["run"] for row in found], {}
        else:
            opened = stack.enter_context(opened_run(args))
            tables, problems, labels = opened.tables, opened.problems, opened.labels
            launches = opened.launches
        content: dict[str, Any] = {
            "format": 2,
            "runs": labels,
            "findings": memory.memory_findings(tables, args.steps, launches=launches),
            "tables": {
                ask.__name__: ask(tables, args.steps)
                for ask in (
                    memory.memory_timeline,
                    memory.sleep_times,
                    memory.release_effects,
                )
            },
            "problems": problems,
        }
    empty = not any(content["tables"].values())
    if args.json:
        kept, left_out = bounded(content["tables"])
        print_json({**content, "tables": kept, "left_out": left_out})
    elif empty:
        hint = "A run records it unless profiler.events.exclude has memory."
        why_not = content["problems"] if of_logs else (hint,)
        print_error("nothing to report: no memory was recorded.", *why_not)
    else:
        sys.stdout.write(memory_text(shown(content)))
    return 1 if empty else 0
