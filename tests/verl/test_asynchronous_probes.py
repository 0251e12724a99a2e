"""What is recorded of asynchronous training, on verl's own client, replay buffer, manager and trainer."""

import pytest


@pytest.fixture(scope="module")
def report(reported):
    return reported("asynchronous_probes.py", probed=True)


# The step of the script's framework; the other parts have lower ones.
FRAMEWORK = 7


def named(report, *events, of=None):
    """Return (event, step, extra) of events, in the order of the files; of one framework, or of none."""
    return [
        (each["event"], each["step"], each.get("extra", {}))
        for each in report["events"]
        if each["event"] in events and (each["step"] == of if of else each["step"] != FRAMEWORK)
    ]


def test_no_probe_fails(report):
    """A failure is counted, and hidden from verl."""
    assert {} == report["errors"]


def test_an_aborted_call_is_one_engine_call_with_its_attempts(report):
    """And one turn; the tokens of aborted attempts are kept by verl.  Another call is its only attempt."""
    calls = [x for _, _, x in named(report, "engine_call")]
    assert [2, 1, 2, 0] == report["whole"]
    assert [True, False] == ["attempts" in call for call in calls]
    call = next(x for _, _, x in named(report, "engine_call") if "attempts" in x)
    attempts = [x for _, _, x in named(report, "engine_attempt")]

    assert [5, 1, 1, 3] == report["aborted"]
    assert (3, 3, 5) == (call["attempts"], call["aborted_tokens"], call["response_tokens"])
    assert (1, 2) == (call["min_weight_version"], call["max_weight_version"])
    assert [(0, 3, 1), (1, 0, 1), (2, 2, 2)] == [
        (x["attempt"], x["response_tokens"], x["weight_version"]) for x in attempts
    ]
    assert [2, 5, 5] == [x["prompt_tokens"] for x in attempts]
    assert call["engine_request_id"] == attempts[-1]["engine_request_id"]
    assert [0, 1] == [x["attempt"] for _, _, x in named(report, "parked")]


def test_each_sample_is_consumed_or_dropped(report):
    """Under the step that dispatched it, with the versions of its tokens."""
    consumed = [(step, x) for _, step, x in named(report, "sample_consumed")]
    dropped = {x["uid"]: (step, x) for _, step, x in named(report, "sample_dropped")}

    assert [2] == report["refilled"]
    assert [(2, "good", 0, 3, 1, 3, 1, 2), (2, "good", 1, 3, 1, 3, 1, 1)] == [
        (
            *(step, x["uid"], x["session"], x["consumed_step"], x["mini_batch"]),
            *(x["trainer_version"], x["min_weight_version"], x["max_weight_version"]),
        )
        for step, x in consumed
    ]
    assert {"old", "bad"} == dropped.keys()
    step, old = dropped["old"]
    assert (1, "stale", 3, 2, 12) == (
        *(step, old["reason"], old["dropped_step"]),
        *(old["samples"], old["response_tokens"]),
    )
    assert (0, 1) == (old["min_weight_version"], old["max_weight_version"])
    assert ("failed", 0) == (dropped["bad"][1]["reason"], dropped["bad"][1]["samples"])


def test_the_queue_is_counted_when_it_changes(report):
    """At the first poll, after the eviction, and after the samples were taken."""
    depths = [x for _, _, x in named(report, "queue_depth")]

    assert [(0, 1, 2, 1), (0, 1, 1, 0), (0, 1, 0, 0)] == [
        (x["pending"], x["running"], x["ready"], x["failed"]) for x in depths
    ]


def test_replicas_are_switched_with_their_reasons(report):
    """The pool's ranks and devices, and what each call is part of."""
    ((_, _, pool),) = named(report, "replica_pool")
    wanted = ("pool_switch", "weight_sync", "abort_replicas", "resume_replicas", "sleep_replicas")
    found = [
        (event, x["replicas"], x.get("reason"), x.get("to"), x.get("reject"))
        for event, _, x in named(report, *wanted)
    ]

    assert {"pool": "hybrid", "replicas": [0, 1], "devices": 4, "trainer_devices": 4} == pool
    assert [
        ("weight_sync", [0, 1], "switch_to_rollout", None, None),
        ("resume_replicas", [0, 1], "switch_to_rollout", None, None),
        ("pool_switch", [0, 1], None, "rollout", None),
        ("abort_replicas", [0, 1], "switch_to_trainer", None, True),
        ("sleep_replicas", [0, 1], "switch_to_trainer", None, None),
        ("pool_switch", [0, 1], "step_begin", "trainer", None),
    ] == found
    assert ["replicas_join", "replicas_leave"] == [
        event for event, _, _ in named(report, "replicas_join", "replicas_leave")
    ]


def test_a_framework_of_ones_own_names_its_requests(report):
    """The calls inside of a span are its turns; the step is that of the version that answered."""
    calls = named(report, "engine_call", of=FRAMEWORK)
    requests = named(report, "request", of=FRAMEWORK)

    assert report["framework"]
    assert [("first", 0), ("first", 1), ("second", 0), ("second", 1)] == sorted(
        (x["request_id"], x["turn"]) for _, _, x in calls if "request_id" in x
    )
    assert [("first", 2, "prompt", 1, "task"), ("second", 2, "prompt", 1, "task")] == sorted(
        (x["request_id"], x["turns"], x["uid"], x["session"], x["agent"]) for _, _, x in requests
    )
    for event, count in (("request_start", 2), ("turn", 4), ("look_up", 2), ("task", 2)):
        found = named(report, event, of=FRAMEWORK)
        assert count == len(found) == len([x for _, _, x in found if "request_id" in x])


def test_an_engine_call_without_a_request_is_kept(report):
    """Its engine's id is that of the engine server's line; nothing makes a request of it."""
    ((_, _, call),) = (
        each for each in named(report, "engine_call", of=FRAMEWORK) if "request_id" not in each[2]
    )

    assert (1, 4, "completed") == (
        *(call["prompt_tokens"], call["response_tokens"]),
        call["finish_reason"],
    )
    assert call["engine_request_id"]
    # What a gateway of agents hands to the client: the id of its session.
    assert "nobody's" == call["conversation"]
    assert "turn" not in call
