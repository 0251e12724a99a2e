"""Two groups of steps: what is told apart, and what is not."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiler.comparison import ALPHA, Change, Figure, adjusted, change, smallest_p


def figures(seed, sizes, *, shift=1.0, same_steps=False, count=12):
    """Figures of steps as a training has them: with long tails, and slow all at once."""
    source = random.Random(seed)
    first = [source.lognormvariate(0, 0.3) for _ in range(sizes[0])]
    second = [source.lognormvariate(0, 0.3) * shift for _ in range(sizes[1])]

    def values(steps, begin):
        return {
            begin + place: step * source.lognormvariate(2, 0.1) for place, step in enumerate(steps)
        }

    return [
        Figure(
            f"f{number}",
            "s",
            values(first, 2),
            values(second, 2 if same_steps else 100),
            ("mean", "p50", "p95")[number % 3],
        )
        for number in range(count)
    ]


def compared(asked):
    changes = [change(figure) for figure in asked]
    adjusted(changes)
    return changes


@pytest.mark.parametrize(("size", "same_steps"), [(5, False), (6, False), (8, True)])
def test_equal_groups_are_rarely_called_different(size, same_steps):
    """Any of six figures, in about one of twenty comparisons at most."""
    alarms = sum(
        any(
            each.certain
            for each in compared(figures(seed, (size, size), same_steps=same_steps, count=6))
        )
        for seed in range(30)
    )

    assert alarms <= 4


@pytest.mark.parametrize(("sizes", "same_steps"), [((7, 13), False), ((9, 9), True)])
def test_the_other_way_round_it_is_the_same_change(sizes, same_steps):
    """Random deals are the same ones, so what is certain of A and B is certain of B and A."""
    asked = figures(3, sizes, shift=1.2, same_steps=same_steps, count=6)
    turned = [Figure(each.name, each.unit, each.b, each.a, each.statistic) for each in asked]
    for one, other in zip(compared(asked), compared(turned), strict=True):
        assert (one.p, one.p_up, one.p_down) == (other.p, other.p_down, other.p_up)
        assert (one.low, one.high) == (-other.high, -other.low)
        assert one.adjusted_p == other.adjusted_p


def test_large_changes_are_certain():
    """Twice as long, with ten steps of each."""
    changes = compared(figures(1, (10, 10), shift=2.0))

    assert all(each.certain for each in changes)
    assert all(each.p_up <= each.p and each.p_down > 0.9 for each in changes)


def test_pairs_find_what_groups_cannot():
    """Steps differ tenfold, and each is 3 % longer in the second run."""
    lengths = {step: 2.0 ** (step % 5) for step in range(1, 13)}
    longer = {step: length * 1.03 for step, length in lengths.items()}
    elsewhere = {step + 50: length for step, length in longer.items()}

    assert change(Figure("f", "s", lengths, longer)).p < 0.01
    assert change(Figure("f", "s", lengths, elsewhere)).p > 0.5


@pytest.mark.parametrize(("a", "b", "least"), [(1, 1, 1 / 2), (3, 3, 1 / 20), (2, 6, 1 / 28)])
def test_few_steps_can_only_tell_so_much(a, b, least):
    """Counted by hand; with too few, nothing is said."""
    assert pytest.approx(least) == smallest_p(a, b)
    found = change(
        Figure("f", "s", dict.fromkeys(range(a), 1.0), dict.fromkeys(range(50, 50 + b), 9.0))
    )
    assert (found.p_up is None) == (least > ALPHA)
    if found.p_up is not None:
        assert pytest.approx(least) == found.p_up


def test_exchanges_are_counted_as_by_hand():
    """Two and three steps: of ten ways to deal, the measured one alone is the highest."""
    # 2 of 5 steps: (1, 2) against (3, 4, 9) has the largest difference of all ten.
    found = change(Figure("f", "s", {1: 1.0, 2: 2.0, 3: 3.0}, {11: 4.0, 12: 9.0, 13: 11.0}))

    assert pytest.approx(1 / 20) == found.p_up
    # Its mirror image is as large, so that nothing both ways can be certain with six steps.
    assert found.p is None
    assert 1.0 == found.p_down
    found = change(Figure("f", "s", {1: 1.0, 2: 2.0}, dict.fromkeys(range(11, 18), 9.0)))
    assert pytest.approx(1 / 36) == found.p


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """In 95 of 100 cases; 60 intervals each of means of few steps and of many."""
    for size in (4, 8, 15):
        held = 0
        for seed in range(60):
            source = random.Random(seed)
            first = {step: source.gauss(10, 1) for step in range(size)}
            second = {step + 50: source.gauss(11, 1) for step in range(size)}
            found = change(Figure("f", "s", first, second))
            held += found.low <= 1 <= found.high

        assert held >= 52


def test_one_step_has_no_interval():
    """And no chance."""
    found = change(Figure("f", "s", {2: 5.0}, {2: 7.0}))

    assert (5.0, 7.0, None, None, None) == (found.a, found.b, found.low, found.high, found.p)
    assert 0.4 == found.share


def test_the_false_discovery_rate_is_benjamini_and_hochbergs():
    """Their own example of fifteen, of which four are kept at 5 %."""
    chances = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240]
    chances += [0.4262, 0.5719, 0.6528, 0.7590, 1.000]
    figure = Figure("f", "s", {1: 1.0}, {1: 1.0})
    changes = [Change(figure, 1, 1, None, None, chance, None, None) for chance in chances]
    adjusted(changes)

    assert 4 == sum(each.certain for each in changes)
    assert pytest.approx(0.0015) == changes[0].adjusted_p
    assert pytest.approx(0.0095 * 15 / 4) == changes[3].adjusted_p


@settings(max_examples=30, deadline=None)
@given(
    first=st.lists(st.floats(0.001, 1e4), min_size=1, max_size=6),
    second=st.lists(st.floats(0.001, 1e4), min_size=1, max_size=6),
    statistic=st.sampled_from(["mean", "p50", "p95", "max"]),
)
def test_turned_round_it_says_the_opposite(first, second, statistic):
    """Chances are the same, and the interval holds the difference of means that was measured."""
    a = dict(enumerate(first))
    b = dict(enumerate(second, 50))
    found, other = (change(Figure("f", "s", *both, statistic)) for both in ((a, b), (b, a)))

    assert found.b - found.a == -(other.b - other.a)
    if found.p is not None:
        assert math.isclose(found.p, other.p, abs_tol=0.11)
        assert math.isclose(found.p_up, other.p_down, abs_tol=0.11)
        assert 0 < found.p <= 1
