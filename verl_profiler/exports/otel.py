"""TransferQueue calls as OpenTelemetry spans: to an OTLP endpoint, or as OTLP in JSON lines.

A call is a span with its stages and transfers inside; calls that handled the same data are one
trace.  Spans carry the attributes by which RL-Insight's dashboards find theirs:

    state timeline          `state_lane_id`, `state_name`: one lane per process, more where calls overlap
    agent loop trajectory   identity of the sample, `turn`, `type`: gets and puts of one request

Ids are made from the run and the call: exporting twice gives the same spans.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.tq_traces import tq_call_stages, tq_calls, tq_transfers
from verl_profiler.errors import ReadingError
from verl_profiler.reading.tables.tables import Tables

try:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ReadingError(
        "this export needs the OpenTelemetry SDK, which is not installed.\n"
        "pip install 'verl-profiler[otel]'",
        "missing-extra",
    ) from error

__all__ = ["SERVICE", "About", "otlp_lines", "send", "spans"]

# The service under which RL-Insight's dashboards look.
SERVICE = "rl_insight_monitor"
_BATCH = 512
# Times before 2001 are no times of day: a process's own clock, of lines without one.
_FIRST_WALL_US = 10**15
_SCOPE = InstrumentationScope("verl_profiler")


@dataclass(frozen=True)
class About:
    """What all spans of an export say.

    Args:
        project: RL-Insight's variable of that name.
        experiment: By run label; the label itself where it is not named.
        service: `service.name` of the resource.
    """

    project: str = ""
    experiment: Mapping[str, str] | None = None
    service: str = SERVICE

    def of(self, run: str) -> str:
        """Return the experiment's name."""
        return (self.experiment or {}).get(run, run)


def spans(
    tables: Tables, about: About, steps: Steps = None, *, function: str | None = None
) -> Iterator[ReadableSpan]:
    """Give the spans of all calls whose time of day is known.

    Args:
        tables: The tables.
        about: What all of them say.
        steps: First and last step; None for all.
        function: One function; None for all.
    """
    resource = Resource({SERVICE_NAME: about.service})
    calls = [row for row in tq_calls(tables, steps, function=function) if _placed(row)]
    stages = [row for row in tq_call_stages(tables, steps, function=function) if _placed(row)]
    moves = [row for row in tq_transfers(tables, steps, function=function) if _placed(row)]
    lanes = _lanes(calls)
    contexts: dict[tuple[Any, ...], tuple[SpanContext, str, list[str]]] = {}
    for row in calls:
        context = SpanContext(_trace_id(row), _span_id(row, ""), False, TraceFlags(1))
        lane = lanes[_of(row)]
        contexts[_of(row)] = context, lane, row["trace_ids"]
        share = ((row["get_us"] or 0) + (row["put_us"] or 0)) / max(row["duration_us"], 1)
        attributes = {
            **_attributes(row, about),
            "verl.tq.overhead_share": share,
            **{f"verl.tq.{s}_s": (row[f"{s}_us"] or 0) / 1e6 for s in ("get", "compute", "put")},
        }
        yield _span(row["func"], row, context, None, attributes, resource)
    for row in stages:
        context, lane, ids = contexts.get(_of(row), (None, row["name"], []))
        name = f"TQ_{row['stage'].upper()}:{row['func']}"
        attributes = {**_attributes({**row, "trace_ids": ids}, about), **_state(name, lane)}
        yield _span(name, row, _child(context, row, row["stage"]), context, attributes, resource)
    for row in moves:
        context, _, _ = contexts.get(_of(row, parent=True), (None, "", []))
        attributes = {**_attributes(row, about), **_moved(row), **_trajectory(row, about)}
        own = _child(context, row, row["event"])
        yield _span(row["event"], row, own, context, attributes, resource)


def _placed(row: Mapping[str, Any]) -> bool:
    begin_us, end_us = row["begin_us"], row["end_us"]
    return begin_us is not None and end_us is not None and begin_us >= _FIRST_WALL_US


def _of(row: Mapping[str, Any], *, parent: bool = False) -> tuple[Any, ...]:
    """Return what names a call; a transfer's own id is its call's with a number behind."""
    call = row["call"]
    if parent and call is not None:
        call = call.partition(".")[0]
    return row["run"], row["name"], call if call is not None else ("", row["begin_us"], row["func"])


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def _trace_id(row: Mapping[str, Any]) -> int:
    """Return the trace of the data that a call handled, the first of its ids; else one of its own."""
    if row["trace_ids"]:
        try:
            number = uuid.UUID(row["trace_ids"][0]).int
        except ValueError:
            number = int.from_bytes(_digest(row["run"], row["trace_ids"][0]), "big")
    else:
        number = int.from_bytes(_digest(*_of(row), row["begin_us"]), "big")
    return number or 1


def _span_id(row: Mapping[str, Any], what: str) -> int:
    digest = _digest(*_of(row), what, row["begin_us"], row["end_us"])
    return int.from_bytes(digest[:8], "big") or 1


def _child(parent: SpanContext | None, row: Mapping[str, Any], what: str) -> SpanContext:
    trace = _trace_id({"trace_ids": [], **row}) if parent is None else parent.trace_id
    return SpanContext(trace, _span_id(row, what), False, TraceFlags(1))


def _lanes(calls: Rows) -> dict[tuple[Any, ...], str]:
    """Put calls of a process that overlap on lanes of their own: one lane shows one state at a time."""
    busy_until: dict[tuple[str, str], list[int]] = {}
    lanes = {}
    for row in calls:
        ends = busy_until.setdefault((row["run"], row["name"]), [])
        free = next((place for place, end in enumerate(ends) if end <= row["begin_us"]), len(ends))
        ends[free : free + 1] = [row["end_us"]]
        lanes[_of(row)] = row["name"] if free == 0 else f"{row['name']} / {free + 1}"
    return lanes


def _attributes(row: Mapping[str, Any], about: About) -> dict[str, Any]:
    found = {
        "monitor.trace_source": "transfer_queue",
        "project": about.project,
        "experiment_name": about.of(row["run"]),
        "global_steps": row["step"],
        "verl.run": row["run"],
        "verl.process": row["name"],
        "verl.role": row.get("role"),
        "verl.tq.function": row["func"],
        "verl.tq.call": row["call"],
        "verl.tq.trace_ids": row["trace_ids"] or None,
        "verl.tq.rows": row.get("rows"),
        "verl.tq.sampled": row.get("sampled"),
        "status": "error" if row.get("status") else "success",
    }
    return {name: value for name, value in found.items() if value is not None}


def _state(name: str, lane: str) -> dict[str, Any]:
    return {
        "monitor.trace_segment": "state_interval",
        "state_name": name,
        "state_lane_id": lane,
    }


def _moved(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {"verl.tq.size_bytes": row["size_bytes"], "verl.tq.mib_per_s": row["mib_per_s"]}
    return {name: value for name, value in found.items() if value is not None}


def _trajectory(row: Mapping[str, Any], about: About) -> dict[str, Any]:
    """Say to which trajectory a transfer belongs, in the words of RL-Insight's agent loop protocol."""
    if row["sample"] is None:
        return {}
    experiment, session = about.of(row["run"]), row["session"] or "0"
    return {
        "sample": row["sample"],
        "session": session,
        "traj": "0",
        "state_lane_id": f"experiment={experiment}/sample={row['sample']}/session={session}/traj=0",
        "uid": row["uid"] or "",
        "session_id": row["request_id"],
        "turn": max(row["turn"] or 0, 0),
        "type": row["event"],
        "content": f"{row['size_bytes'] or 0} bytes",
    }


def _span(
    name: str,
    row: Mapping[str, Any],
    context: SpanContext,
    parent: SpanContext | None,
    attributes: dict[str, Any],
    resource: Resource,
) -> ReadableSpan:
    failed = row.get("status")
    return ReadableSpan(
        name=name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, str(failed)) if failed else Status(StatusCode.UNSET),
        start_time=row["begin_us"] * 1000,
        end_time=row["end_us"] * 1000,
        instrumentation_scope=_SCOPE,
    )


def _batches(given: Iterator[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    batch: list[ReadableSpan] = []
    for span in given:
        batch.append(span)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def otlp_lines(given: Iterator[ReadableSpan]) -> Iterator[str]:
    """Give the lines of an OTLP file: one `TracesData` in JSON each, as collectors read them."""
    for batch in _batches(given):
        content = MessageToDict(encode_spans(batch), use_integers_for_enums=True)
        for resource in content["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    # OTLP differs from protobuf's own JSON here: ids are hexadecimal.
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in span:
                            span[name] = base64.b64decode(span[name]).hex()
        yield json.dumps(content, separators=(",", ":")) + "\n"


def send(given: Iterator[ReadableSpan], endpoint: str, *, timeout_s: float = 10.0) -> int:
    """Send spans to an OTLP/HTTP endpoint; return how many.

    Args:
        given: The spans.
        endpoint: Such as `http://127.0.0.1:4318`; `/v1/traces` is added where there is no path.
        timeout_s: For each batch, with repetitions.

    Raises:
        ReadingError: It does not take them.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ReadingError(
            f"{endpoint!r} is no OTLP/HTTP endpoint.\nWrite for example http://127.0.0.1:4318",
            "otlp-endpoint",
        )
    url = endpoint if "/" in rest.rstrip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=timeout_s)
    sent = 0
    try:
        for batch in _batches(given):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ReadingError(
                    f"{url} did not take the spans; {sent} were sent before.\n"
                    "Is a collector with an OTLP/HTTP receiver running there?",
                    "otlp-endpoint",
                )
            sent += len(batch)
    finally:
        exporter.shutdown()
    return sent
