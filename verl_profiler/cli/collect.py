"""Gather the event files and captures of a run, and list what is missing and why.

Moves the reports that nsys or the torch profiler left in RUN/nsight/raw to
RUN/nsight/<role>_<rank>.step<N>.nsys-rep (or .json.gz), with their metadata in
a .json. A run does this itself at its end; use this command after a run that
was killed. --ray also copies event files and reports from the disks of other
nodes, while the cluster is up; without Ray, run the command on each node for
its reports. --to uploads the run to object storage, or the rest of an upload
that failed.

Exit status 0: every node sent its events, and every capture has a report.
1: some are missing; the output lists which and why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verl_profiler.cli.options import Argument
from verl_profiler.cli.output import print_json
from verl_profiler.errors import ReadingError
from verl_profiler.events.redaction import problem_of, public
from verl_profiler.events.vocabulary import RUN_FILE
from verl_profiler.render.visible import shown, visible
from verl_profiler.units import size

if TYPE_CHECKING:
    from verl_profiler.capture.record import CaptureRecord

# Other nodes may have to start a worker process first.
_FETCH_S = 30.0
_START_S = 60.0

ARGUMENTS = (
    Argument("directory", metavar="RUN", type=Path, help="the run directory"),
    Argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait this long for reports that are still being written",
    ),
    Argument(
        "--ray",
        action="store_true",
        help="also copy the event files and reports of the other nodes of the running Ray cluster",
    ),
    Argument(
        "--to",
        metavar="URL",
        help="then upload the run, for example to s3://bucket/runs/my-run; continues an upload that ended",
    ),
    Argument(
        "--export",
        action="store_true",
        help="also export each nsys report to SQLite, which the report reads; needs nsys",
    ),
    Argument("--json", action="store_true", help="print the captures as JSON"),
)


def run(args: argparse.Namespace) -> int:
    """Print what was gathered; return 1 if something is missing."""
    from verl_profiler.capture import gather, tools
    from verl_profiler.reading.executors import executor

    # pathlib raises for a name that is too long.
    if not os.path.isdir(args.directory):
        raise ReadingError(
            f"{args.directory} does not exist, or is not a directory.\n"
            "Name the run directory, such as logs/my-run",
            "no-such-run",
        )
    fetch = gather.Fetch(args.directory) if args.ray else None
    problems: list[str] = []
    captures: list[CaptureRecord] = []
    with executor("--ray") if args.ray else contextlib.nullcontext():
        if args.ray:
            problems = _ship(args.directory, sys.stderr if args.json else sys.stdout)
        captured = (args.directory / "nsight").is_dir()
        if captured or not (args.ray or args.to or (args.directory / RUN_FILE).is_file()):
            captures = gather.collect(
                args.directory, patience_s=args.wait, fetch=fetch, fetch_s=_FETCH_S
            )
    if args.export:
        for capture in captures:
            tool = tools.find(capture.tool)
            if capture.file and tool is not None and not capture.problem:
                tool.export(args.directory / "nsight" / capture.file)
    if args.json:
        print_json([asdict(capture) for capture in captures])
    else:
        for capture in captures:
            if capture.file:
                print(visible(f"{size(capture.size_bytes):>10}  {capture.file}"))
        if captured:
            print("\n".join(shown(gather.account(captures))))
        elif not (args.ray or args.to):
            print(
                "This run has no captures (trainer.profile_steps requests them); nothing to gather."
            )
    for line in fetch.account() if fetch is not None else ():
        print(visible(line), file=sys.stderr if args.json else sys.stdout)
    if args.to:
        problems += _upload(args.directory, args.to, sys.stderr if args.json else sys.stdout)
    return 1 if problems or any(capture.problem for capture in captures) else 0


def _ship(run: Path, stream: TextIO) -> list[str]:
    """Copy what the event files of other nodes have gained; print what came, return the problems."""
    import ray

    from verl_profiler.nodes.rounds import Nodes

    nodes = Nodes(ray, run)
    problems = nodes.finish(_START_S)
    for host, size_bytes in nodes.sent():
        print(visible(f"{size(size_bytes):>10}  of events came from {host}"), file=stream)
    for problem in problems:
        print(visible(f"WARNING {problem} (not-shipped)"), file=stream)
    return problems


def _upload(run: Path, url: str, stream: TextIO) -> list[str]:
    """Upload what is not there; print how much that was, return what failed."""
    from verl_profiler.events.remote import RemoteError
    from verl_profiler.storage.upload import Upload

    try:
        upload = Upload(url, run)
        other = upload.holds_run_of()
        if not other:
            upload.resume()
            upload.write_account()
    except RemoteError as error:
        raise ReadingError(str(error), "remote-run") from None
    except Exception as error:
        raise ReadingError(
            f"{public(url)} cannot be used: {problem_of(error)}.\nCheck the URL, the credentials in "
            "the environment and the endpoint",
            "remote-run",
        ) from error
    if other:
        raise ReadingError(
            f"{public(url)} holds another run, launched {other}.\nName another folder",
            "output-exists",
        )
    failed = upload.finish()
    print(visible(f"{size(upload.size_bytes):>10}  in {upload.files} files uploaded"), file=stream)
    for problem in failed:
        print(visible(f"WARNING not uploaded: {problem} (not-uploaded)"), file=stream)
    return failed
