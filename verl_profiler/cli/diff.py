"""Compare two runs, or two ranges of steps: what changed, beyond noise.

    verl-profiler diff logs/base logs/new
    verl-profiler diff logs/my-run@2:5 logs/my-run@6:10
    verl-profiler diff logs/base-1,logs/base-2 logs/new-1,logs/new-2
    verl-profiler diff before.log after.log
    verl-profiler diff logs/base logs/new --fail-if 'step.p50 > +5%'
    verl-profiler diff --verify event_loop logs/before logs/after

RUN@N:M selects the steps N to M; the default is all finished steps without the
first (warm-up), if at least two others remain. RUN,RUN are launches of the
same command; the tests then compare launches instead of steps. Of logs (a
console, or metrics of a logger), the timers are compared.
Exits with 1 if a --fail-if condition holds: the change exceeds the limit and
is significant; with --verify, if less than half of the predicted gain was
achieved, or noise hides it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.logs import are_logs
from verl_profiler.cli.options import (
    NO_CACHE,
    Argument,
    check_steps,
    did_you_mean,
    run_argument,
    step_range,
)
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.errors import ReadingError
from verl_profiler.events.remote import is_url
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.analysis.compare.differences import Measured
    from verl_profiler.analysis.selection import Rows, Steps
    from verl_profiler.reading.reader import Run

_SIDE = re.compile(r"(?P<path>.+)@(?P<steps>\d{1,9}(?::\d{1,9})?)", re.DOTALL)


@dataclass
class Side:
    """One of the two sides of the comparison.

    Args:
        shown: The argument as given.
        path: The run; a URL until the command runs.
        steps: First and last step; None for all after the warm-up.
    """

    shown: str
    path: Any
    steps: Steps = None


def side(text: str) -> Side:
    """Parse `RUN` or `RUN@N:M`; an existing path is a path, even if its name contains `@`."""
    match = _SIDE.fullmatch(text)
    if match is None or Path(text).exists():
        return Side(text, run_argument(text))
    return Side(text, run_argument(match["path"]), step_range(match["steps"]))


def sides(text: str) -> tuple[Side, ...]:
    """Parse `RUN,RUN…`, launches of the same; an existing path is a path, even if it contains `,`."""
    parts = [text] if Path(text).exists() or is_url(text) else text.split(",")
    parts = [part for part in parts if part]
    if len(set(parts)) < len(parts):
        raise ReadingError(f"{text} names a run twice.\nName each launch once", "option-not-heeded")
    return tuple(map(side, parts))


ARGUMENTS = (
    *(
        Argument(
            name.lower(),
            metavar=name,
            type=sides,
            help=f"{text}; RUN@N:M selects steps, RUN,RUN are launches of the same command",
        )
        for name, text in (("A", "the baseline run"), ("B", "the run to compare with it"))
    ),
    Argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if this condition holds, such as 'step.p50 > +5%%' or 'request.p95 > 90s'",
    ),
    Argument(
        "--verify",
        metavar="FINDING",
        help="check instead whether B achieved the gain that this finding of A predicts: kept, not "
        "kept or undecided; a name from `why A --json`, such as polling or slow_tools",
    ),
    Argument(
        "--all", action="store_true", help="show all metrics, not only those that changed most"
    ),
    Argument("--json", action="store_true", help="print all metrics as JSON"),
    NO_CACHE,
)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 0, or 1 if a --fail-if condition holds or a gain was not kept."""
    from verl_profiler.views.diff_text import diff_text

    if args.verify is not None:
        return _verify(args)
    document = comparison(args.a, args.b, args.fail_if, cache=not args.no_cache)
    if args.json:
        kept, cut = bounded({"only_in_one": document["only_in_one"]})
        print_json(
            {
                "format": 2,
                **document,
                **kept,
                "only_in_one_left_out": cut.get("only_in_one", 0),
            }
        )
    else:
        sys.stdout.write(diff_text(shown(document), everything=args.all))
    return int(any(verdict["holds"] for verdict in document["conditions"]))


def comparison(
    given_a: Sequence[Side],
    given_b: Sequence[Side],
    fail_if: Sequence[str] = (),
    *,
    cache: bool,
) -> dict[str, Any]:
    """Compare two sides; return what `--json` prints.

    Raises:
        ReadingError: They cannot be compared, or a condition cannot be tested.
    """
    from verl_profiler.analysis.compare.comparison import ALPHA, metric_rows, step_of
    from verl_profiler.analysis.compare.differences import Comparison, condition, configuration
    from verl_profiler.views.ledger_text import bound_text

    conditions = [condition(text) for text in fail_if]
    a, b = _read_both(given_a, given_b, cache=cache)
    one_run = len(given_a) == len(given_b) == 1 and _same(given_a[0].path, given_b[0].path)
    compared = Comparison(a, b, one_run=one_run)
    return {
        "runs": [
            {
                "name": ",".join(each.shown for each in given),
                "launches": read.launches,
                "steps": [step_of(place) for place in read.steps],
                "warm_up": read.warm_up,
                "stalled": read.stalled(),
                "asynchronous": read.asynchronous,
                "bound": bound_text(read.ledger),
            }
            for given, read in ((given_a, a), (given_b, b))
        ],
        **metric_rows(compared.changes),
        "configuration": configuration(a.launch, b.launch),
        "only_in_one": compared.only_in_one(),
        "left_out": compared.left_out,
        "one_run": one_run,
        "drift": compared.drift(),
        "between_steps_s": compared.between_steps_s(),
        "equal_tokens": compared.at_equal_tokens(),
        "conditions": [compared.verdict(each, ALPHA / len(conditions)) for each in conditions],
    }


def _verify(args: argparse.Namespace) -> int:
    """Print whether B achieved the gain that a finding of A predicts; return 0 if it did, else 1."""
    from verl_profiler.analysis.explain.rules import RULES
    from verl_profiler.analysis.explain.verification import verified
    from verl_profiler.views.diff_text import verification_text

    option = "--fail-if" if args.fail_if else "--all" if args.all else None
    if option is not None:
        raise ReadingError(
            f"--verify compares the length of the steps only, so it cannot be used with {option}.\n"
            "Omit one of them",
            "option-not-heeded",
        )
    a, b = _single(args.a), _single(args.b)
    found, before = _read_findings(a, cache=not args.no_cache)
    remaining, after = _read_findings(b, cache=not args.no_cache)
    if args.verify not in found:
        # Findings of categories without a rule have the category's name.
        if args.verify in {*RULES, *remaining}:
            problem = f"{a.shown} does not have the finding {args.verify}."
        else:
            near = did_you_mean(args.verify, [*found, *RULES])
            problem = f"{args.verify!r} is not a finding{near}"
        raise ReadingError(
            f"{problem}\n{a.shown} has {', '.join(found) or 'no findings'}", "no-such-finding"
        )
    left = remaining.get(args.verify)
    result = verified(
        found[args.verify], before, after, None if left is None else left["recoverable_s"]
    )
    if args.json:
        print_json({"format": 2, **result})
    else:
        sys.stdout.write(verification_text(shown(result)))
    return int(result["verdict"] != "kept")


def _single(given: Sequence[Side]) -> Side:
    if len(given) > 1:
        raise ReadingError(
            "--verify compares one launch with one.\nName a single run for A and for B",
            "option-not-heeded",
        )
    return given[0]


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _read_both(
    first: Sequence[Side], second: Sequence[Side], *, cache: bool
) -> tuple[Measured, Measured]:
    """Return the metrics of both sides; with device time and staleness if one is asynchronous.

    Args:
        first: The launches of A.
        second: Those of B.
        cache: Whether the runs' caches are used.
    """
    from verl_profiler.analysis.compare.step_metrics import device_metrics, sample_metrics
    from verl_profiler.analysis.explain.ledger import bubble_ledger
    from verl_profiler.reading.reader import load

    with ExitStack() as stack:
        reads: list[list[Measured]] = []
        opened_runs: list[tuple[Measured, Run]] = []
        for side in (first, second):
            reads.append([])
            for each in side:
                if are_logs([each.path]):
                    reads[-1].append(_read_log(each))
                    continue
                opened = stack.enter_context(load(each.path, cache=cache))
                reads[-1].append(_read(each, opened))
                opened_runs.append((reads[-1][-1], opened))
        every = [*reads[0], *reads[1]]
        if any(each.asynchronous for each in every):
            for each, opened in opened_runs:
                chosen = set(each.steps)
                span = (min(chosen), max(chosen))
                ledger = bubble_ledger(opened.tables, span)
                each.ledger = [row for row in ledger if row["step"] in chosen]
                sampled = sample_metrics(opened.tables, span)
                each.rows += [row for row in sampled if row["step"] in chosen]
            for each, rows in zip(every, device_metrics([e.ledger for e in every]), strict=True):
                each.rows += rows
    return _together(reads[0]), _together(reads[1])


def _together(launches: Sequence[Measured]) -> Measured:
    """Return the launches of one side as one."""
    from verl_profiler.analysis.compare.comparison import key

    first = launches[0]
    rows = [
        {**row, "step": key(number, row["step"])}
        for number, each in enumerate(launches)
        for row in each.rows
    ]
    steps = [key(number, step) for number, each in enumerate(launches) for step in each.steps]
    asynchronous = any(each.asynchronous for each in launches)
    return replace(first, rows=rows, steps=steps, asynchronous=asynchronous, launches=len(launches))


def _read_log(each: Side) -> Measured:
    """Return the metrics of a console log."""
    from verl_profiler.analysis.compare.step_metrics import logged_metrics
    from verl_profiler.reading.formats.console_steps import logged_runs

    problems: list[str] = []
    runs = logged_runs([each.path], problems)
    if len(runs) != 1:
        raise ReadingError(
            f"{each.path} holds {len(runs)} runs; diff compares logs of one run.\n"
            f"{problems[0] if problems else 'Split it: verl-profiler timing lists them'}",
            "several-runs" if runs else "no-events",
        )
    rows = logged_metrics(runs[0])
    if each.steps is not None:
        rows = [row for row in rows if each.steps[0] <= row["step"] <= each.steps[1]]
    return _chosen(each, rows, {}, asynchronous=False)


def _read_findings(each: Side, *, cache: bool) -> tuple[dict[str, Any], Rows]:
    """Return a run's findings by name, and its finished steps after the warm-up.

    Raises:
        ReadingError: No finished step is left.
    """
    from verl_profiler.analysis.registry import explained
    from verl_profiler.analysis.selection import steady, warm_ups
    from verl_profiler.analysis.steps import step_times
    from verl_profiler.reading.reader import load

    with load(each.path, cache=cache) as opened:
        check_steps(opened, each.steps, f"{each.path}@")
        rows = step_times(opened.tables, each.steps)
        found = explained(opened.tables, each.steps)["findings"]
    rows = [row for row in rows if row["finished"] and row["step"] > 0]
    rows = steady(rows, warm_ups(rows, each.steps))
    if not rows:
        raise ReadingError(f"{each.shown} has no finished step to compare.", "too-few-steps")
    return {row["finding"]: row for row in found}, rows


def _read(each: Side, opened: Run) -> Measured:
    """Return the metrics of one side's steps."""
    from verl_profiler.analysis.compare.step_metrics import step_metrics

    check_steps(opened, each.steps, f"{each.path}@")
    rows = step_metrics(opened.tables, each.steps)
    launch = next((found for found in opened.launches.values() if found), dict[str, Any]())
    asynchronous = bool(opened.rows("SELECT run FROM asynchronous"))
    return _chosen(each, rows, launch, asynchronous=asynchronous)


def _chosen(each: Side, rows: Rows, launch: Mapping[str, Any], *, asynchronous: bool) -> Measured:
    """Return one side without its warm-up."""
    from verl_profiler.analysis.compare.differences import Measured
    from verl_profiler.analysis.selection import warm_up

    finished = sorted({row["step"] for row in rows})
    dropped = warm_up(finished, each.steps)
    left = [step for step in finished if step not in dropped]
    if not left:
        raise ReadingError(
            f"{each.shown} has no finished training step to compare.\nCompare a run that finished one",
            "too-few-steps",
        )
    rows = [row for row in rows if row["step"] in set(left)]
    return Measured(rows, left, dropped, launch, asynchronous)
