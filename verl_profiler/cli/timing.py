"""Plot the timers in console logs of verl, and summarize them.

    verl-profiler timing train.log
    verl-profiler timing logs/my-run
    verl-profiler timing first.log.gz resumed.log --out figures
    zcat old.log.gz | verl-profiler timing - --json

Reads logs of verl 0.3 to 0.9 (consoles, or the metrics of its file logger, W&B
or MLflow), or a run directory with its console.log; several are read as one in
the order given. Writes five figures to the folder plot next to the log.
Figures that it wrote for the same log are replaced, so that it can be run
again while the log grows; other files are not, unless --force is given.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.cli.logs import opened
from verl_profiler.cli.options import STEPS, Argument, output_arguments
from verl_profiler.cli.output import (
    csv_text,
    give,
    json_text,
    refuse_overwriting,
    replacing,
)
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.reading.formats.console_log import CONSOLE
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from verl_profiler.reading.formats.console_steps import LoggedRun

_FOLDER = "plot"

ARGUMENTS = (
    Argument(
        "logs",
        metavar="LOG",
        nargs="+",
        type=Path,
        help="console log, also compressed with gzip; - for standard input; or a run directory "
        f"with its {CONSOLE}",
    ),
    *output_arguments(
        "folder for the figures (default: plot, next to the log), or the file for --json or --csv "
        "(default: the terminal)",
        "--output-dir",
    ),
    STEPS,
    (
        Argument("--json", action="store_true", help="print the numbers as JSON"),
        Argument("--csv", action="store_true", help="print one line per step as CSV"),
        Argument(
            "--spec",
            action="store_true",
            help="write Vega-Lite specifications (NAME.vl.json), to be restyled, instead of figures",
        ),
    ),
)


def run(args: argparse.Namespace) -> int:
    """Write the pictures and the summary; return 0, or 1 when no log has timers."""
    args.logs = [_log_of(path) for path in args.logs]
    runs, ends, problems = opened(args.logs, args.steps)
    if not runs:
        print_error(*(ends or ("nothing to plot:", *problems)))
        return 1
    if args.json or args.csv:
        text = _as_json(runs, ends, problems) if args.json else _as_csv(runs)
        give(text, args.out, force=args.force)
        return 0
    _draw(runs, args)
    print("".join(f"\n{visible(end)}\n" for end in ends), end="")
    if problems:
        from verl_profiler.views.text_tables import warnings

        print(f"\n{warnings(problems)}")
    return 0


def _draw(runs: Sequence[LoggedRun], args: argparse.Namespace) -> None:
    """Write the pictures of each run and print its statistics."""
    from verl_profiler.render.charts import SPEC, check_installed, render

    check_installed()
    from verl_profiler.analysis.log_findings import log_findings
    from verl_profiler.views.log_text import beyond, log_changes, run_facts, summary_block
    from verl_profiler.views.timing_figures import PICTURES
    from verl_profiler.views.view import NothingToDraw

    form = SPEC if args.spec else "png"
    folders = _folders(runs, args.out)
    for run, folder in zip(runs, folders, strict=True):
        refuse_overwriting(
            *(folder / f"{name}.{form}" for name in PICTURES),
            force=args.force,
            mark=f"Description\0{_mark(run)}".encode("latin-1", "replace"),
            because=", and was not written by this command from the same log",
        )
    print(visible(f"Parsing log file: {', '.join(map(str, args.logs))}"))
    for run, folder in zip(runs, folders, strict=True):
        print(f"\nRun {visible(run.label)}" if len(runs) > 1 else "", end="\n" * (len(runs) > 1))
        print(f"Found {len({name for line in run.lines for name in line.values})} metrics")
        print("\n".join(map(visible, run_facts(run))))
        print(f"Output directory: {visible(str(folder))}\n\nGenerating plots...")
        for name, picture in PICTURES.items():
            path = folder / f"{name}.{form}"
            try:
                figure = render(picture(run), form, description=_mark(run))
            except NothingToDraw as reason:
                print(visible(f"Not drawn: {path}: {reason}"))
                continue
            with replacing(path) as file:
                file.write(figure)
            print(visible(f"Saved: {path}"))
        print(f"\n{summary_block(run)}\n\nAll plots saved to: {visible(str(folder))}")
        changes = log_changes(run, log_findings(run))
        print("\n".join(["", *changes, beyond(runs)]))


def _folders(runs: Sequence[LoggedRun], out: Path | None) -> list[Path]:
    """Return the folder of each run; runs that would share one get a folder each inside it."""
    beside = [run.source.parent if os.path.isfile(run.source) else Path() for run in runs]
    folders = [(out or folder / _FOLDER).resolve() for folder in beside]
    shared = Counter(folders)
    return [
        folder / run.label if shared[folder] > 1 else folder
        for run, folder in zip(runs, folders, strict=True)
    ]


def _mark(run: LoggedRun) -> str:
    return f"verl-profiler timing {run.label}"


def _log_of(path: Path) -> Path:
    """Return the console log of a run directory; any other path as it is."""
    # pathlib raises for a name that is too long.
    if not os.path.isdir(path):
        return path
    log = path / CONSOLE
    if not log.is_file():
        raise ReadingError(
            f"{path} is a directory without a {CONSOLE}.\n"
            "Name the file that verl's output was written to",
            "no-console-log",
        )
    return log


def _as_json(runs: Sequence[LoggedRun], ends: Sequence[str], problems: Sequence[str]) -> str:
    from verl_profiler.analysis import console_timers
    from verl_profiler.analysis.log_findings import log_findings, log_phases

    analyses = (
        console_timers.logged_steps,
        console_timers.logged_phases,
        console_timers.generation_times,
        console_timers.per_token_times,
        console_timers.metric_summary,
        log_phases,
    )
    content = {
        "format": 1,
        "runs": [
            {
                "label": run.label,
                "log": str(run.source),
                "launches_begin": list(run.begins),
                **{each.__name__: each(run) for each in analyses},
                "findings": log_findings(run),
                "metrics": [{"step": line.step, **line.values} for line in run.lines],
            }
            for run in runs
        ],
        "ended": list(ends),
        "problems": list(problems),
    }
    return json_text(content)


def _as_csv(runs: Sequence[LoggedRun]) -> str:
    """Write a line per step: what is known about it, then every metric as verl names it."""
    from verl_profiler.analysis.console_timers import logged_steps

    rows = [
        {"run": run.label, **row, **line.values}
        for run in runs
        for row, line in zip(logged_steps(run), run.lines, strict=True)
    ]
    return csv_text(rows)
