"""Count the false alarms of `diff`, what its intervals cover, and what it detects.

    python benchmarks/bench_diff.py                     made-up runs, 1,000 pairs per row
    python benchmarks/bench_diff.py --steps 4 8 20      with so many steps each
    python benchmarks/bench_diff.py --seed 70000        pairs that no constant was chosen on
    python benchmarks/bench_diff.py --means             intervals of what-if
    python benchmarks/bench_diff.py RUN RUN RUN         all pairs of runs of the same kind

Steps are autocorrelated (AR(1)) and have long tails; what makes a step slow makes its metrics slow.
`independent` is what a test that takes steps for independent would call significant, and `blocks` is
the moving-block bootstrap.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy import stats

from verl_profiler.analysis.compare.comparison import HEADLINE, Metric, adjusted, change
from verl_profiler.analysis.compare.conditions import condition
from verl_profiler.analysis.intervals import mean
from verl_profiler.cli import main as command

GATE = "step > +5%"
METRICS = 12
# Of a step, as a share of its mean; and what of it all metrics have in common.
SPREAD = 0.2
COMMON = 0.6
RISES = (0.1, 0.2, 0.5)
_DRAWS = 400


def series(source: np.random.Generator, count: int, steps: int, rho: float) -> np.ndarray:
    """Return stationary AR(1) series of variance 1, one per row."""
    noise = source.standard_normal((count, steps))
    made = noise.copy()
    for step in range(1, steps):
        made[:, step] = rho * made[:, step - 1] + np.sqrt(1 - rho**2) * noise[:, step]
    return made


def made_run(source: np.random.Generator, steps: int, rho: float) -> np.ndarray:
    """Return the metrics of a made-up run, by metric and step."""
    common, own = series(source, 1, steps, rho), series(source, METRICS, steps, rho)
    return np.exp(SPREAD * (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * own))


def metrics(first: np.ndarray, second: np.ndarray, *, same_steps: bool) -> list[Metric]:
    """Return a pair's metrics, the headline's three first."""
    names = [*HEADLINE, *(f"other_{place}.mean" for place in range(METRICS - len(HEADLINE)))]
    begin = 0 if same_steps else 1_000
    return [
        Metric(name, "s", dict(enumerate(a)), dict(enumerate(b, begin)))
        for name, a, b in zip(names, first.tolist(), second.tolist(), strict=True)
    ]


def block_bootstrap(source: np.random.Generator, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether a 95 % moving-block bootstrap interval of the difference excludes 0."""

    def means(values: np.ndarray) -> np.ndarray:
        length = max(round(len(values) ** (1 / 3)), 1)
        starts = source.integers(0, len(values) - length + 1, (_DRAWS, -(-len(values) // length)))
        places = (starts[..., None] + np.arange(length)).reshape(_DRAWS, -1)[:, : len(values)]
        return values[places].mean(1)

    low, high = np.quantile(means(b) - means(a), (0.025, 0.975))
    return bool(low > 0 or high < 0)


def made_pairs(seeds: Sequence[int], steps: int, rho: float, *, same_steps: bool) -> None:
    """Print what becomes of pairs that do not differ, and of pairs that do; one pair per seed."""
    gate = condition(GATE)
    counts = np.zeros(5)
    detected = np.zeros(len(RISES))
    covered = tested = 0
    pairs = len(seeds)
    for seed in seeds:
        source = np.random.default_rng((seed, steps, round(rho * 100)))
        first, second = made_run(source, steps, rho), made_run(source, steps, rho)
        changes = [change(metric) for metric in metrics(first, second, same_steps=same_steps)]
        adjusted(changes)
        covered += sum(
            each.low <= 0 <= each.high
            for each in changes
            if each.low is not None and each.high is not None
        )
        tested += len(changes)
        counts += [
            any(each.significant for each in changes),
            gate.fails(changes[0], 1),
            changes[0].significant,
            stats.ttest_ind(first[0], second[0]).pvalue <= 0.05,
            block_bootstrap(source, first[0], second[0]),
        ]
        for place, rise in enumerate(RISES):
            step = metrics(first, second * (1 + rise), same_steps=same_steps)[0]
            p = change(step).p
            detected[place] += p is not None and p <= 0.05
    cells = [f"{steps}", f"{rho}", *(f"{each / pairs:.1%}" for each in counts[:2])]
    cells += [f"{covered / tested:.1%}", *(f"{each / pairs:.0%}" for each in detected)]
    cells += [f"{each / pairs:.1%}" for each in counts[3:]]
    print(f"| {' | '.join(cells)} |", flush=True)


def made_means(seeds: Sequence[int], steps: int, rho: float) -> None:
    """Print how often the 90 % interval of a mean over steps holds the truth."""
    cells = [f"{steps}", f"{rho}"]
    series_count = len(seeds)
    source = np.random.default_rng((seeds[0], steps, round(rho * 100)))
    normal = series(source, series_count, steps, rho)
    skewed = np.exp(0.5 * normal)
    for values, truth in ((normal, 0.0), (skewed, np.exp(0.125))):
        held = 0
        for row in values.tolist():
            estimate = mean(row)
            if estimate is not None:
                low, high = estimate.interval(0.9)
                held += low <= truth <= high
        cells.append(f"{held / series_count:.1%}")
    print(f"| {' | '.join(cells)} |", flush=True)


def real_pairs(runs: Sequence[str]) -> None:
    """Print what `diff` reports for every pair, both ways."""
    pairs = [pair for one in combinations(runs, 2) for pair in (one, one[::-1])]
    significant = gated = 0
    for pair in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = command(["diff", *pair, "--json", "--fail-if", GATE])
        found = json.loads(printed.getvalue())["metrics"]
        alarms = [each["metric"] for each in found if each["significant"]]
        significant += bool(alarms)
        gated += status == 1
        print(f"{pair[0]} {pair[1]}: {len(found)} metrics, significant: {alarms or 'none'}")
    print(f"{len(pairs)} pairs: anything significant in {significant}, {GATE!r} holds in {gated}")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="runs of the same kind; made-up ones if left out")
    parser.add_argument("--pairs", type=int, default=1_000, help="per row (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair (default 0)")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 6, 10, 20], help="of each")
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0, 0.5, 0.8])
    parser.add_argument("--same-steps", action="store_true", help="both have the same steps")
    parser.add_argument("--means", action="store_true", help="intervals of one mean, 90 %%")
    args = parser.parse_args()
    if args.runs:
        real_pairs(args.runs)
        return 0
    if args.means:
        print("| steps | autocorrelation | normal | long tails |\n| --- | --- | --- | --- |")
    else:
        rises = " | ".join(f"+{rise:.0%}" for rise in RISES)
        print(
            f"| steps | autocorrelation | anything significant | `{GATE}` | coverage | {rises} | "
            f"independent | blocks |\n|{' --- |' * (7 + len(RISES))}"
        )
    seeds = range(args.seed, args.seed + args.pairs)
    for steps in args.steps:
        for rho in args.rho:
            if args.means:
                made_means(seeds, steps, rho)
            else:
                made_pairs(seeds, steps, rho, same_steps=args.same_steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
