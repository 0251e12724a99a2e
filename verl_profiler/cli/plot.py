"""Draw one of the plots, or all of them, and print where they were written.

    verl-profiler plot --list
    verl-profiler plot request_duration_cdf logs/my-run
    verl-profiler plot slowest_requests logs/my-run --steps 5 --out slowest.svg
    verl-profiler plot all logs/my-run --out figures
    verl-profiler plot step_durations logs/my-run --json
    verl-profiler plot step_durations logs/my-run --spec

With --json or --csv the numbers behind the plot are printed instead, or
written to --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.cli.options import (
    NO_CACHE,
    ON,
    STEPS,
    WORKER,
    Argument,
    check_worker,
    did_you_mean,
    opened_run,
    output_arguments,
    run_argument,
)
from verl_profiler.cli.output import (
    csv_text,
    give,
    json_text,
    refuse_overwriting,
    replacing,
)
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verl_profiler.reading.reader import Run
    from verl_profiler.views.view import Choice, View

_FORMATS = ("png", "svg")
# A name that ends so is no folder's.
_NOT_WRITTEN = ("pdf", "eps", "jpg", "jpeg", "webp")
_ALL = "all"

ARGUMENTS = (
    Argument("name", metavar="NAME", nargs="?", help="a plot's name (see --list), or all"),
    Argument(
        "runs",
        metavar="RUN",
        nargs="*",
        type=run_argument,
        help="run directory, archive or URL of one, step folder or event file; several give a plot each",
    ),
    Argument(
        "--list",
        action="store_true",
        help="list the plots and the questions that they answer; with NAME, what "
        "that plot shows, what to conclude from it, and its columns",
    ),
    STEPS,
    WORKER,
    Argument("--validate", action="store_true", help="show validation instead of training"),
    *output_arguments(
        "the file to write, or a folder (default: NAME.FORMAT here; all: the folder plots)"
    ),
    (
        Argument("--format", choices=_FORMATS, help="default: from the name of --out, or png"),
        Argument("--json", action="store_true", help="print the numbers as JSON"),
        Argument(
            "--spec",
            action="store_true",
            help="write Vega-Lite specifications (NAME.vl.json), to be restyled, instead of pictures",
        ),
        Argument("--csv", action="store_true", help="print the numbers as CSV"),
    ),
    NO_CACHE,
    ON,
)


def run(args: argparse.Namespace) -> int:
    """Write the plots; return 0, or 1 when there is nothing to draw."""
    from verl_profiler.views.questions import VIEWS

    if args.list and args.name is not None:
        from verl_profiler.views.reference import entry

        print("\n".join(entry(view, linked=False) for view in _chosen(VIEWS, args).values()))
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
        if args.json or args.csv:
            return _write_numbers(opened, chosen, args)
        return _draw(opened, chosen, args)


def _chosen(views: Mapping[str, View], args: argparse.Namespace) -> dict[str, View]:
    """Return the plots to draw; refuse options that the chosen plot does not honor."""
    if args.name is None:
        raise ReadingError(
            "no plot was named.\nverl-profiler plot --list shows all of them", "no-such-plot"
        )
    given = {"worker"} if args.worker is not None else set[str]()
    given |= {"validate"} if args.validate else set()
    if args.name == _ALL and args.csv:
        raise ReadingError(
            "--csv prints the table of one plot.\nName the plot; --json has all tables",
            "output-format",
        )
    if args.name == _ALL:
        return {name: view for name, view in views.items() if given <= view.takes}
    if args.name not in views:
        raise ReadingError(_no_plot(args.name, views), "no-such-plot")
    for option in given - views[args.name].takes:
        others = [name for name, each in views.items() if option in each.takes]
        raise ReadingError(
            f"{args.name} does not honor --{option}.\nThese do: {', '.join(others)}",
            "option-not-heeded",
        )
    return {args.name: views[args.name]}


def _no_plot(name: str, views: Mapping[str, View]) -> str:
    """Return that a name is none of a plot, and what has what it names."""
    from verl_profiler.views.sections import TABLES
    from verl_profiler.views.timing_figures import PICTURES

    if name in PICTURES:
        return f"{name} is a figure of a console log.\nverl-profiler timing train.log draws it"
    if any(name in tables for tables in TABLES.values()):
        return f"{name} is a table, not a plot.\nverl-profiler report logs/my-run shows it"
    return (
        f"there is no plot {name!r}{did_you_mean(name, views)}\n"
        "verl-profiler plot --list shows all of them"
    )


def _choice(label: str, args: argparse.Namespace) -> Choice:
    from verl_profiler.views.view import Choice

    return Choice(run=label, steps=args.steps, worker=args.worker, validate=args.validate)


def _draw(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> int:
    from verl_profiler.render.charts import SPEC, check_installed, render
    from verl_profiler.views.view import MARK, NothingToDraw, of_run

    form, mark = _form(args), MARK.encode()
    if form == SPEC:
        # It may have been edited since.
        mark = None
    else:
        check_installed()
    several = len(opened.labels) > 1
    stems = {
        (name, label): f"{_safe(label)}-{name}" if several else name
        for name in chosen
        for label in opened.labels
    }
    paths = _targets(stems.values(), form, args)
    refuse_overwriting(*paths.values(), force=args.force, mark=mark)
    empty = dict.fromkeys(chosen, 0)
    for name, plot in chosen.items():
        data = plot.analysis(opened.tables, _choice("", args))
        for label in opened.labels:
            path = paths[stems[name, label]]
            try:
                spec = plot.spec(of_run(data, label), _choice(label, args))
                picture = render(spec, form, description=MARK)
            except NothingToDraw as reason:
                empty[name] += 1
                if len(chosen) == 1:
                    print_error(f"verl-profiler plot: {name}: nothing to draw: {reason}")
                continue
            with replacing(path) as file:
                file.write(picture)
            print(visible(f"Wrote {path}"))
    absent = [name for name, times in empty.items() if times == len(opened.labels)]
    if absent and len(chosen) > 1:
        print_error(
            f"verl-profiler plot: nothing to draw for {', '.join(absent)}; plot NAME prints why."
        )
    return 1 if len(absent) == len(chosen) else 0


def _form(args: argparse.Namespace) -> str:
    """Return the format of the pictures: as named, as `--out` ends, or PNG."""
    from verl_profiler.render.charts import SPEC

    form: str | None = args.format
    suffix = "" if args.out is None or args.out.is_dir() else args.out.suffix.lower().lstrip(".")
    if suffix in _NOT_WRITTEN:
        raise ReadingError(
            f"--out {args.out}: plots are not written as {suffix.upper()}.\nEnd the name in .png or .svg",
            "output-format",
        )
    if suffix in _FORMATS and (args.spec or form not in (None, suffix)):
        raise ReadingError(
            f"--out {args.out} and --{'spec' if args.spec else f'format {form}'} contradict each other.\n"
            "Leave one of them out",
            "output-format",
        )
    return SPEC if args.spec else form or (suffix if suffix in _FORMATS else "png")


def _targets(stems: Iterable[str], form: str, args: argparse.Namespace) -> dict[str, Path]:
    """Return the file of each stem: `--out` itself where it ends as the format does, or one in a folder."""
    listed = list(stems)
    out: Path | None = args.out
    suffix = form.rpartition(".")[2]
    if out is not None and out.suffix.lower() == f".{suffix}" and not out.is_dir():
        if len(listed) > 1:
            raise ReadingError(
                f"--out {out} is one file, and there are {len(listed)} to write.\nName a folder instead",
                "output-format",
            )
        return dict.fromkeys(listed, out)
    folder = out or Path("plots" if args.name == _ALL else ".")
    return {stem: folder / f"{stem}.{form}" for stem in listed}


def _safe(label: str) -> str:
    """Make a file name of a run's label."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in label)[:80]


def _write_numbers(opened: Run, chosen: Mapping[str, View], args: argparse.Namespace) -> int:
    """Print or write the rows behind the plots; return 1 where no plot has any."""
    numbers = {
        name: plot.analysis(opened.tables, _choice("", args)) for name, plot in chosen.items()
    }
    own = {name: next(iter(data.values())) for name, data in numbers.items()}
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
    text = json_text(content) if args.json else csv_text(own[args.name])
    out: Path | None = args.out
    if out is not None and out.is_dir():
        out /= f"{args.name}.{'json' if args.json else 'csv'}"
    give(text, out, force=args.force)
    empty = [name for name, rows in own.items() if not rows]
    for name in empty:
        print_error(f"verl-profiler plot: {name}: no numbers: {chosen[name].empty}")
    return 1 if len(empty) == len(numbers) else 0
