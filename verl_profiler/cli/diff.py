"""Say what changed from one run to another, and whether it is more than noise.

    verl-profiler diff logs/base logs/new
    verl-profiler diff logs/my-run@2:10 logs/my-run@11:20
    verl-profiler diff logs/base logs/new --fail-if 'step.p50 > +5%'
    verl-profiler diff logs/base logs/new --html changes.html

RUN@N:M means the steps N to M.  Without it, all finished steps but the first, which warms up.
The exit status is 1 when a --fail-if holds: a change has to be beyond the limit and more than noise.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import check_steps, step_range
from verl_profiler.cli.output import print_json, target_of, write_whole
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Rows, Steps
    from verl_profiler.comparison import Change, Figure
    from verl_profiler.conditions import Condition

__all__ = ["add_arguments", "run", "side"]

_SIDE = re.compile(r"(?P<path>.+)@(?P<steps>\d{1,9}(?::\d{1,9})?)", re.DOTALL)

# What is compared unless conditions ask for more, by what is over or in the steps.  Every further
# figure makes all of them less certain, so each of these says something that the others do not.
_ONCE = {"step": ("mean", "p50")}
_MANY = {
    "request": ("p50", "p95", "max"),
    "engine_call": ("p50", "p95", "count"),
    "tool_call": ("p50", "p95", "count"),
    "turn": ("count",),
}
_MANY_OTHERS = ("mean",)


@dataclass
class Side:
    """One of the two that are compared.

    Args:
        shown: What the user wrote.
        path: The run.
        steps: First and last step; None for all but the warm-up.
    """

    shown: str
    path: Path
    steps: Steps = None


def side(text: str) -> Side:
    """Read `RUN` or `RUN@N:M`; a path that exists is a path, whatever is in its name."""
    match = _SIDE.fullmatch(text)
    if match is None or Path(text).exists():
        return Side(text, Path(text))
    return Side(text, Path(match["path"]), step_range(match["steps"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    for name, text in (("a", "the run to compare with"), ("b", "the run to judge")):
        parser.add_argument(
            name, metavar=name.upper(), type=side, help=f"{text}; RUN@N:M for some of its steps"
        )
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if this holds, such as 'step.p50 > +5%%' or 'request.p95 > 90s'",
    )
    parser.add_argument(
        "--warmup",
        metavar="STEPS",
        type=int,
        default=1,
        help="finished steps to leave out at the beginning of a run without @N:M (default: 1)",
    )
    parser.add_argument("--all", action="store_true", help="show what did not change, too")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page as well")
    parser.add_argument("--force", action="store_true", help="replace the page if it exists")
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor write the runs' .cache folders"
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 0, or 1 when a condition of --fail-if holds.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.comparison import adjusted, change
    from verl_profiler.conditions import condition
    from verl_profiler.report.diff_text import diff_text, gathered

    conditions = [condition(text) for text in args.fail_if]
    target = None
    if args.html is not None:
        target = target_of([args.b.path], args.html, "diff.html", force=args.force)
    rows = [_rows(each, args.warmup, cache=not args.no_cache) for each in (args.a, args.b)]
    changes = [change(figure) for figure in _figures(*rows)]
    adjusted(changes)
    verdicts = _verdicts(conditions, *rows)
    document = gathered(
        [each.shown for each in (args.a, args.b)],
        [sorted({row["step"] for row in found}) for found in rows],
        changes,
        verdicts,
    )
    if args.json:
        print_json({"format": 1, **document})
    else:
        sys.stdout.write(diff_text(shown(document), everything=args.all))
    if target is not None:
        from verl_profiler.report.diff_page import diff_page

        write_whole(target, [diff_page(document)])
        # Standard output may be the JSON.
        print_error(f"Wrote {target}")
    return int(any(verdict["holds"] for verdict in verdicts))


def _rows(each: Side, warmup: int, *, cache: bool) -> Rows:
    """Return the figures of one side's steps."""
    from verl_profiler.analysis.step_figures import step_figures
    from verl_profiler.reader import load

    with load(each.path, cache=cache) as opened:
        check_steps(opened, each.steps, f"{each.path}@")
        rows = step_figures(opened.tables, each.steps)
    steps = sorted({row["step"] for row in rows})
    left = steps if each.steps is not None else steps[max(warmup, 0) :]
    if not left:
        raise ReadingError(
            f"{each.shown} has {len(steps)} finished training steps"
            f"{', and the first is left out as warm-up' if steps else ''}, so nothing is left to "
            "compare.\nName steps, for example RUN@1:5, or give --warmup 0",
            "too-few-steps",
        )
    return [row for row in rows if row["step"] in set(left)]


def _figures(first: Rows, second: Rows) -> list[Figure]:
    """Return what is compared by default: whatever both sides have."""
    found = []
    once = _once(first, second)
    for name, single in once.items():
        statistics = _ONCE.get(name, ("mean",)) if single else _MANY.get(name, _MANY_OTHERS)
        found += [_figure(name, statistic, first, second) for statistic in statistics]
    return found


def _once(first: Rows, second: Rows) -> dict[str, bool]:
    """Return the names in both, and whether each occurs once per step."""
    singles = [{row["name"]: row["value"] is not None for row in rows} for rows in (first, second)]
    return {name: single for name, single in singles[0].items() if name in singles[1]}


def _figure(name: str, statistic: str, first: Rows, second: Rows) -> Figure:
    from verl_profiler.comparison import Figure

    values: list[dict[int, float]] = []
    unit, single = "", False
    for rows in (first, second):
        values.append({})
        for row in rows:
            if row["name"] == name:
                single = row["value"] is not None
                unit = row["unit"] if statistic != "count" else ""
                values[-1][row["step"]] = row["value"] if single else row[statistic]
    over_steps = statistic if single else "mean"
    return Figure(f"{name}.{statistic}", unit, values[0], values[1], over_steps)


def _verdicts(conditions: Sequence[Condition], first: Rows, second: Rows) -> list[dict[str, Any]]:
    from verl_profiler.comparison import ALPHA, change, smallest_p
    from verl_profiler.conditions import statistic_of

    once = _once(first, second)
    verdicts = []
    for each in conditions:
        statistic_of(each, once)
        found: Change = change(_figure(each.name, each.statistic, first, second))
        chance = each.chance(found)
        limit = ALPHA / len(conditions)
        least = smallest_p(len(found.figure.a), len(found.figure.b))
        if each.relative and each.exceeded(found) and least > limit:
            raise ReadingError(
                f"{each.text!r}: {len(found.figure.a)} and {len(found.figure.b)} steps are too few to "
                f"tell a change from noise with {len(conditions)} conditions.\nCompare more steps, at "
                f"least 4 of each, or give a limit instead of a change, such as '{each.name}.{each.statistic} > {found.a:.3g}s'",
                "too-few-steps",
            )
        verdicts.append(
            {
                "condition": each.text,
                "unit": found.figure.unit,
                "a": found.a,
                "b": found.b,
                "share": found.share,
                "p": chance if each.relative else None,
                "certain_p": limit,
                "exceeded": each.exceeded(found),
                "holds": each.fails(found, len(conditions)),
            }
        )
    return verdicts
