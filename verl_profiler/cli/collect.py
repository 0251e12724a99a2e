"""Gather the captures of a run, also of one that died, and say what is missing and why.

Moves the reports that nsys or the torch profiler left in RUN/nsight/raw to
RUN/nsight/<role>_<rank>.step<N>.nsys-rep (or .json.gz), with a .json of whose they are.  A run does
this itself at its end; use this command after a run that was killed, or on each node that does not
share the run directory.

Exit status 0: every capture is there.  1: some are missing; the lines say which and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("directory", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for reports that nsys is still writing",
    )
    parser.add_argument(
        "--export",
        action="store_true",
        help="also export each nsys report to SQLite, which `captures` reads; needs nsys",
    )
    parser.add_argument("--json", action="store_true", help="print the captures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was gathered; return 1 if something is missing."""
    from verl_profiler import collecting
    from verl_profiler.errors import ReadingError

    if not args.directory.is_dir():
        raise ReadingError(
            f"{args.directory} does not exist, or is not a directory.", "no-such-run"
        )
    captures = collecting.collect(args.directory, patience_s=args.wait)
    if args.export:
        from verl_profiler.nsys_export import export

        for capture in captures:
            if capture.file and capture.tool == "nsys" and not capture.problem:
                export(args.directory / "nsight" / capture.file)
    if args.json:
        json.dump([asdict(capture) for capture in captures], sys.stdout, indent=2)
        print()
    else:
        for capture in captures:
            if capture.file:
                print(f"{capture.size_bytes / 1e6:8.1f} MB  {capture.file}")
        print("\n".join(collecting.account(captures)))
    return 1 if any(capture.problem for capture in captures) else 0
