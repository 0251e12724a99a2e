"""Intervals and tests on made-up series whose truth is known."""

import numpy as np
import pytest
from scipy import stats

from verl_profiler.analysis.intervals import jump, mean, mean_difference


def series(source, count, steps, rho):
    """AR(1) series of variance 1 and mean 0, one per row."""
    noise = source.standard_normal((count, steps))
    made = noise.copy()
    for step in range(1, steps):
        made[:, step] = rho * made[:, step - 1] + np.sqrt(1 - rho**2) * noise[:, step]
    return made


def by_step(values, begin=1):
    return dict(enumerate(values.tolist(), begin))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("steps", [5, 20])
def test_series_that_do_not_differ_rarely_seem_to(steps, rho):
    """A test at 5 %: 150 pairs, so 8 alarms are expected at most and 15 are beyond chance."""
    source = np.random.default_rng(steps)
    pairs = zip(*(series(source, 150, steps, rho) for _ in range(2)), strict=True)
    alarms = sum(mean_difference(by_step(a), by_step(b, 100)).p <= 0.05 for a, b in pairs)

    assert alarms <= 15


def test_the_same_series_fail_a_test_that_takes_steps_for_independent():
    """So the test above can fail."""
    source = np.random.default_rng(20)
    pairs = zip(*(series(source, 150, 20, 0.8) for _ in range(2)), strict=True)
    alarms = sum(stats.ttest_ind(a, b).pvalue <= 0.05 for a, b in pairs)

    assert alarms > 50


@pytest.mark.parametrize(
    ("steps", "rho"), [(3, 0.0), (3, 0.5), (5, 0.5), (8, 0.0), (8, 0.5), (20, 0.5), (20, 0.8)]
)
def test_intervals_of_a_mean_hold_the_truth_as_often_as_they_promise(steps, rho):
    """90 % of 200; 88 % is the bar, less what chance may take from 200."""
    source = np.random.default_rng(7)
    held = 0
    for row in series(source, 200, steps, rho):
        low, high = mean(row.tolist()).interval(0.9)
        held += low <= 0 <= high

    assert held >= 0.88 * 200 - 2 * np.sqrt(200 * 0.88 * 0.12)


def test_without_autocorrelation_not_much_power_is_lost():
    """A shift of one standard deviation, 20 steps: Student's own test finds 87 %."""
    source = np.random.default_rng(3)
    pairs = list(zip(*(series(source, 100, 20, 0.0) for _ in range(2)), strict=True))
    found = sum(mean_difference(by_step(a), by_step(b + 1, 100)).p <= 0.05 for a, b in pairs)
    students = sum(stats.ttest_ind(a, b + 1).pvalue <= 0.05 for a, b in pairs)

    assert found >= 0.85 * students


def test_a_detectable_change_is_detected_in_about_four_of_five():
    """Where the series' own noise is what the estimate takes it for."""
    source = np.random.default_rng(4)
    pairs = list(zip(*(series(source, 150, 20, 0.5) for _ in range(2)), strict=True))
    sizes = [mean_difference(by_step(a), by_step(b, 100)).detectable for a, b in pairs]
    found = sum(
        mean_difference(by_step(a), by_step(b + size, 100)).p <= 0.05
        for (a, b), size in zip(pairs, sizes, strict=True)
    )

    assert 0.7 * 150 <= found <= 0.95 * 150


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_an_interval_excludes_zero_just_where_p_is_small(level):
    """One is the other, turned round."""
    source = np.random.default_rng(5)
    for a, b in zip(*(series(source, 40, 6, 0.3) for _ in range(2)), strict=True):
        found = mean_difference(by_step(a), by_step(b + 2, 100))
        low, high = found.interval(level)
        assert (found.p <= 1 - level) == (low > 0 or high < 0)
        assert low < found.value < high


def test_independent_steps_are_worth_themselves_and_others_fewer():
    """Effective steps: 200 of no autocorrelation, and 200 at 0.8, worth 200 / 9 in the limit."""
    source = np.random.default_rng(6)
    free, tied = (mean(series(source, 1, 200, rho)[0].tolist()).effective[0] for rho in (0.0, 0.8))

    assert 150 < free <= 200.1
    assert 12 < tied < 40


def test_gaps_between_steps_make_them_less_alike():
    """The same values every tenth step are worth more than in a row."""
    values = series(np.random.default_rng(8), 1, 12, 0.8)[0].tolist()
    near, far = (
        mean(values, [place * apart for place in range(12)]).effective[0] for apart in (1, 10)
    )

    assert near < far


def test_series_that_do_not_vary():
    """Counts may be the same in every step: no difference is none, and another is one."""
    ones, twos = dict.fromkeys(range(5), 1.0), dict.fromkeys(range(5), 2.0)
    assert pytest.approx(1.0) == mean_difference(ones, dict(ones)).p
    found = mean_difference(ones, twos)
    assert found.p < 1e-6
    assert (1, 1) == pytest.approx(found.interval())
    zeros = dict.fromkeys(range(5), 0.0)
    assert pytest.approx(1.0) == mean_difference(zeros, dict(zeros)).p
    assert mean_difference(zeros, ones).p < 1e-6
    # One outlier among constants is as likely without autocorrelation.
    once = mean_difference(dict.fromkeys(range(10), 5.0), {**dict.fromkeys(range(10), 1.0), 4: 5.0})
    assert once.interval()[1] < 0


def test_few_steps_have_no_interval():
    """Two of either."""
    two, many = {1: 1.0, 2: 2.0}, {9: 1.0, 10: 2.0, 11: 3.0}
    assert mean([1.0, 2.0]) is None
    assert mean_difference(two, many) is None
    assert mean_difference(many, two) is None
    assert jump(two, many) is None


def test_a_drift_is_no_jump():
    """20 steps that grow by a tenth each, with independent noise; and the same with a jump of 3."""
    noise = np.random.default_rng(9).standard_normal(20) * 0.3
    grown = np.arange(20) * 0.1 + noise
    first, second = by_step(grown[:10]), by_step(grown[10:], 11)

    assert mean_difference(first, second).p < 0.2
    assert jump(first, second).p > 0.05
    found = jump(first, {step: value + 3 for step, value in second.items()})
    assert found.p < 0.01
    assert found.value == pytest.approx(3, abs=0.8)


def test_pairs_take_out_what_both_have_in_common():
    """Steps differ tenfold, and each is 3 % longer in the second run."""
    lengths = {step: 2.0 ** (step * 7 % 5) for step in range(1, 13)}
    longer = {step: length * 1.03 for step, length in lengths.items()}

    assert mean_difference(lengths, longer, paired=True).p < 0.05
    assert mean_difference(lengths, longer).p > 0.5
