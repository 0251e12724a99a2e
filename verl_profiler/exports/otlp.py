"""OpenTelemetry spans: how they are made, written as OTLP in JSON lines, and sent to an endpoint.

`otlp_spans` has which ones.  Their ids are derived from the recorded data: exporting twice gives the same
spans.
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

from verl_profiler.errors import ReadingError

__all__ = ["has_time_of_day", "make_span", "otlp_lines", "send", "span_id", "trace_id"]

_BATCH = 512
# For each batch, with repetitions.
_TIMEOUT_S = 10.0
# Times before 2001 are no times of day: a process's own clock, of lines without one.
_FIRST_WALL_US = 10**15
_SCOPE = InstrumentationScope("verl_profiler")
_RESOURCE = Resource({SERVICE_NAME: "verl"})


def has_time_of_day(row: Mapping[str, Any]) -> bool:
    """Whether an interval has a start and an end since 1970, as spans need them."""
    begin_us, end_us = row["begin_us"], row["end_us"]
    return begin_us is not None and end_us is not None and begin_us >= _FIRST_WALL_US


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def trace_id(name: str | None, *parts: Any) -> int:
    """Return the trace id of `name`, which is used as it is if it is a UUID.

    Args:
        name: The id that the traced data has; None if it has none.
        parts: What identifies the trace where `name` alone is missing or is not a UUID.
    """
    try:
        number = uuid.UUID(name).int if name else 0
    except ValueError:
        number = 0
    return number or int.from_bytes(_digest(*parts), "big") or 1


def span_id(*parts: Any) -> int:
    """Return the span id of what `parts` identify."""
    return int.from_bytes(_digest(*parts)[:8], "big") or 1


def make_span(
    name: str,
    row: Mapping[str, Any],
    trace: int,
    span: int,
    parent: SpanContext | None,
    attributes: Mapping[str, Any],
) -> ReadableSpan:
    """Return a span that has ended.

    Args:
        name: Its name.
        row: begin_us and end_us, since 1970; status, if the call did not return.
        trace: Its trace's id, unless it has a parent.
        span: Its own id.
        parent: The span that contains it; None for the first of a trace.
        attributes: Its attributes; those without a value are left out.
    """
    failed = row.get("status")
    trace = trace if parent is None else parent.trace_id
    return ReadableSpan(
        name=name,
        context=SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(1)),
        parent=parent,
        resource=_RESOURCE,
        attributes={key: value for key, value in attributes.items() if value is not None},
        status=Status(StatusCode.ERROR, str(failed)) if failed else Status(StatusCode.UNSET),
        start_time=row["begin_us"] * 1000,
        end_time=row["end_us"] * 1000,
        instrumentation_scope=_SCOPE,
    )


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
