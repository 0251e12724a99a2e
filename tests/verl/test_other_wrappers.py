"""Other people's tracers at once with ours, in either order: nothing counted twice, nothing broken."""

import pytest

# tests/instrumentation has other wrappers around ours on each push.
pytestmark = pytest.mark.nightly

# Three calls that return, one that fails, one that is cancelled.
CALLS = 5


@pytest.fixture(scope="module")
def report(reported):
    """What each counted, by what was done."""
    return reported("other_wrappers.py")


@pytest.mark.parametrize(
    "case",
    [
        # verl's own decorator; weave is a stand-in, and so is mlflow where it is not installed.
        "rollout_trace weave",
        "rollout_trace mlflow",
        # The same decorator below ours, and on top of it.
        "theirs first",
        "ours first",
        # Theirs still holds ours: a recorder that is started later may meet it, and ours is placed again.
        "ours taken off below theirs",
        "ours placed again below theirs",
        "and once more",
    ],
)
def test_each_counts_every_call_once(report, case):
    """In any order; taking ours off leaves theirs as it was."""
    found = report[case]
    name = "generate" if case.startswith("rollout_trace") else "_acquire_server"

    assert [] == found["odd"]
    assert {} == found.get("failures", {})
    assert {f"LLMServerClient.{name}": CALLS} == found["theirs"]
    assert found["ours"].get("server_acquire", 0) in (
        (0, CALLS) if "taken off" in case else (CALLS,)
    )
    assert CALLS == found["ours"].get("engine_call", CALLS)
    assert found.get("restored", True)


def test_verls_profiler_and_rl_insight_run_as_without_us(report):
    """`DistProfiler.annotate`, `marked_timer` and the logger backend, in what is a trainer for us."""
    found = report["verl's profiler and rl-insight"]

    assert [] == found["odd"]
    assert {} == found["failures"]
    assert {"actor_update": 4, "critic_score": 2, "training_global_step": 2} == found["theirs"]
    assert (4, 4) == (found["ours"]["update_actor"], found["ours"]["adv"])
    assert 2 == found["ours"]["metrics"]
