"""Balanced event loops, against a simulation of loops with the balanced work."""

import random

import pytest
from truth.event_loops import blocked
from truth.synthetic import Request, Step, Turn, run_of

from verl_profiler.analysis.explain.changes import CHANGES
from verl_profiler.analysis.explain.model import Dispatch, Mark, Model, Take, Tools, Unit, Work
from verl_profiler.analysis.explain.model import Request as ModelRequest
from verl_profiler.analysis.explain.replay import lengths_us
from verl_profiler.analysis.explain.what_if import step_replays


def _turns(rng):
    count = rng.choice((1, 2, 2, 3, 3, 4, 6))
    for number in range(count):
        tool = ("search", round(60_000 * rng.lognormvariate(0, 0.6)))
        yield Turn(tokens=rng.randrange(10, 60), tools=(tool,) if number < count - 1 else ())


def step_of(seed):
    """Make 32 requests; both workers have equally many turns, with other tokens and tools."""
    rng = random.Random(seed)
    counts = [rng.random() for _ in range(16)]
    return Step(
        requests=tuple(
            Request(
                turns=tuple(_turns(random.Random(counts[place // 2]))),
                worker=place % 2,
                replica=place % 2,
            )
            for place in range(32)
        )
    )


def saved_us(step, before, after):
    """Return what balanced loops save in the simulation and by the model, and the step's length."""
    tables, (truth,) = run_of(blocked(step, before))
    (row,) = [row for row in step_replays(tables) if row["what"] == "even_workers"]
    saved = truth.duration_us - run_of(blocked(step, after))[1][0].duration_us
    return saved, row["earlier_s"] * 1e6, truth.duration_us


@pytest.mark.parametrize(
    "blocks_us",
    [
        (200_000, 300),
        pytest.param((100_000, 20_000), marks=pytest.mark.nightly),
        pytest.param((200_000, 100_000), marks=pytest.mark.nightly),
        (30_000, 300),
    ],
)
def test_requests_wait_less_for_a_balanced_loop(blocks_us):
    """Most of a blocked loop's cost is what its other requests wait for it.

    Which request is the last is chance in a single step, so these are sums of six.
    """
    found = [saved_us(step_of(seed), blocks_us, (sum(blocks_us) / 2,) * 2) for seed in range(6)]
    truth, predicted, step_us = (sum(each) for each in zip(*found, strict=True))

    assert truth > 0.05 * step_us
    # A tool that answers while its loop is blocked is assumed to take its median time.
    assert predicted == pytest.approx(truth, rel=0.35 if max(blocks_us) < 50_000 else 0.2)


def test_loops_that_hardly_work_change_nothing():
    """Half a millisecond per turn: what is saved is below the noise of a poll."""
    truth, predicted, _ = saved_us(step_of(1), (5_000, 500), (2_750, 2_750))

    assert abs(truth) < 60_000
    assert abs(predicted) < 60_000


def test_by_hand():
    """Two requests of one worker, 100 us of work each; the other worker has none.

    The second waits 100 us before it begins.  At half the work they end at 50 and 100 us.
    """
    first, second = (
        ModelRequest(begin, 100.0, "a", 1, (Work(100.0, own=True),)) for begin in (0.0, 100.0)
    )
    idle = ModelRequest(0.0, 1.0, "b", 1, (Work(0.0, own=True), Tools(((0.0, 1.0, "t"),), 0)))
    operations = Mark(0), Dispatch(), Take(1, 0.0)
    model = Model("run", (1,), (200.0,), operations, (Unit((first, second, idle)),))
    changed = CHANGES["even_workers"].changed(model, [model])

    assert lengths_us(changed.before) == pytest.approx([200.0])
    assert lengths_us(*changed.models) == pytest.approx([100.0])
