"""Steps that consume what earlier steps dispatched: nothing is explained by the wrong requests."""

import pytest
from analyses import ANALYSES
from truth.asynchronous_runs import Plan, Simulation
from truth.asynchronous_runs import events_of as events_of_run
from truth.synthetic import events_of, tables_of
from truth.test_culprits import STEPS, healthy

from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.analysis.explain.what_if import (
    asynchronous_what_if,
    step_replays,
    synchronous_what_if,
)
from verl_profiler.analysis.registry import explained, explanations

JOINED = (
    "critical_path",
    "critical_segments",
    "rollout_tail",
    "step_replays",
    "step_tail",
    "straggler_requests",
    "what_if",
)
# What is empty where each step consumes what it dispatches.
EARLIER = ("staleness", "staleness_causes", "asynchronous_what_if", "critical_cycle")
MADE = {
    **ANALYSES,
    "step_replays": step_replays,
    "what_if": lambda tables: synchronous_what_if(tables, None),
    "asynchronous_what_if": asynchronous_what_if,
}
HEALTHY, _ = events_of(*(healthy(number) for number in range(1, STEPS + 1)))


def run(ahead):
    """Let each request be dispatched so many steps before the one that waits for it."""
    return tables_of(
        [
            {**event, "step": event["step"] - ahead}
            if event["role"] in ("agent_loop", "engine")
            else event
            for event in HEALTHY
        ]
    )


def joined(tables):
    """Return those of `JOINED` that have rows."""
    return [name for name in JOINED if MADE[name](tables)]


def test_an_asynchronous_run_is_not_joined_by_dispatch_step():
    """The same requests, one step older."""
    assert [*JOINED] == joined(run(0))
    assert [] == joined(run(1))


def test_samples_of_earlier_steps_make_a_run_asynchronous():
    """Also where every request ends before the last of several `gen` in its own step."""
    consumed = [
        {
            **event,
            "name": "trainer_0",
            "role": "trainer",
            "event": "sample_consumed",
            "family": "trainer",
            "request_id": None,
            "extra": {"uid": event["request_id"], "consumed_step": event["step"] + 1},
        }
        for event in HEALTHY
        if event["event"] == "request"
    ]

    assert consumed
    assert [] == joined(tables_of([*HEALTHY, *consumed]))
    for each in consumed:
        each["extra"]["consumed_step"] -= 1
    assert [*JOINED] == joined(tables_of([*HEALTHY, *consumed]))


def test_no_finding_is_made_up_for_an_asynchronous_run():
    """Who waits for the ranks is known; nobody waits for the requests of its own step."""
    rows = explanations(run(1))

    assert [] == rows["findings"]
    assert not {"request", "tool", "worker", "replica"} & {
        row["kind"] for row in rows["stragglers"]
    }
    assert "update_actor" in {row["kind"] for row in rows["stragglers"]}


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(separate=False), Plan(gens=4, train_ms=3600), Plan(ahead=0)]
)
def test_a_trainer_that_consumes_what_was_ready_is_asynchronous(plan):
    """Its requests may all have ended before its own `gen`: what the replay buffer noted counts, and whose devices they are."""
    events = events_of_run(Simulation(plan))

    assert [row["run"] for row in tables_of(events).rows("SELECT run FROM asynchronous")] == [
        "made"
    ]
    assert all(RULES[row["finding"]].pooled for row in explained(tables_of(events))["findings"])


def test_a_trainer_that_consumes_its_own_requests_is_synchronous():
    """Whatever the clocks of other hosts show; nothing of earlier steps explains it."""
    tables = tables_of(events_of_run(Simulation(Plan(separate=False, ahead=0))))

    assert [] == tables.rows("SELECT * FROM asynchronous")
    assert [] == [name for name in EARLIER if MADE[name](tables)]


def test_a_few_requests_that_are_left_behind_do_not_make_a_run_asynchronous():
    """A synchronous trainer that samples beyond its need does not wait for the last ones."""
    late = [
        {
            **event,
            "end_us": event["end_us"] + 5_000_000,
            "duration_us": event["duration_us"] + 5_000_000,
        }
        if event["event"] == "request" and event["request_id"] in ("q0000", "q0001")
        else event
        for event in HEALTHY
    ]

    assert [] == tables_of(late).rows("SELECT * FROM asynchronous")
    assert ANALYSES["critical_path"](tables_of(late))
