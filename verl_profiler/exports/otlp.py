"""TransferQueue calls as OpenTelemetry spans, written as OTLP in JSON lines or sent to an endpoint.

A call is a span with its stages and transfers inside; calls that handled the same data are one trace.
Attributes are under `verl.*`.  Ids are derived from the recorded data: exporting twice gives the same spans.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from verl_profiler.analysis.selection import Steps
from verl_profiler.analysis.tq import tq_call_stages, tq_calls, tq_transfers
from verl_profiler.errors import ReadingError
from verl_profiler.reading.tables.tables import Tables

_BATCH = 512
# For each batch, with repetitions.
_TIMEOUT_S = 10.0
# Times before 2001 are no times of day: a process's own clock, of lines without one.
_FIRST_WALL_US = 10**15
_SCOPE = InstrumentationScope("verl_profiler")
_RESOURCE = Resource({SERVICE_NAME: "verl"})
# By name, the column; seconds are from microseconds.
_ATTRIBUTES = {
    "function": "func",
    "get_s": "get_us",
    "compute_s": "compute_us",
    "put_s": "put_us",
    **{name: name for name in ("role", "call", "rows", "sampled", "request_id", "size_bytes")},
    "mib_per_s": "mib_per_s",
}


def transfer_queue_spans(tables: Tables, steps: Steps = None) -> Iterator[ReadableSpan]:
    """Make the spans of all TransferQueue calls whose time of day is known."""
    calls: dict[tuple[Any, ...], SpanContext | None] = {}
    for row in filter(_has_time_of_day, tq_calls(tables, steps)):
        made = _span(row["func"], row, None)
        calls[_call(row)] = made.context
        yield made
    for row in filter(_has_time_of_day, tq_call_stages(tables, steps)):
        yield _span(f"TQ_{row['stage'].upper()}:{row['func']}", row, calls.get(_call(row)))
    for row in filter(_has_time_of_day, tq_transfers(tables, steps)):
        yield _span(row["event"], row, calls.get(_call(row, of_transfer=True)))


def _has_time_of_day(row: Mapping[str, Any]) -> bool:
    """Whether an interval has a start and an end since 1970, as spans need them."""
    begin_us, end_us = row["begin_us"], row["end_us"]
    return begin_us is not None and end_us is not None and begin_us >= _FIRST_WALL_US


def _call(row: Mapping[str, Any], *, of_transfer: bool = False) -> tuple[Any, ...]:
    """Return what identifies a call; a transfer's own id is its call's with a number appended."""
    call = row["call"]
    if of_transfer and call is not None:
        call = call.partition(".")[0]
    return row["run"], row["name"], call if call is not None else ("", row["begin_us"], row["func"])


def _span(name: str, row: Mapping[str, Any], parent: SpanContext | None) -> ReadableSpan:
    ids = tuple(row.get("trace_ids") or ())
    # The trace of the data that a call handled, the first of its ids; else one of its own.
    own = (row["run"], ids[0]) if ids else (*_call(row), row["begin_us"])
    trace = _trace_id(ids[0] if ids else "", *own) if parent is None else parent.trace_id
    digest = _digest(*_call(row), name, row["begin_us"], row["end_us"])
    attributes = {
        "verl.run": row["run"],
        "verl.step": row["step"],
        "verl.process": row["name"],
        "verl.tq.trace_ids": ids or None,
    }
    for key, column in _ATTRIBUTES.items():
        value = row.get(column)
        if value is not None:
            attributes[f"verl.tq.{key}"] = value / 1e6 if column.endswith("_us") else value
    failed = row.get("status")
    return ReadableSpan(
        name=name,
        context=SpanContext(
            trace,
            int.from_bytes(digest[:8], "big") or 1,
            is_remote=False,
            trace_flags=TraceFlags(1),
        ),
        parent=parent,
        resource=_RESOURCE,
        attributes={key: value for key, value in attributes.items() if value is not None},
        status=Status(StatusCode.ERROR, str(failed)) if failed else Status(StatusCode.UNSET),
        start_time=row["begin_us"] * 1000,
        end_time=row["end_us"] * 1000,
        instrumentation_scope=_SCOPE,
    )


def _trace_id(name: str, *parts: Any) -> int:
    """Return the trace id of `name`, which is used as it is if it is a UUID; else that of `parts`."""
    try:
        number = uuid.UUID(name).int
    except ValueError:
        number = 0
    return number or int.from_bytes(_digest(*parts), "big") or 1


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def _batches(given: Iterator[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    while batch := list(itertools.islice(given, _BATCH)):
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


def send(given: Iterator[ReadableSpan], endpoint: str) -> int:
    """Send spans to an OTLP/HTTP endpoint; return how many.

    Args:
        given: The spans.
        endpoint: Such as `http://127.0.0.1:4318`; `/v1/traces` is added where there is no path.

    Raises:
        ReadingError: It does not take them.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ReadingError(
            f"{endpoint!r} is not an OTLP/HTTP endpoint.\nWrite for example http://127.0.0.1:4318",
            "otlp-endpoint",
        )
    url = endpoint if "/" in rest.rstrip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S)
    sent = 0
    try:
        for batch in _batches(given):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ReadingError(
                    f"{url} rejected the spans; {sent} were sent before.\n"
                    "Is a collector with an OTLP/HTTP receiver running there?",
                    "otlp-endpoint",
                )
            sent += len(batch)
    finally:
        exporter.shutdown()
    return sent
