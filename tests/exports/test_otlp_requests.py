"""Requests as OpenTelemetry traces: one request by hand, and what a real receiver and parser get."""

import itertools
import json
from collections import Counter

import pytest
from commands import command
from picked import picked

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from cached_runs import REHEARSED, cached, copied
from exports.otlp_receiver import attributes, spans_of
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from reading_back import lines_with_files

from verl_profiler.cli import export, main
from verl_profiler.exports.otlp_spans import request_spans
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

REQUEST = "e12c8d8b634c4d7886780b71afe3f673"
# Read from the lines of the recorded rehearsal: name, microseconds, depth.
TREE = """
invoke_agent tool_agent 2215439
    agent_loop 2121180
        prompt_build 63317
        turn 1191909
            engine_call 650486
                server_acquire 12786
                engine_request 620470
            token_merge 4735
            tool_parsing 1043
            tool_execution 497415
                execute_tool check_answer 497415
            token_merge 35138
        turn 861999
            engine_call 859420
                server_acquire 26308
                engine_request 761459
            token_merge 822
            tool_parsing 1466
    postprocess 71153
        reward 20387
            reward_score 4992
        tq_meta 11024
        tq_put 30797
        tq_meta 604
"""
BASE = 1_795_000_000_000_000


run = command(export, "otlp")


def tree(spans):
    """Return the lines of a trace, children in the order of their starts."""
    below = {}
    for span in spans:
        below.setdefault(span.parent_span_id, []).append(span)

    def lines(parent, depth):
        for span in sorted(below.get(parent, ()), key=lambda each: each.start_time_unix_nano):
            duration_us = (span.end_time_unix_nano - span.start_time_unix_nano) // 1000
            yield f"{'    ' * depth}{span.name} {duration_us}"
            yield from lines(span.span_id, depth + 1)

    return list(lines(b"", 0))


def parents(spans):
    """Return by span name the names of the spans that contain those of that name."""
    names = {span.context.span_id: span.name for span in spans}
    found = {}
    for span in spans:
        found.setdefault(span.name, set()).add(span.parent and names[span.parent.span_id])
    return found


def test_a_receiver_gets_the_recorded_request_as_one_trace(receiver):
    """Over the wire; the trace id is the request id, and all is one tree."""
    assert 0 == run(REHEARSED, "--endpoint", receiver.url, "--step", 1)

    spans = [span for span in receiver.spans if span.trace_id.hex() == REQUEST]
    assert TREE.strip().splitlines() == tree(spans)
    (root,) = (span for span in spans if not span.parent_span_id)
    wanted = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "tool_agent",
        "gen_ai.conversation.id": REQUEST,
        # 69 tokens of response are those of two calls, 35 and 17, and the tool's.
        "gen_ai.usage.input_tokens": 43,
        "gen_ai.usage.output_tokens": 35 + 17,
        "verl.prompt_tokens": 43,
        "verl.generated_tokens": 52,
        "verl.tool_tokens": 17,
        "verl.response_tokens": 69,
        "verl.reward": 0.0,
        "verl.worker": 1,
        "verl.process": "worker_1",
        "verl.turns": 2,
        "verl.validate": False,
        "verl.time.tool_s": 0.497415,
        "verl.time.engine_s": 1.509906,
        "verl.step": 1,
        "verl.finished": True,
    }
    assert wanted == {name: attributes(root)[name] for name in wanted}
    (tool,) = (span for span in spans if span.name.startswith("execute_tool"))
    assert "check_answer" == attributes(tool)["gen_ai.tool.name"]
    calls = [attributes(span) for span in spans if span.name == "engine_call"]
    usage = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    assert [(43, 35), (95, 17)] == [tuple(call[name] for name in usage) for call in calls]
    assert [["stop"]] * 2 == [call["gen_ai.response.finish_reasons"] for call in calls]
    assert {REQUEST} == {attributes(span)["gen_ai.conversation.id"] for span in spans}
    engine = sorted(
        (attributes(span) for span in spans if span.name == "engine_request"),
        key=lambda found: found["verl.queue_s"],
    )
    inside = ("verl.queue_s", "verl.prefill_s", "verl.decode_s")
    assert [(0.003622, 0.009822, 0.592573), (0.05413, 0.036581, 0.619568)] == [
        tuple(round(found[name], 6) for name in inside) for found in engine
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The spans of the recorded rehearsal."""
    path = tmp_path_factory.mktemp("spans") / "all.jsonl"
    assert 0 == run(REHEARSED, "-o", path)
    return spans_of(path.read_text().splitlines())


def test_the_file_has_all_requests_and_calls_once(whole, tmp_path):
    """A transfer of a request is in its trace; others are exported as TransferQueue's."""
    assert 0 == run(REHEARSED, "-o", tmp_path / "requests.jsonl", "--only", "requests", "--step", 2)
    assert 0 == run(REHEARSED, "-o", tmp_path / "tq.jsonl", "--only", "transfer-queue")

    names = {
        path.stem: Counter(span.name for span in spans_of(path.read_text().splitlines()))
        for path in tmp_path.glob("*.jsonl")
    }
    names["all"] = Counter(span.name for span in whole)
    lines = lines_with_files(REHEARSED)
    requests = Counter(line["step"] for line in lines if line["event"] == "request")
    assert (96, requests[2], 0) == tuple(
        names[each]["invoke_agent tool_agent"] for each in ("all", "requests", "tq")
    )
    recorded = Counter(line["event"] for line in lines)
    for event in ("tq_put", "tq_get"):
        assert recorded[event] == names["all"][event] == names["tq"][event]
    assert len(whole) == len({(span.trace_id, span.span_id) for span in whole})


def test_names_are_those_of_the_semantic_conventions():
    """Every `gen_ai.*` attribute and operation is in OpenTelemetry's own list."""
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}

    with load([REHEARSED]) as opened:
        spans = list(request_spans(opened.tables))

    used = {name for span in spans for name in span.attributes if name.startswith("gen_ai.")}
    assert used <= known
    named = {span.attributes.get("gen_ai.operation.name") for span in spans} - {None}
    assert {"invoke_agent", "execute_tool", "text_completion"} == named <= operations


def test_attempts_pauses_and_the_consuming_step_of_an_asynchronous_run():
    """Each attempt has the engine's part of its own; a request that was cut off ends where it was seen."""
    with load([cached("colocate_async_run")]) as opened:
        spans = list(request_spans(opened.tables))

    traces = {}
    for span in spans:
        traces.setdefault(f"{span.context.trace_id:032x}", []).append(span)
    retried = traces["1234d0f70ba74651827c4d0250aa3de5"]
    above = parents(retried)
    assert {"engine_call"} == above["engine_attempt"] == above["parked"]
    assert 2 == sum(span.name == "engine_attempt" for span in retried)
    assert "engine_attempt" in above["engine_request"]
    late = traces["4b1f7a2599624308859f7ebeb20276a2"][0].attributes
    assert (2, 3, "consumed") == picked(late, "verl.step verl.consumed_step verl.fate")
    cut = traces["059c6b8329be402fb232a09d7248800c"][0]
    assert (1795418093057385, 1795418107690710) == (cut.start_time // 1000, cut.end_time // 1000)
    assert (False, False) == (cut.status.is_ok, cut.attributes["verl.finished"])


def test_waits_in_pauses_whose_end_was_not_recorded_are_no_spans(tmp_path):
    """They last until the end of each call in recordings of version 0.1 with verl 0.9.0."""
    folder = copied(cached("vllm_colocate_async_run"), tmp_path / "run")

    def parked():
        with load([folder], cache=False) as opened:
            names = [span.name for span in request_spans(opened.tables)]
        return names.count("engine_parked")

    assert parked()
    for header in folder.glob("processes/engine_*.json"):
        content = json.loads(header.read_text())
        content["probes"].setdefault("missed", {})["engine_resume"] = "no target"
        header.write_text(json.dumps(content))
    assert 0 == parked()


def tables(*events, **request):
    """Return tables of one request, by hand: events are (name, begin, end, turn, fields)."""
    who = {"run": "r", "step": 4, "name": "worker_0", "request_id": "q", "validate": False}
    whole = {**who, "begin_us": BASE, "end_us": BASE + 100, "last_us": BASE + 100, "sample": "17"}
    rows = [
        {**who, "event": name, "family": "user" if name.startswith("my_") else "rollout"}
        | {"begin_us": BASE + begin, "end_us": BASE + end, "turn": turn, "extra": fields}
        for name, begin, end, turn, fields in events
    ]
    return Tables.of({"requests": [{**whole, **request}], "events": rows, "samples": []})


def test_own_spans_are_in_the_innermost_span_that_contains_them():
    """Of two parallel tool calls around one, it is unknown whose it is; its attributes keep their names."""
    given = tables(
        ("turn", 0, 90, 0, {}),
        ("tool_execution", 10, 80, 0, {}),
        ("tool_call", 10, 80, 0, {"tool": "slow"}),
        ("tool_call", 30, 60, 0, {"tool": "quick"}),
        ("my_query", 15, 20, 0, {"table": "t", "ids": [1, 2]}),
        ("my_row", 16, 17, 0, {}),
        ("my_doubt", 40, 50, 0, {}),
        ("my_end", 92, 95, None, {}),
    )

    spans = list(request_spans(given))

    above = parents(spans)
    assert {"tool_execution"} == above["execute_tool quick"] == above["execute_tool slow"]
    assert {"execute_tool slow"} == above["my_query"]
    assert {"my_query"} == above["my_row"]
    assert {"tool_execution"} == above["my_doubt"]
    assert {"invoke_agent"} == above["my_end"]
    (query,) = (span for span in spans if span.name == "my_query")
    assert ("t", "[1,2]") == (query.attributes["table"], query.attributes["ids"])


def test_an_event_that_sticks_out_by_the_rounding_of_times_stays_in_what_contains_it():
    """A turn that begins 1 us before its request, and calls that stick out of their turn."""
    given = tables(
        ("turn", -1, 9_000, 0, {}),
        ("engine_call", -2, 5_000, 0, {}),
        ("tool_execution", 5_000, 9_001, 0, {}),
        ("tool_call", 5_000, 9_002, 0, {"tool": "t"}),
        end_us=BASE + 10_000,
        last_us=BASE + 10_000,
    )

    spans = list(request_spans(given))

    assert {
        "turn": {"invoke_agent"},
        "engine_call": {"turn"},
        "tool_execution": {"turn"},
        "execute_tool t": {"tool_execution"},
    } == {name: above for name, above in parents(spans).items() if name != "invoke_agent"}
    times = {
        span.name: (span.start_time // 1000 - BASE, span.end_time // 1000 - BASE) for span in spans
    }
    assert {
        "invoke_agent": (0, 10_000),
        "turn": (0, 9_000),
        "engine_call": (0, 5_000),
        "tool_execution": (5_000, 9_000),
        "execute_tool t": (5_000, 9_000),
    } == times


def test_errors_are_statuses():
    """With the exception's type, as OpenTelemetry names it."""
    given = tables(status="error", error="TimeoutError")

    (root,) = request_spans(given)

    assert not root.status.is_ok
    assert "TimeoutError" == root.attributes["error.type"]


def test_requests_without_a_time_of_day_are_left_out():
    """A span needs one."""
    assert [] == list(request_spans(tables(begin_us=5, end_us=9, last_us=9)))


def test_exporting_twice_gives_the_same_bytes(whole, tmp_path):
    """A backend that is sent a run again has it once; a step alone has the spans that it has in all."""
    run(REHEARSED, "-o", tmp_path / "a.jsonl", "--step", 2)
    run(REHEARSED, "-o", tmp_path / "b.jsonl", "--step", 2, "--no-cache")

    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    spans = {span.span_id: span for span in whole}
    alone = spans_of((tmp_path / "a.jsonl").read_text().splitlines())
    assert alone
    assert all(spans[span.span_id] == span for span in alone)


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


def test_spans_of_a_trace_lie_inside_their_parents():
    """Except those of other processes, whose clocks may differ."""
    elsewhere = {"engine_request", "reward_score"}
    with load([REHEARSED]) as opened:
        spans = {span.context.span_id: span for span in request_spans(opened.tables)}

    inside = [span for span in spans.values() if span.parent and span.name not in elsewhere]
    assert len(inside) > 2000
    for span in inside:
        parent = spans[span.parent.span_id]
        assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    for first, second in itertools.pairwise(spans.values()):
        # Traces are written one after another.
        assert first.context.trace_id == second.context.trace_id or second.parent is None
