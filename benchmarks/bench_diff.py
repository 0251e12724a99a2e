"""Count the false alarms of `diff`, what its intervals cover, and what it detects.

    python benchmarks/bench_diff.py                     made-up runs, 1,000 pairs per row
    python benchmarks/bench_diff.py --steps 4 8 20      with so many steps each
    python benchmarks/bench_diff.py --heavy             Student's noise of 3 degrees of freedom
    python benchmarks/bench_diff.py --seed 70000        pairs that no constant was chosen on
    python benchmarks/bench_diff.py --means             intervals of what-if
    python benchmarks/bench_diff.py --ceiling           the most power that any test can have
    python benchmarks/bench_diff.py RUN RUN RUN         all pairs of runs of the same kind

Steps are autocorrelated (AR(1)) and have long tails, or heavy ones with --heavy; what makes a step slow
makes its metrics slow.  In brackets: Welch's test, which takes steps for independent.
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
from scipy import optimize, special, stats

from verl_profiler.analysis.compare.comparison import (
    ALPHA,
    Metric,
    adjusted,
    change,
)
from verl_profiler.analysis.compare.differences import condition
from verl_profiler.analysis.intervals import mean
from verl_profiler.cli import main as command

GATE = "step > +5%"
HEADLINE = ("step.mean", "gen.mean", "generated_tokens_per_s.mean")
METRICS = 12
# Of a step, as a share of its mean; and what of it all metrics have in common.
SPREAD = 0.2
COMMON = 0.6
RISES = (0.1, 0.2, 0.5)
# Steps made before those of a run, so that heavy-tailed series are stationary.
_BEFORE = 30


def series(
    source: np.random.Generator, count: int, steps: int, rho: float, *, heavy: bool = False
) -> np.ndarray:
    """Return stationary AR(1) series of variance 1, one per row."""
    shape = (count, _BEFORE + steps)
    made = source.standard_t(3, shape) / np.sqrt(3) if heavy else source.standard_normal(shape)
    for step in range(1, shape[1]):
        made[:, step] = rho * made[:, step - 1] + np.sqrt(1 - rho**2) * made[:, step]
    return made[:, _BEFORE:]


def made_run(source: np.random.Generator, steps: int, rho: float, *, heavy: bool) -> np.ndarray:
    """Return the metrics of a made-up run, by metric and step."""
    common = series(source, 1, steps, rho, heavy=heavy)
    own = series(source, METRICS, steps, rho, heavy=heavy)
    noise = SPREAD * (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * own)
    return 1 + noise if heavy else np.exp(noise)


def metrics(first: np.ndarray, second: np.ndarray, *, same_steps: bool) -> list[Metric]:
    """Return a pair's metrics, the headline's three first."""
    names = [*HEADLINE, *(f"other_{place}.mean" for place in range(METRICS - len(HEADLINE)))]
    begin = 0 if same_steps else 1_000
    return [
        Metric(name, "s", dict(enumerate(a)), dict(enumerate(b, begin)))
        for name, a, b in zip(names, first.tolist(), second.tolist(), strict=True)
    ]


def made_pairs(
    seeds: Sequence[int], steps: int, rho: float, *, same_steps: bool, heavy: bool
) -> None:
    """Print what becomes of pairs that do not differ, and of pairs that do; one pair per seed."""
    gate = condition(GATE)
    counts = np.zeros(4)
    detected, welch = np.zeros((2, len(RISES)))
    covered = tested = 0
    pairs = len(seeds)
    for seed in seeds:
        source = np.random.default_rng((seed, steps, round(rho * 100)))
        first, second = (made_run(source, steps, rho, heavy=heavy) for _ in range(2))
        made = metrics(first, second, same_steps=same_steps)
        changes = [change(metric) for metric in made]
        adjusted(changes)
        covered += sum(
            each.low <= 0 <= each.high
            for each in changes
            if each.low is not None and each.high is not None
        )
        tested += len(changes)
        # The gate at its limit: B is 5 % slower.
        at_limit = metrics(first, second * 1.05, same_steps=same_steps)[0]
        counts += [
            any(each.significant for each in changes),
            changes[0].p is not None and changes[0].p <= ALPHA,
            stats.ttest_ind(first[0], second[0], equal_var=False).pvalue <= ALPHA,
            (gate.p(at_limit) or 0) <= ALPHA,
        ]
        for place, rise in enumerate(RISES):
            step = metrics(first, second * (1 + rise), same_steps=same_steps)[0]
            p = change(step).p
            detected[place] += p is not None and p <= ALPHA
            slower = second[0] * (1 + rise)
            welch[place] += stats.ttest_ind(first[0], slower, equal_var=False).pvalue <= ALPHA
    anything, step_alarms, by_welch, gated = counts / pairs
    cells = [f"{steps}", f"{rho}", f"{anything:.1%}", f"{step_alarms:.1%} ({by_welch:.1%})"]
    cells += [f"{gated:.1%}", f"{covered / tested:.1%}"]
    cells += [
        f"{ours / pairs:.0%} ({other / pairs:.0%})"
        for ours, other in zip(detected, welch, strict=True)
    ]
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


# Autocorrelations, and the false alarms allowed at each.
ALLOWED = ((0.0, 0.05), (0.3, 0.05), (0.5, 0.10))


def likelihood(pairs: np.ndarray, rho: float, shift: float) -> np.ndarray:
    """Return the logarithm of the density of pairs (normal, `shift` standard deviations apart).

    Up to a constant; of what no change of unit or level alters, which is all that a test may depend on.
    """
    count, both = len(pairs), pairs.shape[1]
    places = np.arange(both // 2)
    covariance = np.kron(np.eye(2), rho ** abs(places[:, None] - places))
    inverse, one = np.linalg.inv(covariance), np.ones(both)
    centered = inverse - np.outer(inverse @ one, inverse @ one) / (one @ inverse @ one)
    apart = np.repeat([-0.5, 0.5], both // 2) * shift
    squares = np.einsum("ij,jk,ik->i", pairs, centered, pairs).reshape(count, 1)
    scales = np.sqrt((both - 1) / squares) * np.exp(np.linspace(-2.5, 2.5, 61))
    exponents = (both - 1) * np.log(scales) - scales**2 * squares / 2
    exponents += scales * (pairs @ centered @ apart).reshape(count, 1)
    level = np.linalg.slogdet(covariance)[1] + np.log(one @ inverse @ one)
    return special.logsumexp(exponents, axis=1) - (level + apart @ centered @ apart) / 2


def ceiling(seed: int, steps: int, rise: float, pairs: int = 20_000) -> tuple[float, float]:
    """Return the most power of any test with `ALLOWED` false alarms, and Welch's, at independent steps.

    By the lemma of Neyman and Pearson with several null hypotheses: each choice of weights gives an upper bound.
    """
    shift = np.log(1 + rise) / SPREAD
    made = np.random.default_rng((seed, steps, round(100 * rise))).standard_normal(
        (pairs, 2 * steps)
    )
    made[:, steps:] += shift
    changed = np.logaddexp(*(likelihood(made, 0.0, each) for each in (shift, -shift))) - np.log(2)
    ratios = np.exp([likelihood(made, rho, 0.0) - changed for rho, _ in ALLOWED])
    levels = np.array([level for _, level in ALLOWED])

    def bound(logarithms: np.ndarray) -> float:
        weights = np.exp(logarithms)
        return float(np.maximum(0, 1 - weights @ ratios).mean() + weights @ levels)

    starts = ([0, 0, 0], [-3, 1, -3], [-3, -3, 1], [1, 1, 1])
    found = [optimize.minimize(bound, start, method="Nelder-Mead").fun for start in starts]
    p = stats.ttest_ind(made[:, steps:], made[:, :steps], axis=1, equal_var=False).pvalue
    return min(found), float((p <= ALPHA).mean())


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
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 5, 10, 20, 40], help="of each")
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.8])
    parser.add_argument("--same-steps", action="store_true", help="both have the same steps")
    parser.add_argument("--heavy", action="store_true", help="noise with heavy tails")
    parser.add_argument("--means", action="store_true", help="intervals of one mean, 90 %%")
    parser.add_argument("--ceiling", action="store_true", help="the most power of any test")
    args = parser.parse_args()
    if args.runs:
        real_pairs(args.runs)
        return 0
    if args.ceiling:
        for steps in args.steps:
            for rise in RISES:
                most, welch = ceiling(args.seed, steps, rise)
                print(
                    f"| {steps} | +{rise:.0%} | {most:.2f} | {welch:.2f} | {most / welch:.2f} |",
                    flush=True,
                )
        return 0
    if args.means:
        print("| steps | autocorrelation | normal | long tails |\n| --- | --- | --- | --- |")
    else:
        rises = " | ".join(f"+{rise:.0%}" for rise in RISES)
        print(
            f"| steps | autocorrelation | anything significant | step significant | `{GATE}` at +5% | "
            f"coverage | {rises} |\n|{' --- |' * (6 + len(RISES))}"
        )
    seeds = range(args.seed, args.seed + args.pairs)
    for steps in args.steps:
        for rho in args.rho:
            if args.means:
                made_means(seeds, steps, rho)
            else:
                made_pairs(seeds, steps, rho, same_steps=args.same_steps, heavy=args.heavy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
