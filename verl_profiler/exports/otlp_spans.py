"""TransferQueue calls as OpenTelemetry spans.

A call is a span with its stages and transfers inside; calls that handled the same data are one trace.
Attributes are under `verl.*`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.selection import Steps
from verl_profiler.analysis.tq_traces import tq_call_stages, tq_calls, tq_transfers
from verl_profiler.exports.otlp import has_time_of_day, make_span, span_id, trace_id
from verl_profiler.reading.tables.tables import Tables

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

__all__ = ["transfer_queue_spans"]


def transfer_queue_spans(tables: Tables, steps: Steps = None) -> Iterator[ReadableSpan]:
    """Make the spans of all TransferQueue calls whose time of day is known.

    Args:
        tables: The tables.
        steps: First and last step; None for all.
    """
    calls: dict[tuple[Any, ...], SpanContext | None] = {}
    for row in filter(has_time_of_day, tq_calls(tables, steps)):
        made = _tq_span(row["func"], row, None)
        calls[_call(row)] = made.context
        yield made
    for row in filter(has_time_of_day, tq_call_stages(tables, steps)):
        yield _tq_span(f"TQ_{row['stage'].upper()}:{row['func']}", row, calls.get(_call(row)))
    for row in filter(has_time_of_day, tq_transfers(tables, steps)):
        yield _tq_span(row["event"], row, calls.get(_call(row, of_transfer=True)))


def _call(row: Mapping[str, Any], *, of_transfer: bool = False) -> tuple[Any, ...]:
    """Return what identifies a call; a transfer's own id is its call's with a number appended."""
    call = row["call"]
    if of_transfer and call is not None:
        call = call.partition(".")[0]
    return row["run"], row["name"], call if call is not None else ("", row["begin_us"], row["func"])


def _tq_span(name: str, row: Mapping[str, Any], parent: SpanContext | None) -> ReadableSpan:
    ids = tuple(row.get("trace_ids") or ())
    # The trace of the data that a call handled, the first of its ids; else one of its own.
    own = (row["run"], ids[0]) if ids else (*_call(row), row["begin_us"])
    span = span_id(*_call(row), name, row["begin_us"], row["end_us"])
    attributes = {
        "verl.run": row["run"],
        "verl.step": row["step"],
        "verl.process": row["name"],
        "verl.tq.trace_ids": ids or None,
    }
    for key, column in _TQ_ATTRIBUTES.items():
        value = row.get(column)
        if value is not None:
            attributes[f"verl.tq.{key}"] = value / 1e6 if column.endswith("_us") else value
    return make_span(name, row, trace_id(ids[0] if ids else None, *own), span, parent, attributes)


# By name, the column; seconds are from microseconds.
_TQ_ATTRIBUTES = {
    "function": "func",
    "get_s": "get_us",
    "compute_s": "compute_us",
    "put_s": "put_us",
    **{name: name for name in ("role", "call", "rows", "sampled", "request_id", "size_bytes")},
    "mib_per_s": "mib_per_s",
}
