"""Count the false alarms of `diff`: on pairs of runs that do not differ.

    python benchmarks/bench_diff.py                     made-up runs
    python benchmarks/bench_diff.py RUN RUN RUN         all pairs of runs of the same kind

Made-up steps have long tails, and what makes a step slow makes most of its figures slow.  Some runs
are slower than others all the time, as on a machine that others use too, with `--between 0.05`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
from collections.abc import Sequence
from itertools import combinations

from verl_profiler.cli import main as command
from verl_profiler.comparison import Figure, adjusted, change
from verl_profiler.conditions import condition

GATE = "step.p50 > +5%"


def made(source: random.Random, steps: int, figures: int, between: float) -> list[list[float]]:
    """Return the figures of a made-up run, by figure and step."""
    run = source.lognormvariate(0, between) if between else 1.0
    slow = [run * source.lognormvariate(0, 0.25) for _ in range(steps)]
    return [[each * source.lognormvariate(1, 0.15) for each in slow] for _ in range(figures)]


def made_pairs(pairs: int, steps: int, figures: int, between: float) -> None:
    """Print how many of the pairs raise an alarm."""
    gate = condition(GATE)
    certain = gated = 0
    for seed in range(pairs):
        source = random.Random(seed)
        runs = [made(source, steps, figures, between) for _ in range(2)]
        changes = [
            change(
                Figure(
                    f"f{number}",
                    "s",
                    dict(enumerate(first)),
                    dict(enumerate(second)),
                    "mean" if number else "p50",
                )
            )
            for number, (first, second) in enumerate(zip(*runs, strict=True))
        ]
        adjusted(changes)
        certain += any(each.certain for each in changes)
        gated += gate.fails(changes[0], 1)
    print(
        f"{pairs} made-up pairs of {steps} steps, {figures} figures: anything certain in "
        f"{certain / pairs:.1%}, {GATE!r} holds in {gated / pairs:.1%}"
    )


def real_pairs(runs: Sequence[str]) -> None:
    """Print what `diff` says of every pair, both ways."""
    pairs = [pair for one in combinations(runs, 2) for pair in (one, one[::-1])]
    certain = gated = 0
    for pair in pairs:
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            status = command(["diff", *pair, "--json", "--fail-if", GATE])
        figures = json.loads(told.getvalue())["figures"]
        alarms = [each["figure"] for each in figures if each["certain"]]
        certain += bool(alarms)
        gated += status == 1
        print(
            f"{pair[0]} {pair[1]}: {len(figures)} figures, certain: {', '.join(alarms) or 'none'}"
        )
    print(f"{len(pairs)} pairs: anything certain in {certain}, {GATE!r} holds in {gated}")


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="runs of the same kind; made-up ones if left out")
    parser.add_argument("--pairs", type=int, default=200, help="made-up pairs (default 200)")
    parser.add_argument("--steps", type=int, default=6, help="steps of each (default 6)")
    parser.add_argument("--figures", type=int, default=40, help="figures of each (default 40)")
    parser.add_argument(
        "--between", type=float, default=0.0, help="spread between runs (default 0)"
    )
    args = parser.parse_args()
    if args.runs:
        real_pairs(args.runs)
    else:
        made_pairs(args.pairs, args.steps, args.figures, args.between)
    return 0


if __name__ == "__main__":
    sys.exit(main())
