"""List the runs of a folder: one line each, with its first finding.

    verl-profiler runs logs
    verl-profiler runs s3://bucket/runs --sort useful
    verl-profiler runs logs --only Qwen3-8B --json

A folder may hold run directories, folders of them, and archives. `report logs`
writes the same list as a page with links to a report of each run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from verl_profiler.cli.options import NO_CACHE, Argument, run_argument
from verl_profiler.cli.output import print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.text import clipped

# The column of each order, and whether large values come first.
_ORDERS = {
    "date": ("launched", True),
    "run": ("run", False),
    "step": ("step_mean_s", False),
    "useful": ("useful_share", True),
}

_FIGURES = (
    "steps",
    "step_mean_s",
    "useful_share",
    "finding",
    "gain",
    "recoverable_s",
    "problem",
)

ARGUMENTS = (
    Argument(
        "folders",
        metavar="FOLDER",
        nargs="+",
        type=run_argument,
        help="folder of runs, or its URL, such as s3://bucket/runs",
    ),
    Argument(
        "--sort",
        choices=_ORDERS,
        default="date",
        help="newest first (date, the default), by name (run), fastest first (step), or most useful "
        "device time first (useful)",
    ),
    Argument(
        "--only", metavar="TEXT", help="list only runs whose line or versions contain this text"
    ),
    Argument("--json", action="store_true", help="print the rows as one JSON object"),
    NO_CACHE,
)


def run(args: argparse.Namespace) -> int:
    """Print the list; return 0, or 1 if it is empty."""
    from verl_profiler.views.run_list import list_text

    rows = [
        row
        for folder in args.folders
        for row in listed(folder, cache=not args.no_cache, whole=len(args.folders) > 1).values()
    ]
    only = (args.only or "").casefold()
    kept = [
        row for row in rows if any(only in str(value or "").casefold() for value in row.values())
    ]
    column, descending = _ORDERS[args.sort]
    known = sorted(
        (row for row in kept if row[column]), key=lambda row: row[column], reverse=descending
    )
    kept = known + [row for row in kept if not row[column]]
    if args.json:
        print_json({"format": 1, "runs": kept})
    elif kept:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1_000
        print("\n".join(clipped(line, width) for line in list_text(kept, width)))
    else:
        print_error(f"nothing to list: none of {len(rows)} runs has {args.only!r} in its line")
    return 0 if kept else 1


def listed(folder: Path, *, cache: bool, whole: bool = False) -> dict[Path, dict[str, Any]]:
    """Return the rows of a folder's runs by path (`run_row`).

    Args:
        folder: Of the runs.
        cache: As in `load`.
        whole: Names have the folder, too.

    Raises:
        ReadingError: It cannot be read, or holds no runs.
    """
    from verl_profiler.reading.progress import doing

    paths = runs_in(folder)
    if not paths:
        raise ReadingError(
            f"{folder} holds no runs.\nName the folder of runs, such as logs", "no-events"
        )
    rows: dict[Path, dict[str, Any]] = {}
    for path in paths:
        above = folder.parent if path == folder else folder
        name = str(path if whole else path.relative_to(above))
        with doing(f"run {name}"):
            rows[path] = run_row(path, name, cache=cache)
    return rows


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories and archives in a folder, at most one folder deep, or the run that it is.

    Raises:
        ReadingError: It cannot be listed.
    """
    from verl_profiler.reading.discovery import is_run_directory, runs_below

    try:
        return [folder] if is_run_directory(folder) else runs_below(folder)
    except OSError as error:
        raise ReadingError(
            f"{folder} cannot be read: {error.strerror}.\nName a folder of runs, such as logs",
            "unreadable",
        ) from error


def run_row(path: Path, name: str, *, cache: bool) -> dict[str, Any]:
    """Return a run as a row.

    Args:
        path: Of the run.
        name: What `run` shows.
        cache: As in `load`.

    Returns:
        run, launched, devices, model, batch, versions (texts, empty where not recorded); steps,
        step_mean_s and useful_share, as `headline`; finding, gain (in a word) and recoverable_s of the
        first finding; problem: why there are none of these.  What is not known is None.
    """
    from verl_profiler.analysis.launches import launch_facts
    from verl_profiler.analysis.overview import headline
    from verl_profiler.analysis.registry import explained
    from verl_profiler.analysis.selection import left_out
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.reading.reader import load
    from verl_profiler.views.findings import finding_texts

    row: dict[str, Any] = {"run": name, **launch_facts({}), **dict.fromkeys(_FIGURES)}
    try:
        with load(path, cache=cache) as opened:
            for launch in opened.launches.values():
                row |= launch_facts(launch)
            why = explained(opened.tables)
            totals = headline(
                step_times(opened.tables), why["bubble_ledger"], left_out(opened.tables)
            )
    except ReadingError as error:
        return row | {"problem": str(error).partition("\n")[0]}
    if not totals:
        return row | {"steps": 0, "problem": "no step has finished"}
    row |= {name: totals[0][name] for name in ("steps", "step_mean_s", "useful_share")}
    first = next(iter(why["findings"]), None)
    if first is not None:
        row |= {
            "finding": first["message"],
            "gain": finding_texts([first])[0]["brief"],
            "recoverable_s": first["recoverable_s"],
        }
    return row
