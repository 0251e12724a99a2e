"""Who owns each second of a step, against steps of which that is known."""

from dataclasses import replace

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from truth.synthetic import EPOCH, Phase, Request, Step, Turn, Writer, events_of, run_of, tables_of

from verl_profiler.analysis.explain.critical_path import critical_path, critical_segments
from verl_profiler.analysis.explain.rules import CATEGORIES

# A step costs a tenth of a second; shrinking a failure would cost minutes.
UNSHRUNK = (Stage.explicit, Stage.generate)
lengths = st.integers(0, 400_000)
turns = st.builds(
    Turn,
    tokens=st.integers(1, 80),
    token_us=st.integers(1, 12_000),
    prefill_us=lengths,
    acquire_us=st.integers(0, 5_000),
    way_us=st.integers(0, 5_000),
    parked_us=st.sampled_from([0, 0, 90_000]),
    back_us=st.integers(0, 5_000),
    own_us=st.integers(0, 5_000),
    tools=st.lists(st.tuples(st.sampled_from(["search", "calc"]), lengths), max_size=2).map(tuple),
)
requests = st.builds(
    Request,
    turns=st.lists(turns, min_size=1, max_size=3).map(tuple),
    worker=st.integers(0, 2),
    replica=st.integers(0, 1),
    begin_us=st.integers(0, 300_000),
    build_us=st.integers(0, 5_000),
    reward_us=st.integers(0, 50_000),
    put_us=st.integers(0, 5_000),
)
phases = st.sampled_from(["old_log_prob", "ref", "update_actor", "update_weights"]).flatmap(
    lambda name: st.builds(
        Phase,
        name=st.just(name),
        ranks_us=st.lists(st.integers(10_000, 900_000), min_size=1, max_size=3).map(tuple),
        before_us=st.integers(0, 9_000),
        after_us=st.integers(0, 9_000),
    )
)
steps = st.builds(
    Step,
    requests=st.lists(requests, min_size=1, max_size=5).map(tuple),
    phases=st.lists(phases, max_size=3, unique_by=lambda phase: phase.name).map(tuple),
    poll_us=st.sampled_from([None, 200_000, 2_000_000]),
    gap_us=st.integers(1, 5_000),
    slots=st.sampled_from([None, 1, 2]),
    # Putting engines to sleep: a timer inside `gen` in which no rank works.
    sleep_us=st.sampled_from([0, 400_000]),
)


def categories_of(tables):
    """Return the microseconds of each category of a run of one step."""
    return {row["category"]: round(row["duration_s"] * 1e6) for row in critical_path(tables)}


@given(st.lists(steps, min_size=1, max_size=2))
@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
def test_every_second_has_its_true_category(made):
    """To the microsecond, through tools side by side, queues, polls and handovers; none is empty."""
    tables, truths = run_of(*made)
    segments, path = critical_segments(tables), critical_path(tables)

    for number, (step, truth) in enumerate(zip(made, truths, strict=True), 1):
        reached = 0.0
        for row in (row for row in segments if row["step"] == number):
            assert row["begin_s"] == pytest.approx(reached, abs=1e-9)
            assert row["duration_s"] > 0
            reached = row["begin_s"] + row["duration_s"]
        assert reached == pytest.approx(truth.duration_us / 1e6, abs=1e-9)
        found = {
            row["category"]: round(row["duration_s"] * 1e6) for row in path if row["step"] == number
        }
        assert truth.categories == found
        assert set(found) <= {*CATEGORIES, *(phase.name for phase in step.phases), "gen"}


def test_another_hosts_clock_moves_no_time_out_of_the_call():
    """An engine whose clock is 3 s ahead: its interval is put into the client's."""
    step = Step((Request(turns=(Turn(tokens=100),)),))
    tables, (truth,) = run_of(step)
    tables.connection.execute(
        "UPDATE events SET begin_us = begin_us + 3000000, end_us = end_us + 3000000 "
        "WHERE role = 'engine'"
    )

    assert truth.categories == categories_of(tables)


def test_a_stall_of_the_loop_owns_what_nothing_else_explains():
    """The way back from the engine is long because the loop did not run."""
    turn = Turn(back_us=700_000)
    quiet, (truth,) = run_of(Step((Request(turns=(turn,)),)))
    begin = 1_000 + 10_000 + 3_000 + 500 + 1_500 + turn.prefill_us + 500_000
    stalled, _ = run_of(Step((Request(turns=(turn,)),), stall=(0, begin, begin + 600_000)))
    categories = categories_of(stalled)

    assert 701_500 == truth.categories["transport"]
    assert (600_000, 101_500) == (categories["event_loop"], categories["transport"])
    assert "event_loop" not in categories_of(quiet)


def test_engines_that_wake_up_in_gen_are_no_dispatch():
    """Until verl 0.7 they do, before the first request of a step."""
    step = Step((Request(begin_us=900_000),))
    tables, (truth,) = run_of(step)
    late_us = truth.categories["dispatch"]
    tables.connection.execute(
        "INSERT INTO events SELECT * REPLACE ('memory_resume' AS event, 'weights' AS family, "
        "'engine_0' AS name, 'engine' AS role, begin_us + 100000 AS begin_us, "
        "begin_us + 800000 AS end_us, 700000 AS duration_us) FROM events WHERE event = 'gen'"
    )
    categories = categories_of(tables)

    assert (700_000, late_us - 700_000) == (categories["engine_memory"], categories["dispatch"])


@pytest.mark.parametrize(
    ("goes_on_us", "during", "stalled_us"),
    [
        # The answer was there, and the loop noticed when it ran again.
        (2_000, None, 500_000),
        # No answer had come when the loop ran again, so the stall held nothing up.
        (300_000, None, 0),
        # The wait itself was what blocked the loop.
        (2_000, "server_acquire", 0),
    ],
)
def test_a_stall_owns_the_wait_for_an_answer_that_it_covers(goes_on_us, during, stalled_us):
    """Choosing a replica takes a millisecond, and seems to take as long as the loop stands still."""
    turn = Turn(acquire_us=100_000 + 500_000 + goes_on_us)
    begin = 1_000 + 10_000 + 3_000 + 100_000
    tables, (truth,) = run_of(
        Step((Request(turns=(turn,)),), stall=(0, begin, begin + 500_000), stalled_by=during)
    )
    categories = categories_of(tables)

    assert stalled_us == categories.get("event_loop", 0)
    assert turn.acquire_us - stalled_us == categories["server_acquire"]
    assert truth.duration_us == sum(categories.values())


@pytest.mark.parametrize("part", ["tool", "decode", "prompt_build"])
def test_a_stall_owns_nothing_that_has_a_reason_of_its_own(part):
    """A tool that takes long anyway, or may be what blocks; the engine, which has a clock of its own."""
    turn = Turn(tokens=100, tools=(("search", 900_000),))
    step = Step((Request(turns=(turn,), build_us=300_000),))
    _, (truth,) = run_of(step)
    begin = {
        "prompt_build": 20_000,
        "decode": 11_000 + 300_000 + 500 + 1_500 + turn.prefill_us,
        "tool": truth.ends_us[0] - 500_000,
    }[part]
    tables, _ = run_of(replace(step, stall=(0, begin, begin + 280_000)))

    assert truth.categories == categories_of(tables)


ALL_KINDS = ("engine_0", "trainer_0", "actor_0")


@pytest.mark.parametrize(
    ("others", "hosts", "category"),
    [
        (ALL_KINDS, {}, "host_stall"),
        # Elsewhere, at the same time.
        (ALL_KINDS, {"worker_0": "one"}, "event_loop"),
        # One process is no host, and neither is one role.
        (("engine_0", "trainer_0"), {}, "event_loop"),
        (("worker_1", "worker_2", "worker_3"), {}, "event_loop"),
    ],
)
def test_a_stall_of_all_processes_is_the_hosts(others, hosts, category):
    """The same moments in processes that have nothing to do with each other."""
    request = Request(turns=(Turn(acquire_us=900_000),))
    step = Step((request,), stall=(0, 20_000, 910_000), stalled_too=others)
    tables, (truth,) = run_of(step, hosts=hosts)
    categories = categories_of(tables)

    assert 890_000 == categories[category]
    assert truth.duration_us == sum(categories.values())
    assert 1 == len({"event_loop", "host_stall"} & set(categories))


def test_a_traced_function_owns_nothing_of_what_it_computes():
    """TransferQueue's tracing spans the whole agent loop; the time is still that of its parts."""
    events, (truth,) = events_of(Step((Request(),)))
    writer = Writer(1, EPOCH)
    writer.span("worker_0", "tq_function_compute", 13_000, truth.ends_us[0], request_id="q0000")

    assert truth.categories == categories_of(tables_of([*events, *writer.events]))


ANYTHING = st.tuples(
    st.sampled_from(
        [
            *(("gen", "trainer_0"), ("sample_wait", "trainer_0"), ("update_actor", "trainer_0")),
            *(("tq_get", "trainer_0"), ("reward", "trainer_0"), ("update_actor", "actor_0")),
            *(("forward_backward", "actor_1"), ("tq_put", "actor_1"), ("request", "worker_0")),
            *(("turn", "worker_0"), ("engine_call", "worker_0"), ("tool_call", "worker_0")),
            *(("event_loop_lag", "worker_0"), ("postprocess", "worker_0"), ("reward", "worker_0")),
            *(("event_loop_lag", "worker_0"), ("server_acquire", "worker_0")),
        ]
    ),
    st.integers(-2_000, 12_000),
    st.integers(0, 9_000),
    st.sampled_from(["q0", "q1"]),
)


@given(st.lists(ANYTHING, max_size=14))
@settings(max_examples=15, deadline=None, phases=UNSHRUNK)
def test_intervals_that_contradict_each_other_have_one_category_each(intervals):
    """Overlapping timers, requests that begin before the step, calls longer than their request."""
    writer = Writer(1, EPOCH)
    writer.span("trainer_0", "step", 0, 10_000_000)
    for (event, name), begin, length, request in intervals:
        more = {"request_id": request} if name == "worker_0" else {}
        writer.span(name, event, begin * 1_000, (begin + length) * 1_000, **more)
    tables = tables_of(writer.events)
    segments = critical_segments(tables)

    if tables.rows("SELECT run FROM asynchronous"):
        # The requests end after `gen`: such a run has no path.
        assert [] == segments
        return
    ends = [round((row["begin_s"] + row["duration_s"]) * 1e6) for row in segments]
    begins = [round(row["begin_s"] * 1e6) for row in segments]
    assert [0, *ends[:-1]] == begins
    assert 10_000_000 == ends[-1]


def test_a_tool_is_not_charged_for_a_stall_that_another_requests_call_caused():
    """A tool of 100 ms seems to take 700 ms: the loop noticed its end when it ran again."""
    hasty = Turn(tools=(("hasty", 600_000),))
    patient = replace(hasty, tools=(("patient", 700_000),))
    requests = (Request(turns=(hasty,)), Request(turns=(patient,)), *[Request(worker=1)] * 3)
    # When the tools begin: on the way, in the engine, back.
    begin = 1_000 + 10_000 + 3_000 + 500 + 1_500 + 20_000 + 500_000 + 1_000 + 700
    stalls = {
        of: run_of(
            Step(
                requests,
                stall=(0, begin + 100_000, begin + 700_000),
                stalled_by="mine:blocks",
                stalled_of=of,
            )
        )[0]
        for of in (0, None)
    }
    categories = {of: categories_of(tables) for of, tables in stalls.items()}
    calls = stalls[0].rows("SELECT tool, duration_us, stalled_us FROM tool_calls ORDER BY tool")
    (charged,) = stalls[0].rows(
        "SELECT caused_wait_us FROM tool_caused_wait WHERE tool = 'patient'"
    )
    (unknown,) = stalls[None].rows(
        "SELECT caused_wait_us FROM tool_caused_wait WHERE tool = 'patient'"
    )

    assert (600_000, 100_000) == (categories[0]["event_loop"], categories[0]["tool"])
    # Whose call it was is not known: it stays with the tool.
    assert 700_000 == categories[None]["tool"]
    assert [("hasty", 600_000, 0), ("patient", 700_000, 600_000)] == [
        (row["tool"], row["duration_us"], row["stalled_us"]) for row in calls
    ]
    assert charged["caused_wait_us"] < unknown["caused_wait_us"] / 5
