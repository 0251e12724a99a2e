"""TransferQueue as OpenTelemetry spans: what a receiver decodes, and the attributes for dashboards."""

import itertools

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from exports.otlp_receiver import Receiver, attributes, spans_of
from tq_lines import Writer

from verl_profiler.errors import ReadingError
from verl_profiler.exports.otlp import About, otlp_lines, send
from verl_profiler.exports.otlp_transfer_queue import transfer_queue_spans as spans
from verl_profiler.reading.formats.tq_log import read_logs
from verl_profiler.reading.tables.tables import Tables

SHARED_ID = "5f0c6a51-3f3e-5b7c-9a64-0b8f3d2c1e4f"
ABOUT = About(project="p", experiment={"training.log": "e"})


def test_a_receiver_gets_every_call_stage_and_transfer(receiver, log_tables):
    """Over the wire; spans of the same data are one trace and lie inside their call.

    The trace is that of the first of a call's ids; a UUID is the trace's id as it stands.
    """
    sent = send(spans(log_tables, ABOUT), receiver.url)

    names = sorted(span.name for span in receiver.spans)
    assert sent == len(receiver.spans) == 3 + 8 + 5
    assert ["generate", "generate", "update"] == [n for n in names if "tq" not in n.lower()]
    assert 3 == names.count("TQ_GET:generate") + names.count("TQ_GET:update")
    assert {"/v1/traces"} == set(receiver.paths)
    assert {"rl_insight_monitor"} == receiver.services
    calls = {span.span_id: span for span in receiver.spans if not span.parent_span_id}
    assert 3 == len(calls)
    assert 2 == sum(span.trace_id.hex() == SHARED_ID.replace("-", "") for span in calls.values())
    for span in receiver.spans:
        if span.parent_span_id:
            parent = calls[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            # Lines have whole microseconds: a last stage may end one after its call.
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + 1000


def test_stages_of_calls_without_ids_lie_inside_their_call_too(tmp_path):
    """The guide's fork gives none."""
    writer = Writer(fork=True)
    for number in range(3):
        writer.call(number * 0.1, [("get", 0.05), ("compute", 0.8), ("put", 0.06)])
    path = tmp_path / "training.log"
    path.write_text(writer.text())

    found = list(spans(read_logs([path]).tables(), ABOUT))

    calls = {span.context.span_id: span for span in found if span.parent is None}
    stages = [span for span in found if span.parent is not None]
    assert (3, 9) == (len(calls), len(stages))
    for span in stages:
        parent = calls[span.parent.span_id]
        assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time + 1000


def test_spans_say_what_the_dashboards_ask_for(receiver, log_tables):
    """State timeline: lanes with one state at a time.  `global_steps` is compared as a number."""
    send(spans(log_tables, ABOUT), receiver.url)

    lanes = {}
    for span in receiver.spans:
        found = attributes(span)
        assert ("p", "e") == (found["project"], found["experiment_name"])
        assert type(found["global_steps"]) is int
        assert found["status"] in ("success", "error")
        if "state_lane_id" in found:
            assert span.name == found["state_name"]
            assert "state_interval" == found["monitor.trace_segment"]
            times = (span.start_time_unix_nano, span.end_time_unix_nano)
            lanes.setdefault(found["state_lane_id"], []).append(times)
    # The two overlapping calls of one process have a lane each.
    assert {"AgentLoopWorker pid=7", "AgentLoopWorker pid=7 / 2", "WorkerDict pid=8"} == set(lanes)
    for times in lanes.values():
        times.sort()
        assert all(end <= begin + 1000 for (_, end), (begin, _) in itertools.pairwise(times))


def test_transfers_of_a_request_are_in_its_trajectory():
    """The lane, identity and turn of RL-Insight's agent loop protocol."""
    at = {"begin_us": 1_795_000_000_000_000, "end_us": 1_795_000_000_005_000, "duration_us": 5_000}
    who = {"run": "r", "step": 4, "name": "worker_0", "request_id": "q", "validate": False}
    request = {**who, "sample": "17", "session": "2", "uid": "u", "turns": 3}
    transfer = {**who, **at, "event": "tq_put", "size_bytes": 2048}
    tables = Tables.of({"requests": [request], "transfers": [transfer]})

    (span,) = spans(tables, About(experiment={"r": "e"}))

    lane = {"state_lane_id": "experiment=e/sample=17/session=2/traj=0", "experiment_name": "e"}
    identity = {"sample": "17", "session": "2", "traj": "0", "turn": 2, "uid": "u"}
    wanted = {**lane, **identity, "global_steps": 4, "session_id": "q"}
    assert wanted == {key: span.attributes[key] for key in wanted}


def test_the_file_is_otlp_json_and_the_same_twice(log_tables):
    """The official classes read it; a backend that is sent a run again has it once."""
    lines = list(otlp_lines(spans(log_tables, ABOUT)))
    sent = spans_of(lines)

    assert [span.name for span in spans(log_tables, ABOUT)] == [span.name for span in sent]
    assert {0, 2} == {span.status.code for span in sent}
    assert lines == list(otlp_lines(spans(log_tables, ABOUT)))


def test_calls_without_a_time_of_day_are_left_out(tmp_path):
    """A span needs one."""
    path = tmp_path / "bare.log"
    path.write_text(
        "[TQ-TRACE] trace_id=a | func=f | stage=FUNCTION_END | total_duration=1.000000s | "
        "get_ratio=0.00% | compute_ratio=100.00% | put_ratio=0.00% | timestamp=12.000000\n"
    )

    assert [] == list(spans(read_logs([path]).tables(), ABOUT))


def test_an_endpoint_that_takes_nothing_is_an_error(log_tables):
    """It says what to look at; a path that is given is kept."""
    refusing = Receiver(status=400)
    try:
        with pytest.raises(ReadingError, match="rejected the spans; 0 were sent"):
            send(spans(log_tables, ABOUT), f"{refusing.url}/otlp/v1/traces")
    finally:
        refusing.stop()

    assert {"/otlp/v1/traces"} == set(refusing.paths)
    with pytest.raises(ReadingError, match="not an OTLP/HTTP endpoint"):
        send(spans(log_tables, ABOUT), "localhost:4318")
