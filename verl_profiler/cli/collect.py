"""Gather the captures of a run, also of one that died, and say what is missing and why.

Moves the reports that nsys or the torch profiler left in RUN/nsight/raw to
RUN/nsight/<role>_<rank>.step<N>.nsys-rep (or .json.gz), with a .json of whose they are.  A run does
this itself at its end; use this command after a run that was killed.  Reports on disks of other
nodes come with --ray, while the cluster is up; without Ray, use the command on each node.

Processes of nsys that outlived the run on this machine are named, and ended with --end-left-over;
nothing is done to those of other runs, or of processes that still train.

Exit status 0: every capture is there.  1: some are missing; the lines say which and why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from verl_profiler.cli.output import print_json
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown, visible

__all__ = ["add_arguments", "run"]

# Other nodes may have to start a process first.
_FETCH_S = 30.0


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
        "--ray",
        action="store_true",
        help="also bring the reports of the other nodes of the running Ray cluster",
    )
    parser.add_argument(
        "--end-left-over",
        action="store_true",
        help="after the wait, end the processes of nsys that outlived this run on this machine",
    )
    parser.add_argument(
        "--export",
        action="store_true",
        help="also export each nsys report to SQLite, which `captures` reads; needs nsys",
    )
    parser.add_argument("--json", action="store_true", help="print the captures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was gathered; return 1 if something is missing."""
    from verl_profiler.capture import gather

    if not args.directory.is_dir():
        raise ReadingError(
            f"{args.directory} does not exist, or is not a directory.", "no-such-run"
        )
    fetch = gather.Fetch(args.directory) if args.ray else None
    with _cluster() if args.ray else contextlib.nullcontext():
        captures = gather.collect(
            args.directory, patience_s=args.wait, fetch=fetch, fetch_s=_FETCH_S
        )
    lines = _left_over(args.directory, ending=args.end_left_over)
    if lines and args.end_left_over:
        # Asked to end, an agent may have written what it had.
        captures = gather.collect(args.directory)
    if args.export:
        from verl_profiler.reading.formats.nsys_export import export

        for capture in captures:
            if capture.file and capture.tool == "nsys" and not capture.problem:
                export(args.directory / "nsight" / capture.file)
    if args.json:
        print_json([asdict(capture) for capture in captures])
    else:
        for capture in captures:
            if capture.file:
                print(visible(f"{capture.size_bytes / 1e6:8.1f} MB  {capture.file}"))
        print("\n".join(shown(gather.account(captures))))
    for line in [*(fetch.account() if fetch is not None else ()), *lines]:
        print(visible(line), file=sys.stderr if args.json else sys.stdout)
    return 1 if any(capture.problem for capture in captures) else 0


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    """Join the running Ray cluster."""
    try:
        import ray

        ray.init(address="auto", log_to_driver=False)
    except (ImportError, ConnectionError) as error:
        raise ReadingError(
            f"There is no running Ray cluster to join: {error}.\nSet RAY_ADDRESS, or leave --ray out "
            "and use this command on each node.",
            "no-cluster",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _left_over(run: Path, *, ending: bool) -> list[str]:
    """Return a line per process of nsys that outlived the run here, ended or not."""
    from verl_profiler.capture import gather, nsys_processes

    raw = gather.raw_of(run)
    if ending:
        return [f"ended {tool.label}" for tool in nsys_processes.end(run, raw)]
    return [
        f"WARNING nsys outlived the run: {tool.label}. It may still be writing: wait with --wait 60; "
        "end it with --end-left-over. (left-over)"
        for tool in nsys_processes.tools_of(run, raw)
        if not tool.in_use
    ]
