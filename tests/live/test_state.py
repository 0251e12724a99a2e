"""What is known of a run while it goes on, against what its tables say afterwards."""

import msgspec
import numpy as np
import pytest
from recorded import lines_in_order, unpacked

from verl_profiler.live.follow import Line
from verl_profiler.live.screen import frame, header_problems
from verl_profiler.live.state import Live
from verl_profiler.reading.quantiles import quantile
from verl_profiler.reading.reader import load


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def ordered(recorded_run):
    """(process, line) in order."""
    return [
        (path.rpartition("/")[2][:-6], msgspec.json.decode(line, type=Line))
        for path, line in lines_in_order(recorded_run)
    ]


def test_in_the_end_it_says_what_the_tables_say(recorded_run, ordered):
    """Steps, phases, requests, tools."""
    live = Live()
    for name, line in ordered:
        live.take(name, line.step, line)

    with load(recorded_run, cache=False) as opened:
        for row in opened.rows("SELECT * FROM steps WHERE finished"):
            step = live.steps[row["step"]]
            assert pytest.approx(row["duration_us"] / 1e6) == step.duration_s
            assert (row["requests"], row["requests"]) == (step.started, len(step.ends))
        for row in opened.rows("SELECT * FROM phases WHERE parent = 'step' AND phase = 'gen'"):
            assert (
                pytest.approx(row["duration_us"] / 1e6)
                == live.steps[row["step"]].phase_seconds["gen"]
            )
        tools = opened.rows(
            "SELECT step, tool, count(*) AS calls FROM tool_calls WHERE NOT validate GROUP BY ALL"
        )
    assert {(row["step"], row["tool"], row["calls"]) for row in tools} == {
        (number, name, len(tool.seconds))
        for number, step in live.steps.items()
        for name, tool in step.tools.items()
    }
    assert {} == live.in_flight
    assert 2 == live.current.number
    assert live.phase() is None


def test_at_every_moment_what_began_and_has_not_ended_is_in_flight(ordered):
    """Line for line, and every frame fits its screen."""
    live, begun, ended = Live(), 0, 0
    phases = []
    for place, (name, line) in enumerate(ordered):
        live.take(name, line.step, line)
        begun += line.event == "request_start"
        ended += line.event == "request"

        assert begun - ended == len(live.in_flight)
        if place % 50 == 0:
            lines = frame(live, {}, {}, title="run", now_s=live.newest_s)
            assert len(lines) <= 24
            assert max(map(len, lines)) <= 80
        phase = live.phase()
        if phase and phases[-1:] != [phase[0]]:
            phases.append(phase[0])

    # Of the first step it is not known what follows; of the second, it is.
    first = ["gen", "after gen", "after old_log_prob", "after ref", "after adv"]
    second = ["gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "end of step"]
    assert [*first, "after update_actor", "after update_weights", *second] == phases


def test_a_request_in_flight_says_where_it_is():
    """Its id and turn come from lines within the turn."""
    live = Live()

    def take(event, second, **extra):
        moment = f"2026-11-21T02:00:{second:02}+00:00"
        live.take("worker_3", 5, Line(moment, event, None, extra, 5))

    take("request_start", 1, sample=12, session=1, uid="u")
    take("prompt_build", 2, sample=12, session=1, request_id="q1")
    take("engine_call", 3, request_id="q1", turn=0)
    take("tool_parsing", 4, request_id="q1", turn=0)
    (request,) = live.in_flight.values()
    assert ("q1", 0, "tool", "12", "1") == (
        request.request_id,
        request.turn,
        request.doing,
        request.sample,
        request.session,
    )
    take("tool_call", 5, request_id="q1", turn=0, tool="search", status="error")
    take("turn", 6, request_id="q1", turn=0)
    assert (1, "engine") == (request.turn, request.doing)
    text = "\n".join(frame(live, {}, {}, title="run", now_s=live.newest_s + 4))
    assert "q1           worker_3  12/1       1  engine     9.00 s" in text
    take("request", 9, sample=12, session=1, request_id="q1")
    assert {} == live.in_flight


def test_requests_without_a_sample_are_counted_one_by_one():
    """Those of user code have a request id only."""
    live = Live()

    def take(event, second, request_id, duration=None):
        moment = f"2026-11-21T02:00:{second:02}+00:00"
        extra = {"request_id": request_id}
        live.take("worker_3", 5, Line(moment, event, duration, extra, 5))

    for number in range(3):
        take("request_start", number, f"q{number}")
    take("request", 9, "q1", 8.0)

    assert {"q0", "q2"} == {each.request_id for each in live.in_flight.values()}
    text = "\n".join(frame(live, {}, {}, title="run", now_s=live.newest_s + 1))
    assert "2 in flight, 1 of 3 finished" in text
    assert ["q0", "worker_3", "-", "0", "prompt", "10.0", "s"] in map(str.split, text.splitlines())


def test_the_tail_is_counted_from_when_most_had_ended():
    """20 requests; 19 end in the first 19 seconds, one is still awaited."""
    live = Live()
    for number in range(20):
        live.take(
            "worker_0",
            1,
            Line("2026-11-21T02:00:00+00:00", "request_start", None, {"sample": number}, 1),
        )
        if number < 19:
            moment = f"2026-11-21T02:00:{number + 1:02}+00:00"
            live.take("worker_0", 1, Line(moment, "request", number + 1.0, {"sample": number}, 1))
    text = "\n".join(frame(live, {}, {}, title="run", now_s=live.newest_s + 11))

    assert "1 in flight, 19 of 20 finished (95 %)" in text
    # The 95th percentile of the ends lies between the 19th and the one that is still awaited.
    since = 30 - np.quantile([*range(1, 20), 99], 0.8)
    expected = f"p50 10.0 s, p95 too few, max 19.0 s; tail {since:.1f} s since 80 % finished"
    assert expected in text
    launch = {"training": {"train_batch_size": 10, "rollout_n": 4}}
    text = "\n".join(frame(live, launch, {}, title="run", now_s=live.newest_s + 11))
    assert "19 of 40 finished (48 %)" in text
    assert "tail" not in text


def header(**more):
    return {"updated": "2026-11-21T02:00:00+00:00", "ended": None, **more}


def test_headers_tell_of_losses_failures_and_silence():
    """In plain words."""
    headers = {
        "worker_0": header(counters={"dropped": 5, "write_errors": 2}),
        "worker_1": header(probes={"errors": {"turn": 3}, "missed": {"reward": "gone"}}),
        "worker_2": header(updated="2026-11-21T01:50:00+00:00"),
        # Its disk is slow, and its files grow.
        "worker_7": header(
            updated="2026-11-21T01:50:00+00:00", complete_until="2026-11-21T01:59:59.5+00:00"
        ),
        "worker_3": header(updated="2026-11-21T01:50:00+00:00", ended="2026-11-21T01:50:00+00:00"),
        "worker_4": header(fallback="disk full"),
        "worker_5": {},
        "worker_6": header(updated=7, counters=None, probes=None),
    }

    assert [
        "worker_0 dropped 5 events",
        "worker_0 had 2 write errors",
        "worker_1: probes failed 3 times",
        "worker_2: no update for 10 min 0 s",
        "worker_4 writes to a fallback directory: disk full",
        "inactive probes: reward",
    ] == header_problems(headers)


def test_problems_stay_on_a_small_screen(ordered):
    """They come last and are not cut off; control characters never reach the terminal."""
    live = Live()
    for name, line in ordered[:1200]:
        live.take(name, line.step, line)
    live.current.tools["\x1b[2Jevil\n"] = live.current.tools.popitem()[1]
    for height in range(3, 40):
        lines = frame(
            live, {}, {"w": header(counters={"dropped": 1})}, title="r", now_s=0, height=height
        )
        assert len(lines) <= height
        assert "  w dropped 1 events" == lines[-1]
        assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.95, None),
        ([3.0], 1, 3.0),
        ([1.0, 3.0], 0.5, 2.0),
        ([float(n) for n in range(101)], 0.95, 95),
        ([float(n) for n in range(99)], 0.99, None),
        ([float(n) for n in range(19)], 0.05, None),
    ],
)
def test_quantiles(values, share, expected):
    """Of nothing, of one, between two, and of too few."""
    assert expected == quantile(values, share)


def test_with_sampled_details_calls_are_estimates_and_tokens_are_those_of_requests():
    """The detail lines come after their request's, and stand for several requests."""
    live = Live()

    def take(event, second, duration=None, **extra):
        moment = f"2026-11-21T02:00:{second:02}+00:00"
        live.take("worker_3", 5, Line(moment, event, duration, extra, 5))

    take("request_start", 1, sample=12, session=1)
    take("request_start", 1, sample=13, session=1)
    for sample, tokens in ((12, 40), (13, 20)):
        take(
            "request", 5, 4.0, sample=sample, session=1, request_id=f"q{sample}",
            one_in=2, generated_tokens=tokens,
        )  # fmt: skip
    take("engine_call", 3, 1.0, request_id="q12", turn=0, response_tokens=40, sampled=2)
    take("tool_call", 5, 0.5, request_id="q12", turn=0, tool="search", status="error", sampled=2)

    assert [40, 20] == [tokens for _, tokens in live.rates]
    assert ([0.5, 0.5], 2) == (
        live.steps[5].tools["search"].seconds,
        live.steps[5].tools["search"].failed,
    )
    assert {} == live.in_flight
    assert "≈ calls" in "\n".join(frame(live, {}, {}, title="run", now_s=live.newest_s + 1))
