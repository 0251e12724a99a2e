"""What is recorded of verl's experimental trainers, on their own classes, without Ray."""

import pytest


@pytest.fixture(scope="module")
def report(reported):
    return reported("experimental_probes.py", probed=True)


def named(report, event):
    """Return (step, extra) of an event, in the order of the files."""
    return [
        (each["step"], each.get("extra", {})) for each in report["events"] if each["event"] == event
    ]


def test_steps_are_those_of_the_weights(report):
    """No probe fails.

    The rollouter counts samples in its `global_steps`, 17 here.  A rank's work belongs to its step,
    whether the step syncs before it, as one step off does, or after it.
    """
    assert {} == report["errors"]
    assert ([0, 0], 2) == (report["before"], report["rollouter_step"])
    assert {"before": [1, 2], "after": [1, 2]} == report["syncs"]
    # A call that finds nothing to do is no validation.
    assert 1 == len(named(report, "testing"))


def test_a_full_queue_drops_its_oldest_sample(report):
    """Which the queue has only as bytes."""
    assert [(1, {"uid": "uid_sample_0_1", "reason": "queue_full", "dropped_step": 2})] == named(
        report, "sample_dropped"
    )


def test_the_rollouter_pauses_at_a_limit(report):
    """One pause, from the check that found the limit to the one that found none."""
    ((step, pause),) = named(report, "dispatch_pause")

    assert [True, True, False] == report["paused"]
    # Before the first sample; after one; while a limit is reached, twice; when it no longer is.
    assert [False, True, False, False, True] == report["expects_progress"]
    # At a limit: with a sample in flight, which should get finished; when it is; with one again.
    assert [(True, 1), (False, 0), (True, 1)] == [tuple(each) for each in report["in_flight"]]
    assert 1 == step
    assert {"reason": "staleness_limit", "staleness_samples": 3, "max_required_samples": 3} == pause


def test_queue_and_rollouter_are_counted_when_they_change(report):
    """Also when a sample was dropped: then the queue is still full."""
    depths = [x for _, x in named(report, "queue_depth")]

    assert [1, 2, 2] == [x["ready"] for x in depths if x["queue"] == "message_queue"]
    assert [(0, 2), (1, 2)] == [
        (x["running"], x["capacity"]) for x in depths if x["queue"] == "rollouter"
    ]


def test_hybrid_replicas_of_a_fully_asynchronous_trainer(report):
    """Which are lent to the rollout, and with which a trainer validates."""
    found = [
        (each["event"], x["replicas"], x.get("reason"), x.get("to"))
        for each in report["events"]
        for x in [each.get("extra", {})]
        if x.get("pool") == "hybrid"
    ]
    abort, resume, sleep = "abort_replicas", "resume_replicas", "sleep_replicas"
    to_rollout, to_trainer = "switch_to_rollout", "switch_to_trainer"

    assert report["hybrid"] == [1, 1]
    assert {each["step"] for each in report["events"] if each["event"] == "pool_switch"} == {3}
    assert found[:9] == [
        (sleep, [0], None, None),
        ("replica_pool", [0], None, None),
        (abort, [0], to_rollout, None),
        ("weight_sync", [0], to_rollout, None),
        (resume, [0], to_rollout, None),
        (resume, [0], to_rollout, None),
        ("pool_switch", [0], None, "rollout"),
        (abort, [0], to_trainer, None),
        (sleep, [0], to_trainer, None),
    ]
    assert found[9] == ("pool_switch", [0], None, "trainer")
    validating = {(event, reason) for event, _, reason, _ in found[10:]}
    assert validating == {
        (each, "validate_begin") for each in ("weight_sync", abort, resume, sleep)
    }
