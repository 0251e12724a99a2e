"""The timeline of a run against its tables, read with Perfetto's own classes."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from cached_runs import REHEARSED
from views.perfetto_reading import read_trace

from verl_profiler.exports.perfetto import PerfettoTrace
from verl_profiler.exports.tracks import origin_ns, write_run
from verl_profiler.reading.reader import load

NOT_DRAWN = ("memory", "profiler_cost", "request_start", "engine_state")


def write(tables, path):
    with path.open("wb") as file:
        trace = PerfettoTrace(file, origin_ns(tables, None))
        write_run(tables, None, trace)
        trace.close()
    return path


@pytest.fixture(scope="module")
def run():
    with load(REHEARSED) as opened:
        yield opened


@pytest.fixture(scope="module")
def reading(run, tmp_path_factory):
    return read_trace(write(run.tables, tmp_path_factory.mktemp("trace") / "run.pftrace"))


def test_every_event_is_on_the_timeline_once(run, reading):
    """In the track of its process, at its time, under its name."""
    expected = Counter(
        (row["host"], row["role"], row["name"], row["event"], row["begin_us"], row["end_us"])
        for row in run.rows("SELECT * FROM events JOIN processes USING (run, name, role, host)")
        if row["event"] not in NOT_DRAWN
    )
    drawn = Counter()
    for span in (*reading.spans, *reading.instants):
        node, role, name, _ = reading.path(span.track)
        end_ns = span.begin_ns if span in reading.instants else span.end_ns
        if span.name.endswith(" (unfinished)"):
            continue
        event = span.name.partition(" ")[0]
        key = (node.removeprefix("node "), role, name, event, span.begin_ns // 1000, end_ns // 1000)
        drawn[key] += 1

    assert [] == reading.faults
    assert expected == drawn


def test_fields_are_those_of_the_file(run, reading):
    """Whole numbers stay whole; a request is found by its id."""
    (row, *_) = run.rows(
        "SELECT begin_us, extra FROM events WHERE event = 'request' ORDER BY duration_us DESC"
    )
    (span,) = [
        span
        for span in reading.spans
        if span.name.startswith("request ") and span.begin_ns == row["begin_us"] * 1000
    ]

    assert json.loads(row["extra"]) == span.fields
    assert f"request {span.fields['request_id'][:8]}" == span.name


def test_spans_of_a_lane_are_nested_or_apart(reading):
    """Children lie inside their parents in time."""
    open_spans = {}
    for span in reading.spans:
        stack = open_spans.setdefault(span.track, [])
        del stack[span.depth :]
        if stack:
            assert stack[-1].begin_ns <= span.begin_ns
            assert span.end_ns <= stack[-1].end_ns
        stack.append(span)


def test_no_more_lanes_than_requests_at_one_time(run, reading):
    """A lane is used again when its request has ended; parallel calls take further ones."""
    for name in {row["name"] for row in run.rows("SELECT DISTINCT name FROM requests")}:
        lanes = [
            track
            for track in reading.tracks
            if reading.path(track)[-2:] == (name, "requests") and track not in reading.counters
        ]
        flight = [
            max(value for _, value in values)
            for track, values in reading.counters.items()
            if reading.path(track)[-2:] == (name, "requests in flight")
        ]

        assert flight[0] <= len(lanes) <= 2 * flight[0]


def test_arrows_lead_to_the_engine_and_back(run, reading):
    """One to the engine and one back per call that both sides saw, and two per tool call."""
    arrows = Counter()
    for ends in reading.arrows().values():
        assert 2 == len(ends)
        source, target = sorted(ends, key=lambda span: span.begin_ns)
        arrows[source.name.partition(" ")[0], target.name.partition(" ")[0]] += 1
        if source.name == "engine_call" and target.name == "engine_request":
            assert source.fields["engine_request_id"] == target.fields["engine_request_id"]
    served = run.rows("SELECT count(*) AS n FROM engine_calls WHERE engine_begin_us IS NOT NULL")
    tools = run.rows("SELECT count(*) AS n FROM tool_calls")

    assert served[0]["n"] == arrows["engine_call", "engine_request"] > 0
    assert served[0]["n"] == sum(
        n for (source, _), n in arrows.items() if source == "engine_request"
    )
    assert tools[0]["n"] == sum(n for (_, target), n in arrows.items() if target == "tool_call")
    assert tools[0]["n"] == sum(n for (source, _), n in arrows.items() if source == "tool_call")


def test_counters_end_where_nothing_is_under_way(run, reading):
    """What is in flight and its tokens per second; tokens are the area below the curve."""
    whole = {
        reading.path(track)[-1]: values
        for track, values in reading.counters.items()
        if reading.path(track)[0] == "whole run"
    }
    tokens = run.rows("SELECT sum(response_tokens) AS n FROM engine_calls WHERE duration_us > 0")[
        0
    ]["n"]
    rates = whole["generated tokens per second"]
    area = sum(
        value * (after_ns - time_ns) / 1e9 for (time_ns, value), (after_ns, _) in pairwise(rates)
    )
    unfinished = run.rows("SELECT count(*) AS n FROM requests WHERE end_us IS NULL")[0]["n"]

    assert unfinished == whole["requests in flight"][-1][1]
    assert pytest.approx(0, abs=1e-3) == rates[-1][1]
    assert pytest.approx(tokens, rel=1e-4) == area


def test_memory_and_lags_are_counters_of_their_process(run, reading):
    """With their units."""
    rows = run.rows("SELECT count(*) AS n FROM memory WHERE used_bytes IS NOT NULL")
    lags = run.rows("SELECT max(duration_us) AS longest FROM lags")[0]["longest"]
    by_name = {}
    for track, values in reading.counters.items():
        by_name.setdefault(reading.path(track)[-1], []).extend(values)

    assert rows[0]["n"] == len(by_name["memory used"])
    assert pytest.approx(lags / 1000) == max(value for _, value in by_name["event-loop lag"])


def test_requests_without_end_stay_open(tables, span, tmp_path):
    """A request of which only the begin is known begins, and does not end."""
    events = [
        span("request_start", 1, 1, sample="3", session="0", uid="u") | {"duration_us": None},
        span("step", 0, 5, name="trainer_0"),
    ]
    reading = read_trace(write(tables(events), tmp_path / "run.pftrace"))

    (request,) = [span for span in reading.spans if span.name.endswith(" (unfinished)")]
    assert (1_000_000_000, None) == (request.begin_ns, request.end_ns)


def test_a_child_that_sticks_out_by_the_rounding_of_times_is_drawn_in_its_parent(
    tables, span, tmp_path
):
    """One lane: its begin 1 us before its step's and its end 1 us after; a true overlap takes another."""
    micro = 1e-6
    events = [
        span("gen", 10 - micro, 12, name="trainer_0"),
        span("update_actor", 12, 20 + micro, name="trainer_0"),
        span("step", 10, 20, name="trainer_0"),
        span("gen", 29, 32, name="trainer_0", step=2),
        span("step", 30, 40, name="trainer_0", step=2),
    ]
    reading = read_trace(write(tables(events), tmp_path / "run.pftrace"))

    tracks = {span.track for span in reading.spans}
    assert [] == reading.faults
    assert [
        ("step 1", 0, 10_000_000, 20_000_000),
        ("gen", 1, 10_000_000, 12_000_000),
        ("update_actor", 1, 12_000_000, 20_000_000),
    ] == [
        (span.name, span.depth, span.begin_ns // 1000, span.end_ns // 1000)
        for span in reading.spans
        if span.begin_ns < 25 * 10**9
    ]
    assert 2 == len(tracks), "the second gen began a second before its step"
