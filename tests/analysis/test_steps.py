"""Steps: phases and the rest make the whole; the tail is what the last requests cost."""

import pytest

from verl_profiler.analysis import step_phases, step_tail, step_times
from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


def span(event, begin, end, *, name="trainer_0", role="trainer", family="trainer", step=1, **more):
    return {
        "run": "r",
        "name": name,
        "role": role,
        "event": event,
        "family": family,
        "step": step,
        "begin_us": begin * SECOND,
        "end_us": end * SECOND,
        "duration_us": (end - begin) * SECOND,
        "validate": False,
        **more,
    }


def request(begin, end, number, *, validate=False, step=1):
    return span(
        "request",
        begin,
        end,
        name="worker_0",
        role="agent_loop",
        family="rollout",
        step=step,
        request_id=f"q{number}",
    ) | {"validate": validate}


STEP = [
    span("step", 0, 10),
    span("gen", 0, 6),
    span("sample_wait", 1, 5),
    span("update_actor", 6, 9),
    span("testing", 10, 12),
    span("my_timer", 7, 8),
]


def test_phases_and_the_rest_add_up_to_the_step():
    """Timers inside timers and outside the step do not count twice."""
    rows = step_phases(Tables.of({"events": STEP}))

    assert [("gen", 6.0, 0.6), ("update_actor", 3.0, 0.3), ("unaccounted", 1.0, 0.1)] == [
        (row["phase"], row["duration_s"], row["share"]) for row in rows
    ]


def test_equal_intervals_do_not_contain_each_other():
    """Two timers around the same code: the one that sorts first is the outer, never both."""
    tables = Tables.of({"events": [span("step", 0, 4), span("gen", 0, 4), span("inner", 0, 4)]})

    shares = [row["share"] for row in step_phases(tables)]

    assert 1.0 == pytest.approx(sum(shares))


def test_a_step_names_its_gen_its_validation_and_the_way_to_the_next():
    """Validation is beside the step."""
    tables = Tables.of({"events": [*STEP, span("step", 13, 20, step=2)]})

    first, second = step_times(tables)

    assert (10.0, 6.0, 2.0, 13.0) == tuple(
        first[key] for key in ("duration_s", "gen_s", "testing_s", "to_next_s")
    )
    assert (7.0, None, None, None) == tuple(
        second[key] for key in ("duration_s", "gen_s", "testing_s", "to_next_s")
    )


def test_a_step_without_an_end_has_no_duration():
    """What was seen of it is said apart."""
    (row,) = step_times(Tables.of({"events": STEP[1:4]}))

    assert (False, None, 9.0, None) == tuple(
        row[key] for key in ("finished", "duration_s", "seen_s", "unaccounted_s")
    )


def test_the_phases_of_an_unfinished_step_have_no_share():
    """There is no whole to take a share of."""
    rows = step_phases(Tables.of({"events": STEP[1:2]}))

    assert [("gen", 6.0, None)] == [(row["phase"], row["duration_s"], row["share"]) for row in rows]


def test_stray_events_make_no_step():
    """An engine that counts one step ahead does not invent that step."""
    stray = span("engine_request", 11, 12, name="engine_0", role="engine", family="engine", step=2)

    assert [1] == [row["step"] for row in step_times(Tables.of({"events": [*STEP, stray]}))]


def test_the_tail_is_measured_from_when_most_requests_had_ended():
    """Nine requests end at 1 s, the last at 4 s, and gen at 6 s."""
    requests = [request(0, 1, number) for number in range(9)] + [request(0, 4, 9)]
    late = request(0, 30, 10, validate=True)
    processes = [{"run": "r", "name": "trainer_0", "role": "trainer"}]

    (row,) = step_tail(Tables.of({"events": [*STEP, *requests, late], "processes": processes}))

    assert (10, 3.0, None, 4.0, 2.0) == tuple(
        row[key] for key in ("requests", "after_p80_s", "after_p95_s", "spread_s", "poll_s")
    )
