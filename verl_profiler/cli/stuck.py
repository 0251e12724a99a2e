"""Explain what a run waits for, from the trainer's phase down to the culprit.

    verl-profiler stuck logs/my-run
    verl-profiler stuck logs/my-run -v
    verl-profiler stuck logs/my-run --wait

Works while the run goes on and after it was killed. Reads the process headers
and open/*.json, which each process writes while something in it is open for
longer than profiler.stuck.after (60 s), and the evidence that all processes
write when a phase of the trainer is stuck.
Exits with 1 if the run is stuck, has failed, or cannot write, else 0; --wait
returns when the run is stuck or over.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.cli.options import Argument
from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.live.open_processes import Verdict

_EVERY_S = 5.0

ARGUMENTS = (
    Argument("run_directory", metavar="RUN", type=Path, help="run directory"),
    Argument(
        "-v", "--verbose", action="store_true", help="print the culprit's stack and the evidence"
    ),
    Argument("--json", action="store_true", help="print JSON instead of text"),
    Argument("--wait", action="store_true", help="wait until the run is stuck or over, then print"),
)


def run(args: argparse.Namespace) -> int:
    """Print what the run waits for; return 1 if somebody should look at it, else 0."""
    from verl_profiler.cli.output import print_json
    from verl_profiler.live.stuck import lines
    from verl_profiler.render.visible import escaped

    while True:
        found, problems = _read(args.run_directory)
        if not args.wait or found.state != "running":
            break
        time.sleep(_EVERY_S)
    if args.json:
        print_json({"format": 1, **dataclasses.asdict(found), "problems": problems})
    else:
        print("\n".join(escaped(line) for line in lines(found, verbose=args.verbose)))
        for problem in problems:
            print(escaped(f"Data quality: {problem}"))
    return int(found.is_alarm)


def _read(path: Path) -> tuple[Verdict, list[str]]:
    from verl_profiler.live.open_processes import ProcessFiles
    from verl_profiler.live.stuck import verdict
    from verl_profiler.reading.discovery import run_directory

    if not os.path.isdir(path):
        raise ReadingError(
            f"{path} is not a directory; stuck needs the run directory itself.\n"
            "For example logs/my-run",
            "no-such-run",
        )
    files = ProcessFiles(run_directory(path, path))
    found = verdict(
        files.headers(),
        files.open_files(),
        files.directory,
        evidence=files.evidence(),
    )
    return found, files.damaged
