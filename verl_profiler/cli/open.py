"""Open a run's report, or its timeline in the Perfetto UI, in the browser.

    verl-profiler open logs/my-run
    verl-profiler open --perfetto logs/my-run --steps 3:5
    verl-profiler open --perfetto logs/my-run --ui https://perfetto.example.com

The report is written first, as by `verl-profiler report`.  --perfetto serves the timeline on this
machine's loopback address to the Perfetto UI in your browser; nothing is uploaded.  The command exits
when the page has loaded it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from verl_profiler.cli.options import add_cache, add_runs, add_steps
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

__all__ = ["add_arguments", "run"]

_PERFETTO = "https://ui.perfetto.dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_runs(parser)
    parser.add_argument(
        "--perfetto", action="store_true", help="open the timeline in the Perfetto UI instead"
    )
    parser.add_argument(
        "--ui",
        metavar="URL",
        default=_PERFETTO,
        help=f"another Perfetto UI (default: {_PERFETTO})",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address instead of opening it"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of the loopback address (default: any free one)"
    )
    add_steps(parser)
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Open the report or the timeline; return 0, or 1 if there is nothing to show.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    return _open_timeline(args) if args.perfetto else _open_report(args)


def _open_report(args: argparse.Namespace) -> int:
    from verl_profiler.cli import report

    written = report.write(args.runs, None, args.steps, force=False, cache=not args.no_cache)
    if written is None:
        return 1
    print(visible(f"Wrote {written}"))
    if args.no_browser or not _shown(written.absolute().as_uri()):
        print("Open that file in a browser; it is self-contained and can be copied.")
    return 0


def _open_timeline(args: argparse.Namespace) -> int:
    from verl_profiler.cli.export import write_timeline
    from verl_profiler.exports.hand_over import Server

    address: str = args.ui
    if urlsplit(address).scheme not in ("https", "http") or not urlsplit(address).netloc:
        raise ReadingError(
            f"--ui {args.ui} is not a web address.\nFor example --ui {_PERFETTO}",
            "option-value",
        )
    with tempfile.TemporaryDirectory(prefix="verl-profiler-") as folder:
        trace = Path(folder, "timeline.pftrace")
        if not write_timeline(args.runs, trace, args.steps, cache=not args.no_cache):
            return 1
        title = ", ".join(path.absolute().name for path in args.runs)
        with Server(trace, title, args.ui, args.port) as server:
            if args.no_browser or not _shown(server.address):
                port = urlsplit(server.address).port
                print("Open in a browser on this machine (Ctrl-C to stop):", server.address)
                print(f"From another machine, first: ssh -L {port}:127.0.0.1:{port} THIS_HOST")
            else:
                print("Waiting for the browser (Ctrl-C to stop):", server.address)
            sys.stdout.flush()
            if not server.wait():
                raise ReadingError(
                    "no browser loaded the timeline within 10 minutes.\n"
                    "verl-profiler export perfetto RUN writes it to a file", "not-taken",
                )  # fmt: skip
    print(visible(f"The Perfetto UI has loaded the timeline of {title}."))
    return 0


def _shown(address: str) -> bool:
    """Open an address in a graphical browser; return False if there is none."""
    import webbrowser

    graphical = sys.platform != "linux" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    try:
        return graphical and webbrowser.open(address)
    except webbrowser.Error:
        return False
