"""What a change would have saved, against the changed step itself."""

import math
from dataclasses import replace
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given, settings
from truth.synthetic import Phase, Request, Step, Turn, run_of, with_turns
from truth.test_critical_path import UNSHRUNK, steps

from verl_profiler.analysis.explain.changes import CHANGES as ALL
from verl_profiler.analysis.explain.changes import UNCHANGED, from_tokens
from verl_profiler.analysis.explain.model import Call, Dispatch, Limits, Mark, Model, Take, Unit
from verl_profiler.analysis.explain.model import Request as ModelRequest
from verl_profiler.analysis.explain.rebuilding import step_models
from verl_profiler.analysis.explain.replay import lengths_us
from verl_profiler.analysis.explain.replica_speed import Speeds
from verl_profiler.analysis.explain.what_if import (
    chosen_steps,
    step_replays,
    what_if,
)

CHANGES = {name: change for name, change in ALL.items() if change.synchronous}
TOOLS = (90_000, 100_000, 110_000, 100_000, 2_500_000)
MIXED = Step(
    requests=tuple(
        Request(
            turns=tuple(
                Turn(tokens=40 + 5 * place, tools=(("search", TOOLS[(place + turn) % 5]),))
                for turn in range(1 + place % 3)
            ),
            worker=place % 2,
            replica=place % 2,
        )
        for place in range(12)
    ),
    poll_us=2_000_000,
)


def replays(step):
    tables, (truth,) = run_of(step)
    rows = [row for row in step_replays(tables) if row["replayed_s"] is not None]
    # No answer has only what needs a 95th percentile, below 20 requests, and what needs to know how
    # load slows calls down, where it was always the same.
    missing = CHANGES.keys() - {row["what"] for row in rows}
    batches = {"half_the_requests", "twice_the_requests"}
    assert missing - batches == {
        name for name in CHANGES if name.startswith("slowest_") and len(step.requests) < 20
    }
    assert missing & batches in (set(), batches)
    return {row["what"]: row["replayed_s"] * 1e6 for row in rows}, truth


def truth_of(step):
    return run_of(step)[1][0].duration_us


@given(steps)
@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
def test_an_unchanged_replay_is_the_measured_step(made):
    """To the microsecond, whatever the step, where queues are as seen."""
    replayed, truth = replays(replace(made, slots=None))

    assert truth.duration_us == pytest.approx(replayed[UNCHANGED], abs=1)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_limit_of_calls_is_recognized_and_replayed(slots):
    """Queues come from the limit, so an unchanged replay has to find each of them again."""
    made = replace(MIXED, slots=slots, poll_us=None)
    replayed, truth = replays(made)

    assert truth.duration_us == pytest.approx(replayed[UNCHANGED], abs=2)
    assert truth_of(replace(made, slots=2 * slots)) == pytest.approx(
        replayed["twice_the_slots"], abs=2
    )


def test_a_limit_is_told_from_spans_that_overlap_and_from_other_queues():
    """A span that outlasts its slot does not hide the limit; a queue before free slots is no limit."""
    late = with_turns(replace(MIXED, slots=2), lambda turn: replace(turn, late_us=900))
    held = with_turns(MIXED, lambda turn: replace(turn, held_us=400_000))
    short, long = (Request(turns=(Turn(tokens=tokens),)) for tokens in (20, 100))
    # It waits while two run, but also long after them.
    blocked = Step((long, long, replace(short, turns=(Turn(tokens=20, held_us=9_000_000),))))
    for made, slots in ((late, 2), (held, None), (blocked, None)):
        tables, (truth,) = run_of(made)
        (model,) = step_models(tables, [1])

        assert (slots or math.inf) == model.limits.calls
        assert truth.duration_us == pytest.approx(*lengths_us(model), abs=2)


def with_tools(step, length_of):
    return with_turns(
        step,
        lambda turn: replace(
            turn, tools=tuple((name, round(length_of(name, us))) for name, us in turn.tools)
        ),
    )


def without_third_turn(request):
    """Own work of the turn that is dropped stays."""
    if len(request.turns) < 3:
        return request
    kept_us = request.put_us + request.turns[2].own_us
    return replace(request, turns=request.turns[:2], put_us=kept_us)


TOLD = replace(MIXED, poll_us=None)
*RANKS, SYNC = MIXED.phases
EVEN = [replace(phase, ranks_us=(fmean(phase.ranks_us),) * 2) for phase in RANKS]
SYNC_TWICE_AS_FAST = replace(SYNC, ranks_us=(75_000, 70_000), before_us=2_000, after_us=1_500)
LIMITED = replace(TOLD, slots=2)
TWO_TOOLS = with_turns(TOLD, lambda turn: replace(turn, tools=(*turn.tools, ("sandbox", 300_000))))
# The step, the change, and the step with the change made.
EXACT = [
    # Six calls at once in each replica; with three, the rest queues.
    (MIXED, "half_the_slots", replace(MIXED, slots=3)),
    (MIXED, "no_polling", TOLD),
    # Through the trainer's looks, too.
    *(
        (made, *change)
        for made in (replace(MIXED, poll_us=poll_us) for poll_us in (None, 300_000, 2_000_000))
        for change in (
            ("tools_at_median", with_tools(made, lambda _, us: min(us, median(TOOLS)))),
            ("tools_twice_as_fast", with_tools(made, lambda _, us: us / 2)),
        )
    ),
    *(
        (
            TWO_TOOLS,
            f"tool_twice_as_fast:{one}",
            with_tools(TWO_TOOLS, lambda name, us, one=one: us // 2 if name == one else us),
        )
        for one in ("search", "sandbox")
    ),
    (TOLD, "one_turn_fewer", replace(TOLD, requests=(*map(without_third_turn, TOLD.requests),))),
    (MIXED, "even_ranks", replace(MIXED, phases=(*EVEN, SYNC))),
    (MIXED, "weights_twice_as_fast", replace(MIXED, phases=(*RANKS, SYNC_TWICE_AS_FAST))),
    # Calls that do not slow each other down: what the queue held back comes back, all of it.
    (LIMITED, "no_queue", TOLD),
    (with_turns(MIXED, lambda turn: replace(turn, held_us=400_000)), "no_queue", MIXED),
]


@pytest.mark.parametrize(("made", "what", "changed"), EXACT, ids=lambda each: str(each)[:40])
def test_a_replay_is_the_changed_step(made, what, changed):
    """To two microseconds."""
    assert truth_of(changed) == pytest.approx(replays(made)[0][what], abs=2)


def test_a_single_tool_has_no_row_of_its_own():
    assert not [what for what in replays(MIXED)[0] if what.startswith("tool_twice")]


def test_ranks_that_wait_for_a_late_one_in_their_own_pass():
    """Their spans are equally long; in one phase the ranks need each other, in the other they do not."""
    late = Phase(
        "update_actor", (900_000, 900_000), passes_us=((9_000, 880_000), (409_000, 880_000))
    )
    alone = Phase("ref", (300_000, 700_000), passes_us=((9_000, 209_000), (409_000, 609_000)))
    even = (
        Phase("ref", (500_000, 500_000)),
        Phase("update_actor", (700_000, 700_000)),
    )
    made = replace(MIXED, phases=(alone, late), poll_us=None)
    replayed, _ = replays(made)

    assert truth_of(replace(made, phases=even)) == pytest.approx(replayed["even_ranks"], abs=1)


def test_the_slowest_stop_at_the_95th_percentile():
    """With 40 requests of which one is slow: the step ends with the second slowest."""
    quick = tuple(Request(turns=(Turn(tokens=100 + place),)) for place in range(39))
    slow = Request(turns=(Turn(tokens=900),))
    made = Step((*quick, slow))
    replayed, truth = replays(made)
    second = truth_of(Step(quick))
    ends = run_of(made)[1][0].ends_us
    p95 = np.quantile(ends, 0.95)

    assert second == pytest.approx(replayed["slowest_1_percent"], abs=1)
    assert replayed["slowest_5_percent"] == pytest.approx(
        truth.duration_us - truth.ends_us[39] + p95, abs=1
    )
    refilled = p95 + (truth.ends_us[19] - 1_000 - 10_000)
    assert replayed["slowest_1_percent_refilled"] == pytest.approx(
        truth.duration_us - truth.ends_us[39] + refilled, abs=1
    )


def test_calls_slow_each_other_down():
    """Four calls at once take four times as long per token; alone, the last one is as quick as one."""
    alone = [(1, place) for place in range(12)]
    together = [(4, 20 + place // 4) for place in range(48)]
    requests = tuple(
        Request(turns=(Turn(tokens=50, token_us=1_000 * load),), begin_us=begin * 1_000_000)
        for load, begin in alone + together
    )
    tables, (truth,) = run_of(Step(requests))
    (model,) = step_models(tables, [1])
    a, b = model.speeds.slowness
    (left_alone,) = lengths_us(model.with_requests(model.requests[:-3]), polls=False)

    assert a < 0.001 * b
    assert truth.duration_us == pytest.approx(*lengths_us(model), abs=1)
    assert truth.duration_us == pytest.approx(
        *lengths_us(*from_tokens(model, [model]).models), abs=100
    )
    assert truth.duration_us - 150_000 == pytest.approx(left_alone, abs=100)


def in_passes(limit, pass_us):
    """Make a step of a replica that gives each of its calls a token in each pass, as engines do.

    24 requests come at once and 12 one by one before; at most `limit` run, the rest waits in order.
    """
    calls = [(200_000 * place, 30 + place) for place in range(12)]
    calls += [(3_000_000, 30 + 7 * place % 40) for place in range(24)]
    waiting = [(come, place, tokens) for place, (come, tokens) in enumerate(calls)]
    running, served, now = {}, {}, 0
    while waiting or running:
        while waiting and waiting[0][0] <= now and len(running) < limit:
            come, place, tokens = waiting.pop(0)
            running[place] = tokens
            served[place] = [come, now, now]
        if not running:
            now = waiting[0][0]
            continue
        now += pass_us(len(running))
        for place in list(running):
            served[place][2] = now
            running[place] -= 1
            if not running[place]:
                del running[place]
    return Step(
        tuple(
            Request(
                turns=(
                    Turn(
                        tokens=calls[place][1],
                        token_us=round((end - begin) / calls[place][1]),
                        held_us=begin - come,
                        prefill_us=0,
                    ),
                ),
                begin_us=come,
            )
            for place, (come, begin, end) in served.items()
        )
    )


def test_a_limit_taken_away_where_loads_go_on_as_seen():
    """Passes of 5 ms and 300 us per call: the line holds beyond the loads that were seen."""

    def pass_us(calls):
        return 5_000 + 300 * calls

    made, without = in_passes(4, pass_us), in_passes(36, pass_us)
    replayed, truth = replays(made)
    model = step_models(run_of(made)[0], [1])[0]

    assert 4 == model.limits.calls
    assert truth.duration_us == pytest.approx(replayed[UNCHANGED], rel=0.01)
    assert (5_000, 300) == pytest.approx(model.speeds.slowness, rel=0.1)
    assert truth_of(without) == pytest.approx(replayed["no_queue"], rel=0.02)
    assert truth_of(in_passes(8, pass_us)) == pytest.approx(replayed["twice_the_slots"], rel=0.02)


@pytest.mark.parametrize(
    "loaded",
    [
        pytest.param(lambda calls: min(calls, 4), id="calls slow each other down no further"),
        pytest.param(lambda calls: calls, id="as the line says"),
        pytest.param(lambda calls: calls + 3 * max(calls - 4, 0), id="more than the line says"),
    ],
)
def test_a_limit_taken_away_lies_between_the_bounds(loaded):
    """Whatever loads do that were never seen, the answer says from where to where."""

    def pass_us(calls):
        return 5_000 + 300 * loaded(calls)

    made, without = in_passes(4, pass_us), in_passes(36, pass_us)
    tables, (truth,) = run_of(made)
    rows = {row["what"]: row for row in what_if(tables)}
    (answer,) = [row for row in step_replays(tables) if row["what"] == "no_queue"]
    saved_s = (truth.duration_us - truth_of(without)) / 1e6

    assert answer["least_s"] < answer["saved_s"] < answer["most_s"]
    assert answer["least_s"] - 0.02 <= saved_s <= answer["most_s"] + 0.02
    assert rows["no_queue"]["low_s"] - 0.02 <= saved_s <= rows["no_queue"]["high_s"] + 0.02


@pytest.mark.parametrize(("beyond", "last_us"), [("line", 9), ("flat", 5), ("saturated", 10)])
def test_what_more_calls_do_than_were_seen(beyond, last_us):
    """Four equal calls with a concurrency of two, 1 + 2 us per call in a pass: two rounds of 5 us."""
    requests = tuple(
        ModelRequest(0.0, 10.0, "worker_0", 1, (Call(0.0, 0.0, 1.0, 0.0, 5.0, "engine_0", 0),))
        for _ in range(4)
    )
    model = Model(
        "made",
        (1,),
        (10,),
        (Mark(0), Dispatch(), Take(1, 0.0)),
        (Unit(requests),),
        speeds=Speeds((1.0, 2.0)),
        most_running={"engine_0": 2},
        limits=Limits(2),
    )

    assert [10] == pytest.approx(lengths_us(model))
    unlimited = replace(model, limits=Limits(4))
    assert [last_us] == pytest.approx(lengths_us(unlimited, beyond=beyond))


def test_averages_intervals_and_emptiness():
    """One row per change and run; the interval holds what single steps save."""
    tables, _ = run_of(
        *(replace(MIXED, poll_us=poll) for poll in (None, 500_000, 2_000_000, 2_000_000))
    )
    rows = {row["what"]: row for row in what_if(tables)}

    assert [UNCHANGED, *CHANGES] == list(rows)
    polling = rows["no_polling"]
    assert 3 == polling["steps"]
    assert polling["low_s"] < polling["saved_s"] < polling["high_s"]
    assert 0 == rows[UNCHANGED]["residual_share"]
    assert polling["share"] == pytest.approx(polling["saved_s"] / polling["step_s"])
    assert [] == what_if(tables, (7, 9))


def test_the_first_step_is_left_out_as_warm_up():
    """Of three or more, unless steps are named."""
    steps = [replace(MIXED, poll_us=poll) for poll in (2_000_000, None, None)]
    tables, _ = run_of(*steps)

    assert [2, 3] == chosen_steps(tables)
    assert [1, 2, 3] == chosen_steps(tables, (1, 3))
    assert [1, 2] == chosen_steps(run_of(*steps[:2])[0])


def test_two_steps_have_no_interval():
    """Whatever their requests."""
    tables, _ = run_of(MIXED, MIXED)
    rows = what_if(tables)

    assert {None} == {row["low_s"] for row in rows if not CHANGES.get(row["what"], UNSEEN).beyond}


UNSEEN = CHANGES["no_queue"]


def test_the_point_and_its_interval_are_of_one_kind():
    """A trainer that polls every 2 s hides a saved second in most steps: the interval hides nothing."""
    turn = Turn(tools=(("search", 400_000),))
    steps = [
        Step((Request(turns=(turn, replace(turn, tools=()))),), poll_us=2_000_000, gap_us=1_000 + n)
        for n in range(6)
    ]
    tables, _ = run_of(*steps)
    rows = [row for row in what_if(tables) if row["low_s"] is not None]

    assert any(abs(row["saved_s"] - row["expected_s"]) > 0.1 for row in rows)
    for row in rows:
        assert row["low_s"] - 1e-9 <= row["expected_s"] <= row["high_s"] + 1e-9, row["what"]
        assert row["share"] == pytest.approx(row["expected_s"] / row["step_s"])
