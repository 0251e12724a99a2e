"""What is recorded of verl 0.8.0: its own classes from its wheel, with fakes of servers and models around them."""

import json

import pytest
import verl_drift


@pytest.fixture(scope="module")
def report(forked):
    try:
        folder = verl_drift.folder_of("0.8.0")
    except verl_drift.NoWheel as error:
        pytest.skip(str(error))
    status, out, err = forked("older_verl.py", path=[folder])
    lines = [line for line in out.splitlines() if line.startswith("REPORT ")]
    assert (0, 1) == (status, len(lines)), out[-2000:] + err[-3000:]
    found = json.loads(lines[0].removeprefix("REPORT "))
    assert ("0.8.0", {}) == (found["version"], found["errors"])
    return found


def events(report, name):
    found = [each for each in report["events"] if each["event"] == name]
    return [(each["step"], each.get("extra", {})) for each in found]


@pytest.mark.nightly
def test_generate_calls_have_the_ids_of_their_engine_requests(report):
    """verl makes them inside `generate`; the fake server kept what it was asked with."""
    asked = report["asked"]
    calls = [extra["engine_request_id"] for _, extra in events(report, "engine_call")]
    attempts = [extra["engine_request_id"] for _, extra in events(report, "engine_attempt")]

    assert [*asked["plain"], asked["repeated"][-1]] == calls
    assert asked["repeated"] == attempts
    assert 4 == len({*asked["plain"], *asked["repeated"]})
    _, last = events(report, "engine_call")[-1]
    # Of the two attempts' tokens, by hand.
    assert (2, 1, 3) == (last["attempts"], last["aborted_tokens"], last["response_tokens"])


@pytest.mark.nightly
def test_the_load_balancer_and_the_pool_are_recorded(report):
    """The balancer is a class that `@ray.remote` decorates; the manager names its workers `trainer`."""
    routes = [(extra["server"], extra["reason"]) for _, extra in events(report, "server_route")]

    assert ["east", "west", "east"] == report["chosen"]
    assert [("east", "least_loaded"), ("west", "least_loaded"), ("east", "sticky")] == routes
    ((_, pool),) = events(report, "replica_pool")
    assert ([0], 2, 4) == (pool["replicas"], pool["devices"], pool["trainer_devices"])


@pytest.mark.nightly
def test_main_ppo_sync_has_steps_phases_and_samples(report):
    """Two steps of two prompts, by its own `fit`, `step` and replay buffer."""
    phases = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step", "metrics")
    for name in phases:
        assert [1, 2] == [step for step, _ in events(report, name)], name
    assert [(1, {"samples": 2}), (2, {"samples": 2})] == events(report, "sample_wait")
    assert [1, 1, 2, 2] == [step for step, _ in events(report, "sample_consumed")]
