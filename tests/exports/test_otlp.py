"""TransferQueue as OpenTelemetry spans: what a receiver decodes, and the attributes for dashboards."""

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from cached_runs import REHEARSED
from commands import command
from exports.otlp_receiver import Receiver, attributes, spans_of
from reading_back import lines_with_files
from tq_lines import Writer

from verl_profiler.cli import export, main
from verl_profiler.errors import ReadingError
from verl_profiler.exports.otlp import send
from verl_profiler.exports.otlp import transfer_queue_spans as spans
from verl_profiler.reading.formats.tq_log import read_logs

SHARED_ID = "5f0c6a51-3f3e-5b7c-9a64-0b8f3d2c1e4f"


def test_a_receiver_gets_every_call_stage_and_transfer(receiver, log_tables):
    """Over the wire; spans of the same data are one trace and lie inside their call.

    The trace is that of the first of a call's ids; a UUID is the trace's id as it stands. A call has its
    parts in seconds, a transfer what it moved.
    """
    sent = send(spans(log_tables), receiver.url)

    names = sorted(span.name for span in receiver.spans)
    assert sent == len(receiver.spans) == 3 + 8 + 5
    assert ["generate", "generate", "update"] == [n for n in names if "tq" not in n.lower()]
    assert 3 == names.count("TQ_GET:generate") + names.count("TQ_GET:update")
    assert {"/v1/traces"} == set(receiver.paths)
    assert {"verl"} == receiver.services
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
    (update,) = (attributes(span) for span in calls.values() if span.name == "update")
    parts = ("verl.tq.get_s", "verl.tq.compute_s", "verl.step", "verl.tq.sampled")
    assert [0.05, 0.8, 2, 2] == [update[name] for name in parts]
    assert update["verl.tq.trace_ids"][:2] == [SHARED_ID, "other"]
    sizes = [attributes(span).get("verl.tq.size_bytes") for span in receiver.spans]
    assert 5 == sum(size is not None for size in sizes)


def test_stages_of_calls_without_ids_lie_inside_their_call_too(tmp_path):
    """The guide's fork gives none."""
    writer = Writer(fork=True)
    for number in range(3):
        writer.call(number * 0.1, [("get", 0.05), ("compute", 0.8), ("put", 0.06)])
    path = tmp_path / "training.log"
    path.write_text(writer.text())

    found = list(spans(read_logs([path]).tables()))

    calls = {span.context.span_id: span for span in found if span.parent is None}
    stages = [span for span in found if span.parent is not None]
    assert (3, 9) == (len(calls), len(stages))
    for span in stages:
        parent = calls[span.parent.span_id]
        assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time + 1000


def test_calls_without_a_time_of_day_are_left_out(tmp_path):
    """A span needs one."""
    path = tmp_path / "bare.log"
    path.write_text(
        "[TQ-TRACE] trace_id=a | func=f | stage=FUNCTION_END | total_duration=1.000000s | "
        "get_ratio=0.00% | compute_ratio=100.00% | put_ratio=0.00% | timestamp=12.000000\n"
    )

    assert [] == list(spans(read_logs([path]).tables()))


def test_an_endpoint_that_takes_nothing_is_an_error(log_tables):
    """It says what to look at; a path that is given is kept."""
    refusing = Receiver(status=400)
    try:
        with pytest.raises(ReadingError, match="rejected the spans; 0 were sent"):
            send(spans(log_tables), f"{refusing.url}/otlp/v1/traces")
    finally:
        refusing.stop()

    assert {"/otlp/v1/traces"} == set(refusing.paths)
    with pytest.raises(ReadingError, match="not an OTLP/HTTP endpoint"):
        send(spans(log_tables), "localhost:4318")


def test_a_file_has_every_transfer_once_and_the_same_bytes_again(tmp_path):
    """A backend that is sent a run again has it once; other processes' transfers are in it, too."""
    run = command(export, "otlp")
    assert 0 == run(REHEARSED, "-o", tmp_path / "a.jsonl")
    assert 0 == run(REHEARSED, "-o", tmp_path / "b.jsonl", "--no-cache")

    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    found = spans_of((tmp_path / "a.jsonl").read_text().splitlines())
    recorded = [line["event"] for line in lines_with_files(REHEARSED)]
    for event in ("tq_put", "tq_get"):
        assert recorded.count(event) == sum(span.name == event for span in found)
    assert len(found) == len({(span.trace_id, span.span_id) for span in found})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("otlp RUN -o OUT --merge x", "export otlp does not honor --merge"),
        ("otlp RUN --endpoint http://127.0.0.1:1 -o x", "--endpoint writes none"),
        ("otlp RUN -o OUT --step 9", "step 9 is not in this run"),
        ("perfetto RUN --endpoint http://x", "export otlp does"),
        ("otlp RUN --project p", "export trackers does"),
    ],
)
def test_options_that_are_not_honored_are_refused(tmp_path, monkeypatch, capsys, words, message):
    """Before anything is written; the timeline does not honor options of spans."""
    monkeypatch.chdir(tmp_path)
    named = {"RUN": str(REHEARSED), "OUT": str(tmp_path / "y")}
    assert 2 == main(["export", *(named.get(word, word) for word in words.split())])
    assert message in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())
