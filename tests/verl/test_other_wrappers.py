"""Other people's tracers at once with ours, in either order: nothing counted twice, nothing broken."""

import pytest

# Three calls that return, one that fails, one that is cancelled.
CALLS = 5


@pytest.fixture(scope="module")
def report(reported):
    """What each counted, by what was done."""
    return reported("other_wrappers.py")


@pytest.mark.parametrize("backend", ["weave", "mlflow"])
def test_verls_rollout_trace_and_ours_each_count_every_call_once(report, backend):
    """Weave is a stand-in for its client functions, and so is mlflow where it is not installed."""
    found = report[f"rollout_trace {backend}"]

    assert [] == found["odd"]
    assert {} == found["failures"]
    assert {"LLMServerClient.generate": CALLS} == found["theirs"]
    assert (CALLS, CALLS) == (found["ours"]["engine_call"], found["ours"]["server_acquire"])


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_the_order_of_wrapping_does_not_matter(report, order):
    """A decorator below ours, or put on top of it later."""
    found = report[order]

    assert [] == found["odd"]
    assert {} == found["failures"]
    assert {"LLMServerClient._acquire_server": CALLS} == found["theirs"]
    assert (CALLS, CALLS) == (found["ours"]["engine_call"], found["ours"]["server_acquire"])


def test_taking_ours_off_leaves_theirs_as_it_was(report):
    """The very object that was there before."""
    assert report["theirs first"]["restored"]


def test_ours_that_cannot_be_taken_off_below_theirs_counts_no_call_twice(report):
    """Their wrapper still holds ours; a recorder that is started later may meet it."""
    found = report["ours taken off below theirs"]

    assert [] == found["odd"]
    assert {"LLMServerClient._acquire_server": CALLS} == found["theirs"]
    assert found["ours"].get("server_acquire", 0) in (0, CALLS)


@pytest.mark.parametrize("again", ["ours placed again below theirs", "and once more"])
def test_ours_placed_again_counts_once(report, again):
    """However often it was taken off and placed with their wrapper on top."""
    found = report[again]

    assert [] == found["odd"]
    assert {"LLMServerClient._acquire_server": CALLS} == found["theirs"]
    assert CALLS == found["ours"]["server_acquire"]


def test_verls_profiler_and_rl_insight_run_as_without_us(report):
    """`DistProfiler.annotate`, `marked_timer` and the logger backend, in what is a trainer for us."""
    found = report["verl's profiler and rl-insight"]

    assert [] == found["odd"]
    assert {} == found["failures"]
    assert {"actor_update": 4, "critic_score": 2, "training_global_step": 2} == found["theirs"]
    assert (4, 4) == (found["ours"]["update_actor"], found["ours"]["adv"])
    assert 2 == found["ours"]["metrics"]
