"""List the slowest requests, or show one request from start to finish.

    verl-profiler requests logs/my-run --step 5 --slowest 20
    verl-profiler requests logs/my-run --worker 2
    verl-profiler requests logs/my-run --request 1a4bf2c0

--request takes a full id or a prefix. In a terminal, columns that do not fit
are left out; a pipe gets all.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import READING, WORKER, Argument, check_worker, opened_run
from verl_profiler.cli.output import print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.reading.reader import Run

ARGUMENTS = (
    *READING,
    WORKER,
    Argument("--slowest", metavar="COUNT", type=int, default=20, help="how many (default: 20)"),
    Argument(
        "--validate",
        action="store_true",
        help="list validation requests instead of training requests",
    ),
    Argument("--request", metavar="ID", help="show this request's turns and calls"),
    Argument("--json", action="store_true", help="print as JSON"),
)


def run(args: argparse.Namespace) -> int:
    """Print the list or the request; return 0, or 1 if there is none."""
    if args.slowest < 1:
        raise ReadingError(
            f"--slowest {args.slowest} is less than 1.\nFor example --slowest 20",
            "option-value",
        )
    with opened_run(args) as opened:
        check_worker(opened, args.worker)
        return _one(opened, args) if args.request else _list(opened, args)


_NOT_DETAILED = (
    "The details of this request (turns, engine calls, tools) were not recorded, only their sums: "
    "profiler.events.detail_share."
)


def _list(opened: Run, args: argparse.Namespace) -> int:
    from verl_profiler.analysis.requests import request_breakdown
    from verl_profiler.analysis.selection import rows_of
    from verl_profiler.views.request_text import request_table

    rows = request_breakdown(
        opened.tables,
        args.steps,
        worker=args.worker,
        validate=args.validate,
        count=args.slowest,
        each_run=False,
    )
    selection = rows_of(args.steps, worker=args.worker, validate=args.validate)
    counts: Any = opened.tables.row(
        "SELECT count(*) FILTER (finished) AS finished, count(*) FILTER (NOT finished) AS unfinished "
        f"FROM requests WHERE {selection}"
    )
    if args.json:
        content = {"format": 1, "runs": opened.labels, **counts, "requests": rows}
        print_json(content)
    elif rows:
        width = _width()
        print(request_table(shown(rows), counts, several=len(opened.labels) > 1, width=width))
    if not rows:
        kind = "validation" if args.validate else "training"
        print_error(f"nothing to report: no {kind} requests", *opened.notes)
        return 1
    return 0


def _one(opened: Run, args: argparse.Namespace) -> int:
    from verl_profiler.analysis.requests import request_breakdown, request_timeline
    from verl_profiler.views.request_text import request_lines

    found = request_breakdown(
        opened.tables,
        args.steps,
        worker=args.worker,
        validate=True if args.validate else None,
        request_id=args.request,
        count=None,
    )
    exact = [row for row in found if row["request_id"] == args.request]
    found = exact or found
    if not found:
        raise ReadingError(
            f"no request id starts with {args.request!r}.\n"
            "verl-profiler requests RUN lists the slowest requests with their ids",
            "no-such-request",
        )
    if len(found) > 1:
        listed = ", ".join(
            f"{row['request_id']} (step {row['step']}{', validation' if row['validate'] else ''})"
            for row in shown(found[:5])
        )
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ReadingError(
            f"{len(found)} request ids start with {args.request!r}: {listed}{more}.\n"
            "Give a longer prefix, or --step N, --worker N or --validate",
            "several-requests",
        )
    request = found[0]
    timeline = [
        row
        for row in request_timeline(
            opened.tables, request["request_id"], request["step"], validate=request["validate"]
        )
        if row["run"] == request["run"]
    ]
    if args.json:
        content = {"format": 1, "request": request, "timeline": timeline}
        print_json(content)
    else:
        print(request_lines(*shown((request, timeline)), width=_width()))
        if opened.rows(
            "SELECT 1 FROM requests WHERE run = ? AND step IS NOT DISTINCT FROM ? AND request_id = ? "
            "AND validate = ? AND NOT detailed",
            [request[key] for key in ("run", "step", "request_id", "validate")],
        ):
            print("\n" + _NOT_DETAILED)
    return 0


def _width() -> int | None:
    import shutil

    return shutil.get_terminal_size((110, 24)).columns if sys.stdout.isatty() else None
