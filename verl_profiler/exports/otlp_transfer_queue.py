"""TransferQueue calls as OpenTelemetry spans.

A call is a span with its stages and transfers inside; calls that handled the same data are one
trace.  Spans have the attributes that RL-Insight's dashboards query:

    state timeline          `state_lane_id`, `state_name`: one lane per process, more where calls overlap
    agent loop trajectory   identity of the sample, `turn`, `type`: gets and puts of one request
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.tq_traces import tq_call_stages, tq_calls, tq_transfers
from verl_profiler.exports.otlp import (
    About,
    context_of,
    filled,
    has_time_of_day,
    make_span,
    span_id,
    trace_id,
    trajectory,
)
from verl_profiler.reading.tables.tables import Tables

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

__all__ = ["transfer_queue_spans"]


def transfer_queue_spans(
    tables: Tables,
    about: About,
    steps: Steps = None,
    *,
    function: str | None = None,
    of_requests: bool = True,
) -> Iterator[ReadableSpan]:
    """Make the spans of all calls whose time of day is known.

    Args:
        tables: The tables.
        about: What they have in common.
        steps: First and last step; None for all.
        function: One function; None for all.
        of_requests: Include transfers of a single request, which `request_spans` has too.
    """
    calls = [row for row in tq_calls(tables, steps, function=function) if has_time_of_day(row)]
    stages = [
        row for row in tq_call_stages(tables, steps, function=function) if has_time_of_day(row)
    ]
    moves = [
        row
        for row in tq_transfers(tables, steps, function=function)
        if has_time_of_day(row) and (of_requests or row["request_id"] is None)
    ]
    lanes = _lanes(calls)
    contexts: dict[tuple[Any, ...], tuple[SpanContext, str, list[str]]] = {}
    for row in calls:
        context = context_of(_trace_id(row), _span_id(row, ""))
        lane = lanes[_of(row)]
        contexts[_of(row)] = context, lane, row["trace_ids"]
        attributes = _attributes(row, about)
        for stage in ("get", "compute", "put"):
            if row[f"{stage}_us"] is not None:
                attributes[f"verl.tq.{stage}_s"] = row[f"{stage}_us"] / 1e6
        if row["get_us"] is not None or row["put_us"] is not None:
            moved_us = (row["get_us"] or 0) + (row["put_us"] or 0)
            attributes["verl.tq.overhead_share"] = moved_us / max(row["duration_us"], 1)
        yield make_span(row["func"], row, context, None, attributes, about)
    for row in stages:
        of_process: tuple[None, str, list[str]] = (None, row["name"], [])
        context, lane, ids = contexts.get(_of(row), of_process)
        name = f"TQ_{row['stage'].upper()}:{row['func']}"
        attributes = {**_attributes({**row, "trace_ids": ids}, about), **_state(name, lane)}
        yield make_span(name, row, _child(context, row, row["stage"]), context, attributes, about)
    for row in moves:
        context = contexts[parent][0] if (parent := _of(row, parent=True)) in contexts else None
        own = _child(context, row, row["event"])
        attributes = _transfer_attributes(row, about)
        yield make_span(row["event"], row, own, context, attributes, about)


def _of(row: Mapping[str, Any], *, parent: bool = False) -> tuple[Any, ...]:
    """Return what identifies a call; a transfer's own id is its call's with a number appended."""
    call = row["call"]
    if parent and call is not None:
        call = call.partition(".")[0]
    return row["run"], row["name"], call if call is not None else ("", row["begin_us"], row["func"])


def _trace_id(row: Mapping[str, Any]) -> int:
    """Return the trace of the data that a call handled, the first of its ids; else one of its own."""
    if row["trace_ids"]:
        return trace_id(row["trace_ids"][0], row["run"], row["trace_ids"][0])
    return trace_id(None, *_of(row), row["begin_us"])


def _span_id(row: Mapping[str, Any], what: str) -> int:
    return span_id(*_of(row), what, row["begin_us"], row["end_us"])


def _child(parent: SpanContext | None, row: Mapping[str, Any], what: str) -> SpanContext:
    trace = _trace_id({"trace_ids": [], **row}) if parent is None else parent.trace_id
    return context_of(trace, _span_id(row, what))


def _lanes(calls: Rows) -> dict[tuple[Any, ...], str]:
    """Give overlapping calls of a process lanes of their own: one lane shows one state at a time."""
    busy_until: dict[tuple[str, str], list[int]] = {}
    lanes: dict[tuple[Any, ...], str] = {}
    for row in calls:
        ends = busy_until.setdefault((row["run"], row["name"]), [])
        free = next((place for place, end in enumerate(ends) if end <= row["begin_us"]), len(ends))
        ends[free : free + 1] = [row["end_us"]]
        lanes[_of(row)] = row["name"] if free == 0 else f"{row['name']} / {free + 1}"
    return lanes


def _attributes(row: Mapping[str, Any], about: About) -> dict[str, Any]:
    return filled(
        {
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
    )


def _state(name: str, lane: str) -> dict[str, Any]:
    return {
        "monitor.trace_segment": "state_interval",
        "state_name": name,
        "state_lane_id": lane,
    }


def _transfer_attributes(row: Mapping[str, Any], about: About) -> dict[str, Any]:
    found = _attributes(row, about)
    found.update(
        filled({"verl.tq.size_bytes": row["size_bytes"], "verl.tq.mib_per_s": row["mib_per_s"]})
    )
    identity = trajectory(row, about)
    if identity:
        found.update(identity)
        found["turn"] = max(row["turn"] or 0, 0)
        found["type"] = row["event"]
        found["content"] = f"{row['size_bytes'] or 0} bytes"
    return found
