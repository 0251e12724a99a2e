"""Write a report: one self-contained HTML file that works offline.

    verl-profiler report logs/my-run
    verl-profiler report logs/my-run --open
    verl-profiler report logs/my-run --steps 3:10 --out steps-3-to-10.html
    verl-profiler report train.log
    verl-profiler report logs

Of a folder of runs, the page lists them with a link to a report of each; those
that are missing are written, with --force all of them.

The file loads nothing from the network. A report that this command wrote is
replaced; any other file is not, unless --force is given.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import READING, Argument, check_steps, output_arguments
from verl_profiler.cli.output import target_of, write_whole
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown, visible

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Steps

__all__ = ["ARGUMENTS", "run", "write", "write_report"]

# In the head of every report: page/report.html.
_MARK = b'<meta name="generator" content="verl-profiler report">'

ARGUMENTS = (
    *READING,
    *output_arguments("the file to write (default: RUN/report.html)"),
    Argument("--open", action="store_true", dest="show", help="open the report in the browser"),
)


def run(args: argparse.Namespace) -> int:
    """Write the report; return 0, or 1 if there is nothing to report."""
    written = write(
        args.runs,
        args.out,
        args.steps,
        force=args.force,
        cache=not args.no_cache,
    )
    if written is None:
        return 1
    print(visible(f"Wrote {written}"))
    if args.show and not _shown(written.absolute().as_uri()):
        print("There is no graphical browser here; the file is self-contained and can be copied.")
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


def write_report(run_dir: Path, out: Path | None = None, force: bool = False) -> Path:
    """Write the report of a run; return its path.

    Args:
        run_dir: The run.
        out: The file to write; None for `report.html` in the run.
        force: Replace the file if it exists.

    Raises:
        ReadingError: There is nothing to report, or the file cannot be written.
    """
    written = write([run_dir], out, None, force=force, cache=True)
    if written is None:
        raise ReadingError(f"{run_dir} has no events to report", "no-events")
    return written


def write(
    runs: Sequence[Path],
    out: Path | None,
    steps: Steps,
    *,
    force: bool,
    cache: bool,
) -> Path | None:
    """Write the report of runs; return where it is, or None when there is nothing to report.

    Raises:
        ReadingError: The paths cannot be used, or another file is in the way.
    """
    from verl_profiler.cli.logs import are_logs

    if are_logs(runs):
        return _write_of_logs(runs, out, steps, force=force, cache=cache)
    from verl_profiler.cli.runs import runs_in

    if len(runs) == 1 and steps is None and runs[0].is_dir() and len(runs_in(runs[0])) > 1:
        # A folder of several runs, not a run or the folder of one.
        return _write_list(runs[0], out, force=force, cache=cache)
    import msgspec

    from verl_profiler.launch.settings import Settings
    from verl_profiler.reading.reader import load
    from verl_profiler.views.report_page import page
    from verl_profiler.views.sections import document

    target = target_of(runs, out, "report.html", force=force, mark=_MARK)
    with load(runs, cache=cache, steps=steps) as opened:
        check_steps(opened, steps)
        gathered = document(opened, steps, msgspec.to_builtins(Settings(output_dir="")))
        difference = _difference(opened.labels, runs, steps, cache=cache)
    if not gathered["steps"]["rows"]:
        print_error("nothing to report:", *gathered["problems"])
        return None
    write_whole(target, [page(gathered, made=_made(), difference=difference)])
    return target


def _write_of_logs(
    paths: Sequence[Path], out: Path | None, steps: Steps, *, force: bool, cache: bool
) -> Path | None:
    """Write the report of logs: what their timers show, and what ended them."""
    from verl_profiler.analysis.log_findings import log_findings
    from verl_profiler.cli.logs import opened
    from verl_profiler.views.log_page import log_document
    from verl_profiler.views.report_page import page

    beside = [paths[0] if os.path.isfile(paths[0]) else Path("stdin")]
    target = target_of(beside, out, "report.html", force=force, mark=_MARK)
    logged, ends, problems = opened(paths, steps)
    if not logged:
        print_error(*(ends or ("nothing to report:", *problems)))
        return None
    found = [row for each in logged for row in log_findings(each)]
    labels = [each.label for each in logged]
    difference = _difference(labels, paths, steps, cache=cache)
    content = log_document(logged, found, ends, problems)
    text = page(content, made=_made(), difference=difference)
    write_whole(target, [text])
    return target


def _write_list(folder: Path, out: Path | None, *, force: bool, cache: bool) -> Path:
    """Write the page that lists the runs of a folder, and the reports that it links to."""
    from urllib.parse import quote

    from verl_profiler.cli.runs import listed
    from verl_profiler.views.run_list import list_page

    target = target_of([folder], out, "report.html", force=force, mark=_MARK)
    rows = listed(folder, cache=cache)
    for path, row in rows.items():
        row["href"] = None
        try:
            report = target_of([path], None, "report.html", force=force, mark=_MARK)
            if row["problem"] is None and (force or not report.is_file()):
                write([path], None, None, force=force, cache=cache)
        except ReadingError as error:
            row["problem"] = str(error).partition("\n")[0]
        else:
            if report.is_file():
                row["href"] = quote(os.path.relpath(report, target.parent))
    newest_first = sorted(rows.values(), key=lambda row: row["launched"], reverse=True)
    write_whole(target, [list_page(folder.resolve().name, newest_first, made=_made())])
    return target


def _difference(
    labels: Sequence[str], runs: Sequence[Path], steps: Steps, *, cache: bool
) -> dict[str, Any] | str | None:
    """Return the comparison of both runs, or why there is none; None of a single run."""
    from verl_profiler.cli.diff import Side, comparison
    from verl_profiler.views.diff_text import diff_parts

    if len(labels) < 2:
        return None
    if len(labels) != len(runs) or len(runs) > 2:
        return (
            f"A report of two runs shows their difference; this one is of {len(labels)}. "
            "`verl-profiler diff A B` compares any two."
        )
    a, b = (Side(*each, steps) for each in zip(labels, runs, strict=True))
    try:
        return diff_parts(shown(comparison([a], [b], cache=cache)))
    except ReadingError as error:
        return f"Both runs cannot be compared: {visible(str(error))}"


def _made() -> str:
    from datetime import datetime, timezone

    from verl_profiler.cli import version

    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written by verl-profiler {version()} on {now}."
