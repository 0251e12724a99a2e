"""Draw one of the plots, or all of them, and print where they were written.

    verl-profiler plot --list
    verl-profiler plot request_duration_cdf logs/my-run
    verl-profiler plot slowest_requests logs/my-run --steps 5 --out slowest.svg
    verl-profiler plot all logs/my-run --out figures
    verl-profiler plot rollout_tail logs/my-run --json
    verl-profiler plot rollout_tail logs/my-run --spec

With --json or --csv the numbers behind the plot are printed instead, or
written to --out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import (
    add_cache,
    add_on,
    add_out,
    add_steps,
    check_worker,
    did_you_mean,
    opened_run,
    run_argument,
)
from verl_profiler.cli.output import (
    csv_text,
    give,
    json_text,
    refuse_overwriting,
    replacing,
    write_whole,
)
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_profiler.analysis.selection import Rows
    from verl_profiler.reading.reader import Run
    from verl_profiler.views.view import Choice, View

__all__ = ["add_arguments", "run"]

_FORMATS = ("png", "svg", "pdf")
_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a plot's name (see --list), or all"
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        type=run_argument,
        help="run directory, archive or URL of one, step folder or event file; several give a plot each",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the plots and the questions that they answer; with NAME, what "
        "that plot shows, what to conclude from it, and its columns",
    )
    add_steps(parser)
    parser.add_argument(
        "--worker", metavar="RANK", type=int, help="one agent-loop worker (default: all)"
    )
    parser.add_argument(
        "--validate", action="store_true", help="show validation instead of training"
    )
    add_out(
        parser, "the file to write, or a folder (default: NAME.FORMAT here; all: the folder plots)"
    )
    parser.add_argument(
        "--format", choices=_FORMATS, help="default: from the name of --out, or png", default=None
    )
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--json", action="store_true", help="print the numbers as JSON")
    numbers.add_argument(
        "--spec",
        action="store_true",
        help="write Vega-Lite specifications (NAME.vl.json), to be restyled, instead of pictures",
    )
    numbers.add_argument("--csv", action="store_true", help="print the numbers as CSV")
    add_cache(parser)
    add_on(parser)


def run(args: argparse.Namespace) -> int:
    """Write the plots; return 0, or 1 when there is nothing to draw.

    Raises:
        ReadingError: The arguments cannot be used, or a file is in the way (exit code 2).
    """
    from verl_profiler.views.questions import VIEWS

    if args.list and args.name is not None:
        from verl_profiler.views.reference import entry

        print("\n".join(map(entry, _chosen(VIEWS, args).values())))
        return 0
    if args.list:
        width = max(map(len, VIEWS))
        print("\n".join(f"{name.ljust(width)}  {view.question}" for name, view in VIEWS.items()))
        return 0
    chosen = _chosen(VIEWS, args)
    if not args.runs:
        raise ReadingError(
            f"no run was named.\nFor example verl-profiler plot {args.name} logs/my-run", "no-run"
        )
    with opened_run(args) as opened:
        check_worker(opened, args.worker)
        if args.json:
            return _write_json(opened, chosen, args)
        if args.csv:
            return _write_csv(opened, chosen, args)
        return _draw(opened, chosen, args)


def _chosen(views: Mapping[str, View], args: argparse.Namespace) -> dict[str, View]:
    """Return the plots to draw; refuse options that the chosen plot does not honor."""
    if args.name is None:
        raise ReadingError(
            "no plot was named.\nverl-profiler plot --list shows all of them", "no-such-plot"
        )
    given = {
        option: value
        for option, value in (
            ("worker", args.worker is not None),
            ("validate", args.validate),
        )
        if value
    }
    if args.name == _ALL:
        narrowing = {"worker", "validate"} & set(given)
        return {name: view for name, view in views.items() if narrowing <= view.takes}
    if args.name not in views:
        raise ReadingError(
            f"there is no plot {args.name!r}{did_you_mean(args.name, views)}\n"
            "`verl-profiler plot --list` lists all of them",
            "no-such-plot",
        )
    view = views[args.name]
    for option in given:
        if option not in view.takes:
            others = [name for name, each in views.items() if option in each.takes]
            raise ReadingError(
                f"{args.name} does not honor --{option}.\nThese do: {', '.join(others)}",
                "option-not-heeded",
            )
    return {args.name: view}


def _choices(opened: Run, args: argparse.Namespace) -> dict[str, Choice]:
    from verl_profiler.views.view import Choice

    return {
        label: Choice(run=label, steps=args.steps, worker=args.worker, validate=args.validate)
        for label in opened.labels
    }


def _draw(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> int:
    from verl_profiler.render.charts import check_installed
    from verl_profiler.views.view import MARK, NothingToDraw, of_run

    if not args.spec:
        check_installed()
    choices = _choices(opened, args)
    form, paths = _paths(chosen, list(choices), args)
    # A specification may have been edited since.
    mark = None if args.spec else MARK.encode()
    refuse_overwriting(*paths.values(), force=args.force, mark=mark)
    written, empty = 0, dict.fromkeys(chosen, 0)
    for name, plot in chosen.items():
        data = plot.analysis(opened.tables, next(iter(choices.values())))
        for label, choice in choices.items():
            path = paths[name, label]
            try:
                picture = plot.picture(of_run(data, label), choice, form)
            except NothingToDraw as reason:
                empty[name] += 1
                if len(chosen) == 1:
                    print_error(f"verl-profiler plot: {name}: nothing to draw: {reason}")
                continue
            with replacing(path) as file:
                file.write(picture)
            print(visible(f"Wrote {path}"))
            written += 1
    absent = [name for name, times in empty.items() if times == len(choices)]
    if absent and len(chosen) > 1:
        print_error(
            f"verl-profiler plot: nothing to draw for {', '.join(absent)}; plot NAME prints why."
        )
    return 0 if written else 1


def _paths(
    chosen: Mapping[str, View], labels: list[str], args: argparse.Namespace
) -> tuple[str, dict[tuple[str, str], Path]]:
    """Return the format, and the file of every plot and run."""
    from verl_profiler.views.view import SPEC

    out: Path | None = args.out
    form: str | None = args.format
    suffix = "" if out is None else out.suffix.lower().lstrip(".")
    if args.spec:
        if form is not None:
            raise ReadingError(
                f"--spec and --format {form} contradict each other.\nLeave one of them out",
                "output-format",
            )
        form, suffix = SPEC, SPEC if suffix == "json" else suffix
    if out is not None and suffix in (*_FORMATS, SPEC) and not out.is_dir():
        if form is not None and form != suffix:
            raise ReadingError(
                f"--out {out} and --format {form} contradict each other.\nLeave one of them out",
                "output-format",
            )
        if len(chosen) * len(labels) > 1:
            raise ReadingError(
                f"--out {out} is one file, and there are {len(chosen) * len(labels)} plots to write.\n"
                "Name a folder instead",
                "output-format",
            )
        ((name,), (label,)) = chosen, labels
        return suffix, {(name, label): out}
    form = form or "png"
    folder = out if out is not None else Path("plots" if args.name == _ALL else ".")
    several = len(labels) > 1
    return form, {
        (name, label): folder / (f"{_safe(label)}-{name}.{form}" if several else f"{name}.{form}")
        for name in chosen
        for label in labels
    }


def _safe(label: str) -> str:
    """Make a file name of a run's label."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in label)[:80]


def _numbers(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> dict[str, Any]:
    choice = next(iter(_choices(opened, args).values()))
    return {name: plot.analysis(opened.tables, choice) for name, plot in chosen.items()}


def _nothing(numbers: Mapping[str, Mapping[str, Rows]], chosen: Mapping[str, View]) -> bool:
    """Print which plots have no numbers; return True when none has any."""
    empty = [name for name, data in numbers.items() if not next(iter(data.values()))]
    for name in empty:
        print_error(f"verl-profiler plot: {name}: no numbers: {chosen[name].empty}")
    return len(empty) == len(numbers)


def _write_json(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> int:
    numbers = _numbers(opened, chosen, args)
    content = {
        "format": 2,
        "runs": opened.labels,
        "steps": args.steps,
        "worker": args.worker,
        "validate": args.validate,
        "plots": numbers,
        "notes": opened.notes,
        "problems": opened.problems,
    }
    out: Path | None = args.out
    path = out / f"{args.name}.json" if out is not None and out.is_dir() else out
    give(json_text(content), path, force=args.force)
    return 1 if _nothing(numbers, chosen) else 0


def _write_csv(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> int:
    numbers = _numbers(opened, chosen, args)
    tables = {table: rows for data in numbers.values() for table, rows in data.items() if rows}
    out: Path | None = args.out
    if out is None:
        # A terminal takes one table: the plot's own.
        if len(chosen) > 1:
            raise ReadingError(
                "--csv of all plots needs a folder to write to.\nAdd --out FOLDER", "output-format"
            )
        sys.stdout.write(csv_text(next(iter(next(iter(numbers.values())).values()))))
        return 1 if _nothing(numbers, chosen) else 0
    if out.suffix.lower() == ".csv" and not out.is_dir():
        if len(chosen) > 1:
            raise ReadingError(
                f"--out {out} is one file, and there are {len(tables)} tables to write.\n"
                "Name a folder instead",
                "output-format",
            )
        tables = dict(list(tables.items())[:1])
        paths = dict.fromkeys(tables, out)
    else:
        paths = {table: out / f"{table}.csv" for table in tables}
    refuse_overwriting(*paths.values(), force=args.force)
    for table, path in paths.items():
        write_whole(path, [csv_text(tables[table])])
        print(visible(f"Wrote {path}"))
    return 1 if _nothing(numbers, chosen) else 0
