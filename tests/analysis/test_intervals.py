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


def noisy_series(source, count, steps, rho, noise):
    """AR(1) series: normal; exponentiated, so with a long tail; or with heavy tails (Student's of 3)."""
    if noise == "heavy":
        made = source.standard_t(3, (count, steps + 30))
        for step in range(1, steps + 30):
            made[:, step] = rho * made[:, step - 1] + np.sqrt(1 - rho**2) * made[:, step]
        return made[:, 30:]
    made = series(source, count, steps, rho)
    return np.exp(made / 2) if noise == "lognormal" else made


KINDS = [
    (0.0, "normal", 0.05),
    (0.0, "heavy", 0.05),
    (0.3, "normal", 0.05),
    (0.3, "lognormal", 0.05),
    (0.3, "heavy", 0.05),
    (0.5, "normal", 0.1),
]
GRID = [
    pytest.param(
        steps,
        *kind,
        pairs,
        marks=() if pairs == 200 and steps in {3, 20} else pytest.mark.nightly,
    )
    for pairs in (200, 2_000)
    for steps in (3, 4, 5, 7, 10, 15, 20, 30, 40)
    for kind in KINDS
    if pairs == 2_000 or steps in {3, 20}
]


@pytest.mark.parametrize(("steps", "rho", "noise", "limit", "pairs"), GRID)
def test_series_that_do_not_differ_rarely_seem_to(steps, rho, noise, limit, pairs):
    """A test at 5 %, and three standard errors beyond the limit."""
    source = np.random.default_rng(steps)
    made = zip(*(noisy_series(source, pairs, steps, rho, noise) for _ in range(2)), strict=True)
    alarms = sum(mean_difference(by_step(a), by_step(b, 100)).p <= 0.05 for a, b in made)

    assert alarms <= pairs * limit + 3 * np.sqrt(pairs * limit * (1 - limit))


def test_steps_without_overlap_differ():
    """The tutorial's fix: 9 steps of 18 to 31 s against 10 to 14 s; Mann and Whitney's exact p is 4e-5."""
    slow = np.array([24.3, 27.8, 24.7, 19.8, 20.3, 21.3, 22.2, 18.1, 31.1])
    fixed = np.array([14.4, 11.9, 10.1, 10.3, 13.0, 12.3, 12.3, 14.1, 13.0])
    found = mean_difference(by_step(slow), by_step(fixed))

    assert found.p < 0.01
    assert found.interval()[1] < -3.06
    assert all(4 < each <= 9 for each in found.effective)


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


# Steps, changes in standard deviations of a step, and how much of Welch's power there has to be.  Where
# it is less than 0.85, no test has more whose false alarms at an autocorrelation of 0.3 are 5 %.
POWER = [
    (5, 2.0, 0.55),
    (5, 3.0, 0.85),
    (5, 5.0, 0.95),
    (10, 1.0, 0.6),
    (10, 1.75, 0.85),
    (10, 2.5, 0.95),
    (20, 0.75, 0.85),
    (20, 1.0, 0.9),
    (20, 1.5, 0.95),
]


@pytest.mark.parametrize(
    ("steps", "shift", "least", "pairs"),
    [
        *((*each, 400) for each in POWER if each[2] == 0.85),
        *(pytest.param(*each, 2_000, marks=pytest.mark.nightly) for each in POWER),
    ],
)
def test_without_autocorrelation_not_much_power_is_lost(steps, shift, least, pairs):
    """Compared with Welch's test, which takes steps for independent."""
    source = np.random.default_rng(3)
    made = list(zip(*(series(source, pairs, steps, 0.0) for _ in range(2)), strict=True))
    found = sum(mean_difference(by_step(a), by_step(b + shift, 100)).p <= 0.05 for a, b in made)
    welch = sum(stats.ttest_ind(a, b + shift, equal_var=False).pvalue <= 0.05 for a, b in made)

    assert found >= least * welch


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


def test_pairs_take_out_what_both_have_in_common():
    """Steps differ tenfold, and each is 3 % longer in the second run."""
    lengths = {step: 2.0 ** (step * 7 % 5) for step in range(1, 13)}
    longer = {step: length * 1.03 for step, length in lengths.items()}

    assert mean_difference(lengths, longer, paired=True).p < 0.05
    assert mean_difference(lengths, longer).p > 0.5
