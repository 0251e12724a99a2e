"""Who made others wait and why, against steps of which that is known."""

import pytest
from hypothesis import given, settings
from truth.synthetic import Phase, Request, Step, Turn, run_of
from truth.test_critical_path import UNSHRUNK, steps

from verl_profiler.analysis.explain.stragglers import REASONS, straggler_requests, stragglers


def waiting(ends_us):
    return sum(max(ends_us) - end for end in ends_us) / 1e6


@given(steps)
@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
def test_caused_wait_adds_up_to_the_waiting(made):
    """Every second that a request waits for a later one is charged once; so for every kind."""
    tables, (truth,) = run_of(made)
    rows = stragglers(tables)
    requests = straggler_requests(tables, count=100)

    charged = sum(row["caused_wait_s"] for row in rows if row["kind"] == "request")
    assert waiting(truth.ends_us) == pytest.approx(charged, abs=1e-6)
    assert charged == pytest.approx(sum(row["caused_wait_s"] for row in requests), abs=1e-6)
    workers = {}
    for request, end in zip(made.requests, truth.ends_us, strict=True):
        workers[request.worker] = max(end, workers.get(request.worker, 0))
    by_worker = sum(row["caused_wait_s"] for row in rows if row["kind"] == "worker")
    assert waiting(workers.values()) == pytest.approx(by_worker, abs=1e-6)
    for phase in made.phases:
        by_rank = sum(row["caused_wait_s"] for row in rows if row["kind"] == phase.name)
        assert waiting(phase.ranks_us) == pytest.approx(by_rank, abs=1e-6)
    for row in requests:
        # Null: not recorded of this request.
        parts = sum(row[f"{reason}_s"] or 0 for reason in REASONS)
        assert row["behind_s"] == pytest.approx(parts, abs=2e-6)


BASE = [Request(worker=place % 2, replica=place % 2) for place in range(6)]
ONE = {
    "late": Request(begin_us=2_000_000),
    "queued": Request(turns=(Turn(way_us=2_000_000),)),
    "parked": Request(turns=(Turn(parked_us=2_000_000),)),
    "cold": Request(
        turns=(
            Turn(prompt=1_000, cached=0),
            Turn(replica=1, prompt=1_200, cached=0, prefill_us=2_400_000),
        )
    ),
    "prefill": Request(turns=(Turn(prefill_us=2_020_000),)),
    "recomputed": Request(turns=(Turn(retractions=1, lost_us=2_000_000),)),
    "undivided": Request(turns=(Turn(held_us=2_000_000, timed=False),)),
    "long": Request(turns=(Turn(tokens=300),)),
    "slow": Request(turns=(Turn(token_us=60_000),)),
    "tool": Request(turns=(Turn(tools=(("search", 2_000_000),)),)),
    "other": Request(reward_us=2_000_000),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_the_true_one(reason):
    """One request of seven is behind, for one reason; it is charged with six requests' waiting."""
    tables, (truth,) = run_of(Step((*BASE, ONE[reason])))
    (row,) = straggler_requests(tables)

    assert ("q0006", reason) == (row["request_id"], row["because"])
    assert row["caused_wait_s"] == pytest.approx(waiting(truth.ends_us))
    assert row["share"] == pytest.approx(1)


def test_lost_time_is_the_true_one():
    """What each of the engine's own reasons added; a cold prefill goes by its tokens."""
    found = {
        reason: straggler_requests(run_of(Step((*BASE, ONE[reason])))[0])[0]
        for reason in ("parked", "cold", "recomputed")
    }

    assert 2 == pytest.approx(found["parked"]["parked_s"])
    # 1,050 of the 1,200 tokens were in the other replica's cache.
    assert 2.4 * 1_050 / 1_200 == pytest.approx(found["cold"]["cold_s"])
    assert 2 == pytest.approx(found["recomputed"]["recomputed_s"])
    for reason, row in found.items():
        assert 0 == sum(row[f"{other}_s"] for other in found if other != reason)


def test_a_tool_is_charged_with_what_its_calls_added():
    """Two tools in the last request, 3 to 1."""
    slow = Request(turns=(Turn(tools=(("search", 1_500_000),)), Turn(tools=(("calc", 500_000),))))
    tables, _ = run_of(Step((*BASE, slow)))
    rows = {row["who"]: row for row in stragglers(tables) if row["kind"] == "tool"}
    (request,) = straggler_requests(tables)

    assert rows["search"]["caused_wait_s"] == pytest.approx(3 * rows["calc"]["caused_wait_s"])
    part = request["tool_s"] / request["behind_s"]
    assert sum(row["caused_wait_s"] for row in rows.values()) == pytest.approx(
        request["caused_wait_s"] * part
    )
    assert 1 == rows["search"]["last"]


def test_ranks_and_how_often():
    """The same rank in both steps, another one once."""
    first = Step((Request(),), phases=(Phase("update_actor", (500_000, 800_000, 500_000)),))
    second = Step((Request(),), phases=(Phase("update_actor", (500_000, 700_000, 600_000)),))
    rows = {row["who"]: row for row in stragglers(run_of(first, second)[0])}

    assert (2, 2, 2) == tuple(rows["actor_1"][key] for key in ("last", "steps", "of_steps"))
    assert 0.6 + 0.2 + 0.05 == pytest.approx(rows["actor_1"]["caused_wait_s"])
    assert 0.05 == pytest.approx(rows["actor_2"]["caused_wait_s"])
    assert (0, 1) == (rows["actor_2"]["last"], rows["actor_2"]["steps"])
