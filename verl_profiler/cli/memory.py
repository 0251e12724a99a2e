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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import add_cache, add_runs_or_logs, add_steps, check_steps
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.reading.formats.console_log import is_log_file
from verl_profiler.reading.formats.registry import is_run
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.reading.reader import Run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_runs_or_logs(parser)
    add_steps(parser)
    parser.add_argument("--json", action="store_true", help="print all tables as one JSON object")
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Print the memory report; return 0, or 1 if no memory was recorded.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.analysis import memory
    from verl_profiler.views.memory_text import memory_text

    with ExitStack() as stack:
        tables, about, launches = _open(args.paths, not args.no_cache, stack)
        if "run" in about:
            check_steps(about["run"], args.steps)
        content: dict[str, Any] = {
            "format": 2,
            "runs": about["runs"],
            "findings": memory.memory_findings(tables, args.steps, launches=launches),
            "tables": {
                ask.__name__: ask(tables, args.steps)
                for ask in (
                    memory.memory_timeline,
                    memory.sleep_times,
                    memory.release_effects,
                )
            },
            "problems": about["problems"],
        }
    empty = not any(content["tables"].values())
    if args.json:
        kept, left_out = bounded(content["tables"])
        print_json({**content, "tables": kept, "left_out": left_out})
    elif empty:
        why_not = content["problems"] if "run" not in about else ()
        hint = "A run records it unless profiler.events.exclude has memory."
        print_error("nothing to report: no memory was recorded.", *(why_not or (hint,)))
    else:
        sys.stdout.write(memory_text(shown(content)))
    return 1 if empty else 0


def _open(paths: Sequence[Path], cache: bool, stack: ExitStack) -> tuple[Any, dict[str, Any], Any]:
    """Open runs, or read console logs; the two cannot be combined."""
    logs = [path for path in paths if _is_log(path)]
    if logs and len(logs) < len(paths):
        raise ReadingError(
            f"{logs[0]} is a console log, and {next(p for p in paths if p not in logs)} is a run.\n"
            "Use one command for each.",
            "runs-and-logs",
        )
    if logs:
        from verl_profiler.reading.formats.console_memory import read_logs

        tables, problems = read_logs(logs)
        names = [row["run"] for row in tables.rows("SELECT DISTINCT run FROM memory ORDER BY run")]
        return tables, {"runs": names, "problems": problems}, {}
    from verl_profiler.reading.reader import load

    opened: Run = stack.enter_context(load(list(paths), cache=cache))
    about = {"runs": opened.labels, "problems": opened.problems, "run": opened}
    return opened.tables, about, opened.launches


def _is_log(path: Path) -> bool:
    return is_log_file(path) and not is_run(path)
