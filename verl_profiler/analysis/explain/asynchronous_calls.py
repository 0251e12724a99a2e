"""Generate and tool calls of an asynchronous run as chains, with interrupted calls joined again."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from verl_profiler.analysis.explain.asynchronous_cycle import Chain, Generate, Work
from verl_profiler.analysis.explain.rebuilding import engine_interval
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "Prompt",
    "Stops",
    "attempts_of",
    "chains_of",
    "parked_us",
    "peak",
    "prompts_of",
    "stopped_us",
    "tools_of",
]

# When the replicas run no calls: begins and ends in microseconds, in order and without overlaps.
Stops = Sequence[tuple[int, int]]


@dataclass
class Prompt:
    """A prompt: its requests, when the last of them ended, and what became of it."""

    requests: Rows
    dispatched_us: int
    ready_us: int | None
    taken_us: int | None = None
    dropped_us: int | None = None


def attempts_of(tables: Tables, run: str) -> Rows:
    """Return the attempts of a run's generate calls, in order of request, turn and attempt.

    Adds when the engine started, decoded and ended each: started_us, decoding_us, ended_us.
    """
    rows = _of(tables, _ATTEMPTS, run)
    for row in rows:
        begin, end = row["begin_us"], row["end_us"]
        if row["engine_duration_us"] is not None:
            begin, end = engine_interval(row)
        row["started_us"] = min(begin + (row["queue_us"] or 0), end)
        row["decoding_us"] = min(row["started_us"] + (row["prefill_us"] or 0), end)
        decoded = row["decoding_us"] + row["decode_us"] if row["decode_us"] else end
        row["ended_us"] = min(decoded, end)
    return rows


def tools_of(tables: Tables, run: str) -> Rows:
    """Return the tool calls of a run."""
    return _of(tables, _TOOLS, run)


def prompts_of(tables: Tables, run: str) -> dict[str, Prompt]:
    """Return the prompts of a run by uid, in order of their first request."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in _of(tables, _REQUESTS, run):
        groups[row["uid"]].append(row)
    prompts = {
        uid: Prompt(
            rows,
            min(min(row["begin_us"], row["dispatched_us"]) for row in rows),
            max(row["end_us"] for row in rows) if all(r["finished"] for r in rows) else None,
        )
        for uid, rows in groups.items()
    }
    for row in _of(tables, _FATES, run):
        prompt = prompts.get(row["uid"])
        if prompt is not None:
            prompt.taken_us, prompt.dropped_us = row["taken_us"], row["dropped_us"]
    return prompts


def _of(tables: Tables, query: str, run: str) -> Rows:
    return [row for row in tables.rows(query) if row["run"] == run]


def stopped_us(stops: Stops, begin_us: int, end_us: int) -> int:
    """Return how long the replicas were stopped between two times."""
    total = 0
    first = max(bisect_right(stops, (begin_us, 0)) - 1, 0)
    for begin, end in stops[first:]:
        if begin >= end_us:
            break
        total += max(min(end, end_us) - max(begin, begin_us), 0)
    return total


def chains_of(
    requests: Iterable[Mapping[str, Any]], attempts: Rows, tools: Rows, stops: Stops
) -> dict[tuple[str, str], Chain]:
    """Return the chain of each finished request, by process and request."""
    items: dict[tuple[str, str], list[tuple[int, int, Generate | Work]]] = defaultdict(list)
    turns: dict[tuple[str, str, Any], Rows] = defaultdict(list)
    for row in attempts:
        turns[row["name"], row["request_id"], row["turn"]].append(row)
    for (name, request, _), rows in turns.items():
        items[name, request].append(_generate(rows, stops))
    for row in tools:
        length = float(row["end_us"] - row["begin_us"])
        items[row["name"], row["request_id"]].append(
            (row["begin_us"], row["end_us"], Work(length, tool=True))
        )
    found: dict[tuple[str, str], Chain] = {}
    for row in requests:
        if row["finished"]:
            key = row["name"], row["request_id"]
            found[key] = _chain(row, sorted(items[key], key=lambda each: each[:2]))
    return found


def _generate(rows: Rows, stops: Stops) -> tuple[int, int, Generate]:
    """Join the attempts of a call; tokens of lost ones are made again."""
    work = sum(row["work"] * (1 - _stopped_share(row, stops)) for row in rows if not row["lost"])
    last = rows[-1]
    fixed = last["decoding_us"] - last["begin_us"] + last["end_us"] - last["ended_us"]
    prefill = last.get("own_prefill_us")
    if prefill is not None:
        fixed -= last["decoding_us"] - last["started_us"]
    stopped = stopped_us(stops, last["begin_us"], last["decoding_us"])
    stage = Generate(float(max(fixed - stopped, 0)), work, last["replica"], prefill or 0.0)
    return rows[0]["begin_us"], last["end_us"], stage


def _stopped_share(row: Mapping[str, Any], stops: Stops) -> float:
    length = row["ended_us"] - row["decoding_us"]
    return stopped_us(stops, row["decoding_us"], row["ended_us"]) / length if length else 0.0


def _chain(row: Mapping[str, Any], items: Sequence[tuple[int, int, Generate | Work]]) -> Chain:
    stages: list[Generate | Work] = []
    cursor = row["begin_us"]
    for begin, end, stage in items:
        if end <= cursor:
            continue
        if begin > cursor:
            stages.append(Work(float(begin - cursor), tool=False))
            stages.append(stage)
        elif begin == cursor:
            stages.append(stage)
        else:
            # Parallel calls of one request keep the time that they add.
            tool = isinstance(stage, Work) and stage.tool
            stages.append(Work(float(end - cursor), tool))
        cursor = end
    if row["end_us"] > cursor:
        stages.append(Work(float(row["end_us"] - cursor), tool=False))
    return tuple(stages)


def parked_us(attempts: Rows, stops: Stops) -> float:
    """Return how long an interrupted call waits after the replicas run again (median)."""
    gaps = [
        max(
            after["begin_us"] - row["end_us"] - stopped_us(stops, row["end_us"], after["begin_us"]),
            0,
        )
        for row, after in pairwise(attempts)
        if after["attempt"]
        and row["request_id"] == after["request_id"]
        and row["turn"] == after["turn"]
        and row["name"] == after["name"]
    ]
    return float(median(gaps)) if gaps else 0.0


def peak(rows: Rows) -> int:
    """Return the maximum number of concurrent calls."""
    changes = sorted(
        change for row in rows for change in ((row["started_us"], 1), (row["ended_us"], -1))
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


_REQUESTS = """
WITH dispatched AS (
    SELECT run, uid, min(begin_us) AS at_us FROM event_fields
    WHERE event = 'dispatch' AND uid IS NOT NULL GROUP BY run, uid
)
SELECT r.run, r.uid, r.name, r.request_id, r.begin_us, r.end_us, r.finished,
    coalesce(d.at_us, r.begin_us) AS dispatched_us
FROM requests AS r LEFT JOIN dispatched AS d USING (run, uid)
WHERE NOT r.validate AND r.uid IS NOT NULL AND r.begin_us IS NOT NULL
ORDER BY r.run, r.begin_us, r.name, r.request_id
"""
_FATES = """
SELECT run, uid, max(at_us) FILTER (fate = 'consumed') AS taken_us,
    CASE WHEN bool_or(fate = 'consumed') THEN NULL ELSE max(at_us) FILTER (fate = 'dropped') END
        AS dropped_us
FROM samples WHERE uid IS NOT NULL GROUP BY run, uid
"""
_TOOLS = """
SELECT run, name, request_id, begin_us, end_us FROM tool_calls
WHERE duration_us IS NOT NULL AND NOT validate AND request_id IS NOT NULL
ORDER BY run, begin_us, end_us
"""
# Calls of the agent loops, an attempt for each interruption, with the interval of the engine.
_ATTEMPTS = """
WITH attempts AS MATERIALIZED (
    SELECT run, name, request_id, turn, attempt, engine_request_id, server, begin_us, end_us,
        duration_us, prompt_tokens, response_tokens, coalesce(finish_reason LIKE 'abort%', false) AS aborted,
        aborted AND coalesce(response_tokens, 0) = 0 AS lost
    FROM event_fields
    WHERE event = 'engine_attempt' AND duration_us IS NOT NULL AND NOT validate
        AND request_id IS NOT NULL
), calls AS (
    SELECT * FROM attempts
    UNION ALL
    SELECT c.run, c.name, c.request_id, c.turn, 0, c.engine_request_id, c.server, c.begin_us,
        c.end_us, c.duration_us, c.prompt_tokens, c.response_tokens, false, false
    FROM engine_calls AS c ANTI JOIN attempts AS a
        ON a.run = c.run AND a.request_id = c.request_id AND a.turn = c.turn
    WHERE c.duration_us IS NOT NULL AND NOT c.validate AND c.request_id IS NOT NULL
), served AS (
    SELECT DISTINCT ON (run, engine_request_id) run, engine_request_id, name AS replica,
        begin_us AS engine_begin_us, duration_us AS engine_duration_us, queue_us, prefill_us,
        decode_us, cached_tokens
    FROM engine_requests WHERE engine_request_id IS NOT NULL AND duration_us IS NOT NULL
    ORDER BY run, engine_request_id, begin_us
)
SELECT c.* EXCLUDE (engine_request_id, server), s.* EXCLUDE (run, engine_request_id, replica),
    coalesce(s.replica, c.server, 'unknown') AS replica
FROM calls AS c LEFT JOIN served AS s USING (run, engine_request_id)
ORDER BY c.run, c.name, c.request_id, c.turn, c.attempt, c.begin_us
"""
