"""Requests as OpenTelemetry spans: one trace per request.

The root is the request; inside are its turns, engine calls with their attempts and the engine's
own part, tool calls, the reward, transfers and the user's spans, each in the innermost span that
contains it.  Attributes follow OpenTelemetry's conventions for generative AI (`gen_ai.*`) and
RL-Insight's agent loop protocol; what neither has is under `verl.*`.  The trace id is the request id
where that is a UUID, as verl's are.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.exports.nesting import Timed, nested
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
from verl_profiler.exports.perfetto import fields_of
from verl_profiler.reading.tables.derivations import NESTING_US, UNKNOWN_PAUSE
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

__all__ = ["request_spans"]

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
# What the event reports of its own time.  Only the lengths are known: they are placed one after another.
_INSIDE = {
    "engine_request": (("queue", "queue_s"), ("prefill", "prefill_s"), ("decode", "decode_s")),
    "reward_score": (("wait", "wait_s"), ("compute", "compute_s")),
}
_KINDS = {"engine_call": SpanKind.CLIENT, "engine_request": SpanKind.SERVER}
_OPERATIONS = {"engine_call": "text_completion", "tool_call": "execute_tool"}
# What RL-Insight's trajectory shows, by its source.
_SOURCES = {
    "engine_call": "gateway",
    "tool_call": "tool",
    "tq_get": "transfer_queue",
    "tq_put": "transfer_queue",
}
# Fields of events that a semantic convention has a name for.
_CONVENTIONS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "response_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "engine_request_id": "gen_ai.response.id",
    "tool": "gen_ai.tool.name",
}
# Fields that are attributes of their own anyway.
_IDENTITY = frozenset(
    ("request_id", "turn", "sample", "session", "uid", "validate", "finish_reason")
)


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


def request_spans(tables: Tables, about: About, steps: Steps = None) -> Iterator[ReadableSpan]:
    """Make the spans of all requests whose time of day is known, a step at a time.

    Args:
        tables: The tables.
        about: What the spans have in common.
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
                yield from _trace(request, [row for row in inside if has_time_of_day(row)], about)
    finally:
        tables.connection.execute("DROP TABLE IF EXISTS otlp_events")


def _trace(request: dict[str, Any], rows: Rows, about: About) -> Iterator[ReadableSpan]:
    """Make the spans of one request, the root first."""
    if request["end_us"] is None:
        request = {**request, "end_us": request["last_us"], "status": "unfinished"}
    if not has_time_of_day(request):
        return
    key = itemgetter(*_KEY)(request)
    root = context_of(trace_id(request["request_id"], *key), span_id(*key))
    identity = trajectory(request, about)
    lane = identity.pop("state_lane_id", None)
    common = {
        "project": about.project,
        "experiment_name": about.of(request["run"]),
        "global_steps": request["step"],
        "gen_ai.conversation.id": request["request_id"],
        "verl.run": request["run"],
        **identity,
    }
    name = f"invoke_agent {request['agent']}" if request["agent"] else "invoke_agent"
    attributes = filled({**common, "state_lane_id": lane, **_request_attributes(request)})
    yield make_span(name, request, root, None, attributes, about)
    rows = _nested(request, rows)
    # What may contain the next event, and by id what the engine's own events belong to.
    around: list[tuple[dict[str, Any], SpanContext]] = []
    waiting: dict[tuple[str, Any], SpanContext] = {}
    for place, row in enumerate(rows):
        row["fields"] = fields_of(row["extra"] or "{}")
        event, served = row["event"], row["fields"].get("engine_request_id")
        own = context_of(root.trace_id, span_id(*key, row["process"], event, place))
        if row["family"] in _ELSEWHERE:
            parent = waiting.get((row["family"], served), root)
        else:
            around = [each for each in around if each[0]["end_us"] >= row["begin_us"]]
            parent = _parent(row, around) or root
            around.append((row, own))
        if event in ("engine_call", "engine_attempt", "engine_request"):
            waiting["engine", served] = own
        elif event == "reward":
            waiting["reward", None] = own
        attributes = filled({**common, **_event_attributes(row, lane)})
        kind = _KINDS.get(event, SpanKind.INTERNAL)
        yield make_span(_name(row), row, own, parent, attributes, about, kind)
        yield from _components(row, own, common, about)


def _nested(request: Mapping[str, Any], rows: Rows) -> Rows:
    """Sort what contains before what is contained, and other processes' events last.

    An event that sticks out of what contains it by the rounding of times is clipped to it.
    """
    rows.sort(key=_order)
    own = [row for row in rows if row["family"] not in _ELSEWHERE]
    root: Timed = (request["begin_us"], request["end_us"], -1, None)
    timed: list[Timed] = [(row["begin_us"], row["end_us"], _depth(row), row) for row in own]
    timed.insert(bisect_left([row["begin_us"] for row in own], request["begin_us"]), root)
    return [
        *(
            {**row, "begin_us": begin_us, "end_us": end_us}
            for begin_us, end_us, _, row in nested(timed)
            if row is not None
        ),
        *rows[len(own) :],
    ]


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    elsewhere = row["family"] in _ELSEWHERE
    return elsewhere, row["begin_us"], -row["end_us"], _depth(row), row["event"], row["extra"]


def _depth(row: Mapping[str, Any]) -> int:
    return len(_ANCESTORS.get(row["event"], _KEY))


def _parent(
    row: Mapping[str, Any], around: list[tuple[dict[str, Any], SpanContext]]
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
        "monitor.trace_source": "session",
        "runner_name": request["agent"] or "",
        "status": "error" if request["status"] else "success",
        "num_trajectories": 1,
        "reward_source": "" if request["reward"] is None else "verl",
        "finished": request["finished"],
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
                *("validate", "status", "reward", "turns", "tool_calls", "prompt_tokens"),
                *("response_tokens", "generated_tokens", "tool_tokens", "fate", "consumed_step"),
            )
        },
        **{
            f"verl.time.{name}_s": request[f"{name}_us"] / 1e6
            for name in _COMPONENTS
            if request[f"{name}_us"] is not None
        },
    }


def _event_attributes(row: Mapping[str, Any], lane: str | None) -> dict[str, Any]:
    event, fields = row["event"], row["fields"]
    # The user's own attributes keep their names.
    prefix = "" if row["family"] == "user" else "verl."
    found = {
        "verl.process": row["process"],
        "verl.event": event,
        "turn": row["turn"],
        "status": "error" if row["status"] else "success",
        "error.type": row["error"],
        "gen_ai.operation.name": _OPERATIONS.get(event),
        **{
            _CONVENTIONS.get(name, f"verl.{name}") if prefix else name: _attribute(value)
            for name, value in fields.items()
            if name not in _IDENTITY
        },
    }
    reason = fields.get("finish_reason")
    if reason is not None:
        found["gen_ai.response.finish_reasons"] = [str(reason)]
    if event in _SOURCES:
        found.update(
            {
                "monitor.trace_source": _SOURCES[event],
                "state_lane_id": lane,
                "chain_id": 1,
                "type": event,
                # Neither prompts nor responses are recorded.
                "content": f"{fields['size_bytes']} bytes" if "size_bytes" in fields else "",
            }
        )
    if event == "engine_call":
        found["prompt_tokens"] = fields.get("prompt_tokens")
        found["completion_tokens"] = fields.get("response_tokens")
        found["finish_reason"] = reason
    return found


def _attribute(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return json.dumps(value, separators=(",", ":"))


def _components(
    row: Mapping[str, Any], parent: SpanContext, common: Mapping[str, Any], about: About
) -> Iterator[ReadableSpan]:
    begin_us = row["begin_us"]
    for name, field in _INSIDE.get(row["event"], ()):
        seconds = row["fields"].get(field)
        if not isinstance(seconds, (int, float)):
            continue
        end_us = begin_us + round(seconds * 1e6)
        context = context_of(parent.trace_id, span_id(parent.span_id, name))
        attributes = filled({**common, "verl.process": row["process"], "verl.place": "estimated"})
        placed = {"begin_us": begin_us, "end_us": end_us}
        yield make_span(name, placed, context, parent, attributes, about)
        begin_us = end_us
