"""Requests and TransferQueue calls as OpenTelemetry spans.

A request is a trace: inside are its turns, engine calls with their attempts and the engine's own part, tool
calls, the reward, transfers and the user's spans, each in the innermost span that contains it.  A
TransferQueue call is a span with its stages and transfers inside; calls that handled the same data are one
trace.  Attributes follow OpenTelemetry's conventions for generative AI (`gen_ai.*`); what these do not have
is under `verl.*`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_traces import tq_call_stages, tq_calls, tq_transfers
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.exports.nesting import Timed, nested
from verl_profiler.exports.otlp import has_time_of_day, make_span, span_id, trace_id
from verl_profiler.exports.perfetto import fields_of
from verl_profiler.reading.tables.derivations import NESTING_US, UNKNOWN_PAUSE
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

__all__ = ["request_spans", "transfer_queue_spans"]

_KEY = ("run", "step", "name", "validate", "request_id")
_COLUMNS = "event, family, turn, begin_us, end_us, status, error, extra"

# The events of requests with the request that they belong to; `process` recorded them.  The engine's
# and the reward worker's have no request id: a call's id and a sample's identity join them.
_EVENTS = f"""
CREATE OR REPLACE TEMP TABLE otlp_events AS
WITH selected AS (SELECT * FROM events WHERE {{selected}} AND end_us IS NOT NULL), own AS (
    SELECT {", ".join(_KEY)}, name AS process, {_COLUMNS} FROM selected
    WHERE request_id IS NOT NULL AND event NOT IN ('request', 'request_start')
), calls AS (
    SELECT DISTINCT {", ".join(_KEY)}, turn, extra->>'$.engine_request_id' AS served FROM own
    WHERE event IN ('engine_call', 'engine_attempt')
), served AS (
    SELECT run, name AS process, {_COLUMNS.replace("turn, ", "")},
        extra->>'$.engine_request_id' AS served
    FROM events WHERE event IN ('engine_request', 'engine_parked') AND end_us IS NOT NULL
        AND NOT {UNKNOWN_PAUSE}
), scored AS (
    SELECT run, name AS process, {_COLUMNS.replace("turn, ", "")},
        extra->>'$.uid' AS uid, session
    FROM events WHERE event = 'reward_score' AND end_us IS NOT NULL
), awaited AS (
    SELECT {", ".join(f"r.{name}" for name in _KEY)}, r.uid, r.session, o.begin_us, o.end_us
    FROM requests AS r JOIN own AS o USING ({", ".join(_KEY)}) WHERE o.event = 'reward'
)
SELECT * FROM own
UNION ALL BY NAME
SELECT c.* EXCLUDE (served), s.* EXCLUDE (run, served) FROM calls AS c
    JOIN served AS s ON s.run = c.run AND s.served = c.served
UNION ALL BY NAME
SELECT a.* EXCLUDE (uid, session, begin_us, end_us), s.* EXCLUDE (run, uid, session)
    FROM awaited AS a JOIN scored AS s ON s.run = a.run AND s.uid = a.uid
    AND s.session IS NOT DISTINCT FROM a.session
    AND s.begin_us BETWEEN a.begin_us - {NESTING_US} AND a.end_us
"""

_REQUESTS = f"""
SELECT r.*, s.consumed_step, s.fate FROM requests AS r LEFT JOIN (
    SELECT run, step, uid, session, any_value(consumed_step) AS consumed_step, any_value(fate) AS fate
    FROM samples GROUP BY ALL
) AS s ON s.run = r.run AND s.step = r.step AND s.uid = r.uid AND s.session = r.session
WHERE r.step = ? ORDER BY {", ".join(f"r.{name}" for name in _KEY)}
"""

_COMPONENTS = (*REQUEST_PARTS, "other")
_KINDS = {"engine_call": SpanKind.CLIENT, "engine_request": SpanKind.SERVER}
_OPERATIONS = {"engine_call": "text_completion", "tool_call": "execute_tool"}
# Fields of events that a semantic convention has a name for.
_CONVENTIONS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "response_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "engine_request_id": "gen_ai.response.id",
    "tool": "gen_ai.tool.name",
}
# Fields that are attributes of their own anyway.
_IDENTITY = frozenset(("request_id", "turn", "sample", "session", "uid", "validate"))


def _ancestors(event: str) -> frozenset[str]:
    known = EVENTS.get(event)
    if known is None or known.parent is None:
        return frozenset()
    return frozenset((known.parent,)) | _ancestors(known.parent)


_ANCESTORS = {name: _ancestors(name) for name in EVENTS}
# What may contain events that are not in the vocabulary.
_CONTAINING = frozenset(name for name, event in EVENTS.items() if event.family == "rollout")
# Families recorded by other processes, whose clocks may differ: their events belong to the call with
# their id, or to the reward that was waiting for them, wherever they lie.
_ELSEWHERE = ("engine", "reward")


def request_spans(tables: Tables, steps: Steps = None) -> Iterator[ReadableSpan]:
    """Make the spans of all requests whose time of day is known, a step at a time.

    Args:
        tables: The tables.
        steps: First and last step; None for all.
    """
    tables.make("events", "requests", "samples")
    tables.connection.execute(_EVENTS.format(selected=in_steps(steps)))
    try:
        for found in tables.rows(
            f"SELECT DISTINCT step FROM requests WHERE {in_steps(steps)} AND step IS NOT NULL ORDER BY step"
        ):
            rows = tables.rows(
                f"SELECT * FROM otlp_events WHERE step = ? ORDER BY {', '.join(_KEY)}",
                [found["step"]],
            )
            events = {key: list(group) for key, group in groupby(rows, itemgetter(*_KEY))}
            for request in tables.rows(_REQUESTS, [found["step"]]):
                inside = events.get(itemgetter(*_KEY)(request), [])
                yield from _trace(request, [row for row in inside if has_time_of_day(row)])
    finally:
        tables.connection.execute("DROP TABLE IF EXISTS otlp_events")


def _trace(request: dict[str, Any], rows: Rows) -> Iterator[ReadableSpan]:
    """Make the spans of one request, the root first."""
    if request["end_us"] is None:
        request = {**request, "end_us": request["last_us"], "status": "unfinished"}
    if not has_time_of_day(request):
        return
    key = itemgetter(*_KEY)(request)
    common = {
        "gen_ai.conversation.id": request["request_id"],
        "verl.run": request["run"],
        "verl.step": request["step"],
    }
    name = f"invoke_agent {request['agent']}" if request["agent"] else "invoke_agent"
    trace = trace_id(request["request_id"], *key)
    made = make_span(
        name, request, trace, span_id(*key), None, {**common, **_request_attributes(request)}
    )
    yield made
    root = made.context
    # What may contain the next event, and by id what the engine's own events belong to.
    around: list[tuple[dict[str, Any], SpanContext | None]] = []
    waiting: dict[tuple[str, Any], SpanContext | None] = {}
    for place, row in enumerate(_nested(request, rows)):
        row["fields"] = fields_of(row["extra"] or "{}")
        event, served = row["event"], row["fields"].get("engine_request_id")
        elsewhere = row["family"] in _ELSEWHERE
        if elsewhere:
            parent = waiting.get((row["family"], served), root)
        else:
            around = [each for each in around if each[0]["end_us"] >= row["begin_us"]]
            parent = _parent(row, around) or root
        made = make_span(
            _name(row),
            row,
            trace,
            span_id(*key, row["process"], event, place),
            parent,
            {**common, **_event_attributes(row)},
            _KINDS.get(event, SpanKind.INTERNAL),
        )
        yield made
        if not elsewhere:
            around.append((row, made.context))
        if event in ("engine_call", "engine_attempt", "engine_request"):
            waiting["engine", served] = made.context
        elif event == "reward":
            waiting["reward", None] = made.context


def _nested(request: Mapping[str, Any], rows: Rows) -> Rows:
    """Sort what contains before what is contained, and other processes' events last.

    An event that sticks out of what contains it by the rounding of times is clipped to it.
    """
    rows.sort(key=_order)
    own = [row for row in rows if row["family"] not in _ELSEWHERE]
    root: Timed = (request["begin_us"], request["end_us"], -1, None)
    timed: list[Timed] = [(row["begin_us"], row["end_us"], _depth(row), row) for row in own]
    timed.insert(bisect_left([row["begin_us"] for row in own], request["begin_us"]), root)
    clipped = [
        {**row, "begin_us": begin_us, "end_us": end_us}
        for begin_us, end_us, _, row in nested(timed)
        if row is not None
    ]
    return [*clipped, *rows[len(own) :]]


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    elsewhere = row["family"] in _ELSEWHERE
    return elsewhere, row["begin_us"], -row["end_us"], _depth(row), row["event"], row["extra"]


def _depth(row: Mapping[str, Any]) -> int:
    return len(_ANCESTORS.get(row["event"], _KEY))


def _parent(
    row: Mapping[str, Any], around: list[tuple[dict[str, Any], SpanContext | None]]
) -> SpanContext | None:
    """Return the innermost span that contains an event, as far as the vocabulary allows it.

    It is not known to which of two parallel tool calls a user's span inside both belongs: it is placed
    in what contains both.
    """
    allowed = _ANCESTORS.get(row["event"]) or _CONTAINING
    holding = [
        (other, context)
        for other, context in around
        if other["end_us"] >= row["end_us"]
        and (row["turn"] is None or other["turn"] in (None, row["turn"]))
        and (other["event"] in allowed or (other["family"] == "user" and allowed is _CONTAINING))
    ]
    if sum(other["event"] == "tool_call" for other, _ in holding) > 1:
        holding = [each for each in holding if each[0]["event"] != "tool_call"]
    return holding[-1][1] if holding else None


def _name(row: Mapping[str, Any]) -> str:
    if row["event"] == "tool_call" and row["fields"].get("tool"):
        return f"execute_tool {row['fields']['tool']}"
    return row["event"]


def _request_attributes(request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": request["agent"],
        "gen_ai.usage.input_tokens": request["prompt_tokens"],
        "gen_ai.usage.output_tokens": request["generated_tokens"],
        "error.type": request["error"],
        "verl.process": request["name"],
        "verl.worker": request["rank"],
        **{
            f"verl.{name}": request[name]
            for name in (
                *("uid", "sample", "session", "validate", "status", "finished", "reward", "turns"),
                *("tool_calls", "prompt_tokens", "response_tokens", "generated_tokens"),
                *("tool_tokens", "fate", "consumed_step"),
            )
        },
        **{
            f"verl.time.{name}_s": request[f"{name}_us"] / 1e6
            for name in _COMPONENTS
            if request[f"{name}_us"] is not None
        },
    }


def _event_attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    event, fields = row["event"], row["fields"]
    # The user's own attributes keep their names.
    prefix = "" if row["family"] == "user" else "verl."
    found = {
        "verl.process": row["process"],
        "verl.event": event,
        "verl.turn": row["turn"],
        "error.type": row["error"],
        "gen_ai.operation.name": _OPERATIONS.get(event),
    }
    for name, value in fields.items():
        if name == "finish_reason":
            found["gen_ai.response.finish_reasons"] = None if value is None else (value,)
        elif name not in _IDENTITY:
            found[_CONVENTIONS.get(name, f"verl.{name}") if prefix else name] = value
    return found


def transfer_queue_spans(
    tables: Tables, steps: Steps = None, *, of_requests: bool = True
) -> Iterator[ReadableSpan]:
    """Make the spans of all TransferQueue calls whose time of day is known.

    Args:
        tables: The tables.
        steps: First and last step; None for all.
        of_requests: Include transfers of a single request, which `request_spans` has too.
    """
    calls: dict[tuple[Any, ...], SpanContext | None] = {}
    for row in filter(has_time_of_day, tq_calls(tables, steps)):
        made = _tq_span(row["func"], row, None)
        calls[_call(row)] = made.context
        yield made
    for row in filter(has_time_of_day, tq_call_stages(tables, steps)):
        yield _tq_span(f"TQ_{row['stage'].upper()}:{row['func']}", row, calls.get(_call(row)))
    for row in filter(has_time_of_day, tq_transfers(tables, steps)):
        if of_requests or row["request_id"] is None:
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
