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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler.cli.diff_sides import Side, read_both, read_findings, side, sides
from verl_profiler.cli.options import did_you_mean
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

__all__ = ["add_arguments", "comparison", "run", "side"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    for name, text in (("a", "the baseline run"), ("b", "the run to compare with it")):
        parser.add_argument(
            name,
            metavar=name.upper(),
            type=sides,
            help=f"{text}; RUN@N:M selects steps, RUN,RUN are launches of the same command",
        )
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if this condition holds, such as 'step.p50 > +5%%' or 'request.p95 > 90s'",
    )
    parser.add_argument(
        "--verify",
        metavar="FINDING",
        help="check instead whether B achieved the gain that this finding of A predicts: kept, not "
        "kept or undecided; a name from `why A --json`, such as polling or slow_tools",
    )
    parser.add_argument(
        "--all", action="store_true", help="show all metrics, not only those that changed most"
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as JSON")
    parser.add_argument(
        "--no-cache", action="store_true", help="do not read or write the runs' .cache folders"
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 0, or 1 if a --fail-if condition holds or a gain was not kept.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
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
    from verl_profiler.analysis.compare.comparison import ALPHA, step_of
    from verl_profiler.analysis.compare.conditions import condition
    from verl_profiler.analysis.compare.differences import Comparison, configuration
    from verl_profiler.views.diff_text import metric_rows
    from verl_profiler.views.ledger_text import bound_text

    conditions = [condition(text) for text in fail_if]
    a, b = read_both(given_a, given_b, cache=cache)
    one_run = len(given_a) == len(given_b) == 1 and _same(given_a[0].path, given_b[0].path)
    compared = Comparison(a, b, one_run=one_run)
    return {
        "runs": [
            {
                "name": ",".join(each.shown for each in given),
                "launches": read.launches,
                "steps": [step_of(place) for place in read.steps],
                "warm_up": read.warm_up,
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
    found, before = read_findings(a, cache=not args.no_cache)
    remaining, after = read_findings(b, cache=not args.no_cache)
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
