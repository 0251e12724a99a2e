"""Runs of a folder, one row each: what was run, how long its steps take, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_profiler.analysis.overview import headline
from verl_profiler.analysis.registry import explained
from verl_profiler.analysis.selection import Rows, left_out
from verl_profiler.analysis.steps import step_times
from verl_profiler.errors import ReadingError
from verl_profiler.reading.discovery import is_run_directory, runs_below
from verl_profiler.reading.reader import load
from verl_profiler.render.text import align
from verl_profiler.render.visible import shown
from verl_profiler.units import seconds, share
from verl_profiler.views.about_run import launch_facts
from verl_profiler.views.findings import finding_texts

_FIGURES = (
    "steps",
    "step_mean_s",
    "useful_share",
    "finding",
    "gain",
    "recoverable_s",
    "problem",
)
# What a finding needs beside the columns.
_LEAST = 40
_TITLES = ("launched", "run", "model", "devices", "steps", "mean step", "useful", "first finding")


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories and archives in a folder, at most one folder deep, or the run that it is.

    Raises:
        ReadingError: It cannot be listed.
    """
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


def list_text(rows: Rows, width: int) -> list[str]:
    """Return the rows of `run_row` as the lines of a table; where it is narrow, findings are below their runs."""
    lines = [_TITLES, *map(_cells, shown(rows))]
    columns = align([line[:-1] for line in lines], left=(0, 1, 2, 3), indent="").split("\n")
    if len(columns[0]) + _LEAST <= width:
        return align(lines, left=(0, 1, 2, 3, 7), indent="").split("\n")
    return [
        part
        for pair in zip(columns, lines, strict=True)
        for part in (pair[0], f"    {pair[1][-1]}")
    ]


def list_page(folder: str, rows: Sequence[Mapping[str, Any]], *, made: str) -> str:
    """Return the page that lists runs.

    Args:
        folder: Its title.
        rows: Of `run_row`, each with `href`: its report's address, relative to the page; None for none.
        made: When and by which version, for the foot of the page.
    """
    # The list in a terminal needs no jinja2.
    from verl_profiler.render.html import digest, part, template, trusted

    style = part("report.css")
    return template("runs.html").render(
        title=folder,
        titles=_TITLES,
        rows=[(row["href"], _cells(each)) for row, each in zip(rows, shown(rows), strict=True)],
        made=made,
        style=trusted(style),
        policy=f"default-src 'none'; style-src '{digest(style)}'; img-src data:; base-uri 'none'",
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    gain = f"{row['gain']}: {row['finding']}" if row["finding"] else ""
    known = [each for each in (gain, row["problem"]) if each]
    return [
        row["launched"] or "-",
        row["run"],
        row["model"] or "-",
        row["devices"] or "-",
        "-" if row["steps"] is None else str(row["steps"]),
        seconds(row["step_mean_s"]),
        share(row["useful_share"]),
        " ".join(known) or "no single change is worth 3 % of a step",
    ]
