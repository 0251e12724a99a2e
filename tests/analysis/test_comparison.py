"""Two groups of steps: what is significant, and what is not."""

import numpy as np
import pytest
from analysis.test_intervals import series

from verl_profiler.analysis.compare.comparison import (
    ALPHA,
    Change,
    Metric,
    adjusted,
    change,
)

HEADLINE = ("step.mean", "gen.mean", "generated_tokens_per_s.mean")
COUNT = 8


def made_run(source, steps, rho):
    """Metrics of a run: autocorrelated, with long tails, and slow all at once."""
    made = series(source, COUNT + 1, steps, rho)
    return np.exp(0.25 * (0.8 * made[0] + 0.6 * made[1:]))


def metrics(first, second, *, begin=100):
    names = (*HEADLINE, *(f"f{number}.mean" for number in range(COUNT - len(HEADLINE))))
    return [
        Metric(name, "s", dict(enumerate(a)), dict(enumerate(b, begin)))
        for name, a, b in zip(names, first.tolist(), second.tolist(), strict=True)
    ]


def compared(asked):
    changes = [change(metric) for metric in asked]
    adjusted(changes)
    return changes


@pytest.mark.parametrize(("rho", "begin"), [(0.0, 100), (0.5, 100), (0.5, 0)])
def test_runs_that_do_not_differ_rarely_have_a_significant_change(rho, begin):
    """Any of eight metrics, in 40 pairs: 2 are expected, and 7 are beyond chance."""
    alarms = 0
    for seed in range(40):
        source = np.random.default_rng(seed)
        first, second = made_run(source, 20, rho), made_run(source, 20, rho)
        alarms += any(each.significant for each in compared(metrics(first, second, begin=begin)))

    assert alarms <= 6


def test_four_steps_of_each_show_a_large_change():
    """8.10 s and 4.79 s: the interval and the test of the headline agree, among sixty metrics."""
    a = dict(enumerate((8.3, 7.9, 8.2, 8.0)))
    b = dict(enumerate((4.9, 4.6, 4.8, 4.86), 10))
    source = np.random.default_rng(1)
    others = [
        Metric(f"f{place}.mean", "s", *(dict(enumerate(source.uniform(1, 2, 4))) for _ in "ab"))
        for place in range(60)
    ]
    for pair in ((a, b), (b, a)):
        step, *_ = compared([Metric("step.mean", "s", *pair), *others])
        assert step.significant
        assert step.low > 0 or step.high < 0
        assert step.adjusted_p == step.p


@pytest.mark.parametrize("statistic", ["mean", "p50"])
def test_the_other_way_round_it_is_the_opposite_change(statistic):
    """So what is significant of A and B is significant of B and A."""
    source = np.random.default_rng(3)
    a, b = (dict(enumerate(source.lognormal(0, 0.3, size))) for size in (7, 13))
    one, other = (change(Metric("f", "s", *pair, statistic)) for pair in ((a, b), (b, a)))

    assert one.difference == pytest.approx(-other.difference)
    assert one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_what_has_no_interval():
    """Two steps; a maximum; a 95th percentile of ten steps."""
    few = change(Metric("f", "s", {2: 5.0}, {2: 7.0}))
    assert (5.0, 7.0, 2.0, 0.4) == (few.a, few.b, few.difference, few.share)
    steps = dict(enumerate(range(10)))
    for metric in (
        Metric("f", "s", steps, dict(steps), "max"),
        Metric("f", "s", steps, dict(steps), "p95"),
    ):
        found = change(metric)
        assert [None] * 4 == [found.low, found.high, found.p, found.detectable]
    assert [None] * 4 == [few.low, few.high, few.p, few.detectable]


def test_a_drift_within_one_run_is_not_a_change():
    """Twenty steps that grow by 2 % each; the same numbers of two runs are a change."""
    noise = np.random.default_rng(2).normal(0, 0.05, 40)
    grown = (4 + 0.1 * np.arange(40) + noise).tolist()
    first, second = dict(enumerate(grown[:20])), dict(enumerate(grown[20:], 20))
    within = change(Metric("step.mean", "s", first, second, one_run=True))

    assert within.p > ALPHA
    jumped = {step: value + 3 for step, value in second.items()}
    assert change(Metric("step.mean", "s", first, jumped, one_run=True)).p <= ALPHA


def test_the_false_discovery_rate_is_benjamini_and_hochbergs():
    """Their own example of fifteen, at 1 %: 0.0001, 0.0004 and 0.0019 are kept, 0.0095 is not."""
    chances = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240]
    chances += [0.4262, 0.5719, 0.6528, 0.7590, 1.000]
    changes = [
        Change(Metric(f"f{place}", "s", {1: 1.0}, {1: 1.0}), 1, 1, 0, p=chance)
        for place, chance in enumerate(chances)
    ]
    adjusted(changes)

    assert 3 == sum(each.significant for each in changes)
    assert pytest.approx(0.0015 * 5) == changes[0].adjusted_p
    assert pytest.approx(0.0095 * 15 / 4 * 5) == changes[3].adjusted_p


def test_the_headline_is_tested_apart_and_in_order():
    """Gen at 5 % where the step is significant, and at its part of 1 % where it is not."""

    def tested(*chances):
        changes = [
            Change(Metric(name, "s", {1: 1.0}, {1: 1.0}), 1, 1, 0, p=chance)
            for name, chance in zip((*HEADLINE, "other.mean"), chances, strict=True)
        ]
        adjusted(changes)
        return [each.significant for each in changes]

    assert [True, True, False, False] == tested(0.04, 0.04, 0.06, 0.04)
    assert [False, False, False, True] == tested(0.06, 0.04, 0.04, 0.009)
    assert [False, True, False, False] == tested(0.06, 0.004, 0.04, 0.03)
