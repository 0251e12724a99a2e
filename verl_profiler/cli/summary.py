"""Show where the time of a run went, and what to change first, in 20 lines.

    verl-profiler summary logs/my-run
    verl-profiler summary -v logs/my-run
    verl-profiler summary logs/my-run --step 5
    verl-profiler summary --follow logs/my-run
    verl-profiler summary logs/my-run logs/my-run-2 --json
    verl-profiler summary train.log

Of a console log or a file of metrics (verl's file logger, W&B, MLflow), the
timers are summarized. -v shows everything: all phases, findings with their
causes, warnings, and a line for each step. --follow refreshes the summary of a
running training until it ends, and waits for a run that does not exist yet.
NO_COLOR disables colors.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from verl_profiler.cli.options import JSON, READING, Argument, check_steps, opened_run
from verl_profiler.cli.output import bounded, json_text
from verl_profiler.cli.terminal import control, has_color, print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import escaped, shown, visible

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import LeftOut, Steps
    from verl_profiler.reading.reader import Run

ARGUMENTS = (
    *READING,
    Argument("-v", "--verbose", action="store_true", help="show findings and steps in full"),
    (
        JSON,
        Argument(
            "--follow", action="store_true", help="refresh the summary until the training ends"
        ),
    ),
)
# The shortest time between two readings; each waits so many times the CPU time of the last one.
_INTERVAL_S = 2.0
_REST = 5
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _HOME, _END_OF_LINE, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def run(args: argparse.Namespace) -> int:
    """Print the summary; return 0, or 1 if there is nothing to report."""
    from verl_profiler.cli.logs import are_logs, summarize_logs

    if args.follow:
        return _follow(args)
    if are_logs(args.runs):
        return summarize_logs(args.runs, steps=args.steps, as_json=args.json, verbose=args.verbose)
    if not args.json:
        for path in args.runs:
            _print_stuck(path)
    with opened_run(args) as opened:
        status = write_summary(
            opened,
            args.steps,
            sys.stdout,
            as_json=args.json,
            verbose=args.verbose,
            color=has_color(),
        )
        if status and not args.json:
            print_error("nothing to report:", *_doing(args.runs, opened), *opened.problems)
        return status


def _print_stuck(path: Path) -> None:
    """Begin with what a run is stuck on, or was when it was killed."""
    from verl_profiler.live.open_processes import ProcessFiles
    from verl_profiler.live.stuck import pointer

    line = pointer(ProcessFiles(path)) if os.path.isdir(path) else None
    if line is not None:
        print(escaped(line), end="\n\n")


def _doing(paths: Sequence[Path], opened: Run) -> Iterator[str]:
    """Yield what runs without a finished step do, if they go on, and what explains it."""
    from verl_profiler.live.open_processes import ProcessFiles
    from verl_profiler.live.present import present

    for path in filter(os.path.isdir, paths):
        now = present(ProcessFiles(path), opened.tables)
        if now.state in ("running", "killed"):
            yield f"{now.line(time.time())}; verl-profiler stuck {path} shows what it waits for"


def write_summary(
    opened: Run,
    steps: Steps,
    stream: TextIO,
    *,
    as_json: bool,
    verbose: bool = False,
    color: bool = False,
) -> int:
    """Write the summary of an opened run; return 0, or 1 if there is nothing to report."""
    from verl_profiler.analysis.overview import headline
    from verl_profiler.analysis.profiler import recorded_events
    from verl_profiler.analysis.registry import EXPLANATIONS, explained, summarized
    from verl_profiler.analysis.selection import left_out as without
    from verl_profiler.reading.progress import doing
    from verl_profiler.views.findings import finding_list
    from verl_profiler.views.overview_text import (
        TABLES,
        head_text,
        overview_text,
        summary,
        totals_text,
    )

    check_steps(opened, steps)
    # The text has the engine's times where there are no requests.
    of_text = [name for name in TABLES if name != "engine_times"]
    tables = summarized(opened.tables, steps, None if as_json or verbose else of_text)
    with doing("explanations"):
        why = explained(opened.tables, steps)
    tables |= {name: why[name] for name in EXPLANATIONS}
    found = why["findings"]
    warm_up = without(opened.tables, steps)
    recorded = recorded_events(opened.tables, steps)
    about: dict[str, Any] = {
        "runs": opened.labels,
        "events": sum(recorded.values()),
        "recorded": set(recorded),
        "notes": opened.notes,
    }
    if as_json:
        kept, left_out = bounded(tables | _totals(opened, steps, tables, warm_up))
        names, names_left_out = bounded({"recorded": sorted(about["recorded"])})
        content = {
            "format": 2,
            **about,
            **names,
            "headline": headline(tables["step_times"], why["bubble_ledger"], warm_up),
            "findings": found,
            "tables": kept,
            "left_out": left_out | names_left_out,
            "problems": opened.problems,
        }
        stream.write(json_text(content))
    else:
        if not tables["step_times"]:
            return 1
        rows = {**tables, **_totals(opened, steps, tables, warm_up)}
        rows["device_use"] = why["device_use"]
        rows = shown({name: rows[name] for name in TABLES})
        tables, found, about, problems = shown((tables, found, about, opened.problems))
        if verbose:
            about["head"] = head_text(rows, about["runs"], warm_up, found)
            about["findings"] = finding_list(found, warm_up)
            about["totals"] = totals_text(rows, about["runs"], warm_up)
            stream.write(summary(tables, about, problems))
        else:
            text = overview_text(rows, about, found, problems, warm_up, color=color)
            (control if color else stream.write)(text)
    return 0 if tables["step_times"] else 1


def _totals(opened: Run, steps: Steps, tables: dict[str, Any], warm_up: LeftOut) -> dict[str, Any]:
    from verl_profiler.analysis.engine import engine_times
    from verl_profiler.analysis.overview import own_spans, phase_totals, request_totals
    from verl_profiler.analysis.tools import tool_latencies
    from verl_profiler.analysis.workers import worker_balance

    requests = request_totals(opened.tables, steps)
    totals = {
        "phase_totals": phase_totals(tables["step_phases"], left_out=warm_up),
        "request_totals": requests,
        "tool_latencies": tool_latencies(opened.tables, steps),
        "own_spans": own_spans(opened.tables, steps),
        # Shown where there are no requests.
        "worker_balance": [] if requests else worker_balance(opened.tables, steps),
    }
    if "engine_times" not in tables:
        totals["engine_times"] = [] if requests else engine_times(opened.tables, steps)
    return totals


def _follow(args: argparse.Namespace) -> int:
    """Show what `summary` prints below the present step and phase until the run ends; once if not on a terminal.

    Reads the run again every few seconds: less often if reading takes long, so that it uses at most 20 % of
    a core.  Waits for a run that does not exist yet.
    """
    from verl_profiler.reading.progress import watched
    from verl_profiler.reading.remote import is_downloaded

    if len(args.runs) > 1 or args.steps is not None or args.verbose:
        raise ReadingError(
            "--follow shows the summary of one run as a whole.\nOmit -v, --steps and the other runs",
            "option-not-heeded",
        )
    path = args.runs[0]
    once = not sys.stdout.isatty()
    if (not os.path.isdir(path) and (once or os.path.lexists(path))) or is_downloaded(path):
        raise ReadingError(
            f"{path} is not a directory that a run writes; --follow needs the run directory itself.\n"
            "For example logs/my-run",
            "no-such-run",
        )
    followed = _Followed(path, once=once)
    if once:
        followed.read()
        print("\n".join(followed.lines()))
        return 0 if followed.text else 1
    try:
        control(_HIDE_CURSOR + _CLEAR)
        # The screen has no place for lines on progress.
        with watched(None):
            _refresh(followed)
    finally:
        control(f"{_SHOW_CURSOR}\n")
    return 0


class _Followed:
    """What was read of a run last.

    Attributes:
        heads: What it did then, and what is wrong with it; empty while there is none.
        text: Its summary; empty while there is none.
        has_ended: The trainer had ended.
    """

    def __init__(self, path: Path, *, once: bool) -> None:
        self._path, self._once = path, once
        # The files of the cache that the next reading replaces.
        self._made: set[str] = set()
        self._problem = "reading …"
        self.heads: list[str] = []
        self.text = ""
        self.has_ended = False

    def read(self) -> None:
        """Read the run.

        Raises:
            ReadingError: It cannot be read.
            OSError: Likewise.
        """
        from verl_profiler.live.open_processes import ProcessFiles
        from verl_profiler.live.present import present
        from verl_profiler.reading.discovery import run_directory
        from verl_profiler.reading.reader import load

        stream = io.StringIO()
        with load(self._path) as opened:
            try:
                now = present(ProcessFiles(run_directory(self._path, self._path)), opened.tables)
                empty = write_summary(opened, None, stream, as_json=False)
                self._problem = "; ".join(["nothing to report yet", *opened.problems]) * empty
            except BaseException:
                self._made |= opened.supersede(set())
                raise
            self._made = opened.supersede(self._made)
        read = "" if self._once else f"; read at {time.strftime('%H:%M:%S')}"
        self.heads = [now.line(time.time()) + read, now.alarm or ""]
        self.text, self.has_ended = stream.getvalue(), now.state == "ended"

    def try_to_read(self) -> None:
        """Read the run; while it does not exist yet, or changes too quickly, keep what was read before."""
        import duckdb

        try:
            self.read()
        except (ReadingError, OSError, duckdb.IOException) as error:
            what = "cannot be read now" if self.heads else "waiting for the run"
            self._problem = f"{what}: {error}".partition("\n")[0]
            self.has_ended = False

    def lines(self) -> list[str]:
        """Return the screen."""
        lines = [visible(line) for line in (*self.heads, self._problem) if line]
        return [*lines, "", *self.text.splitlines()] if self.text else lines


def _refresh(followed: _Followed) -> None:
    _draw(followed)
    while True:
        before, begin_s = followed.text, time.process_time()
        followed.try_to_read()
        spent_s = time.process_time() - begin_s
        _draw(followed)
        # What the last processes wrote is there when nothing changes any more.
        if followed.has_ended and followed.text == before:
            return
        time.sleep(max(_INTERVAL_S, _REST * spent_s))


def _draw(followed: _Followed) -> None:
    columns, rows = shutil.get_terminal_size((80, 24))
    # The last line stays empty, so that the terminal never scrolls.
    lines = [line[:columns] for line in followed.lines()[: rows - 1]]
    control(_HOME + f"{_END_OF_LINE}\r\n".join(lines) + _END_OF_LINE + _BELOW)
