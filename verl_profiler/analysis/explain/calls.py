"""Generate and tool calls of a request as a chain, with the engine's times; interrupted calls are joined again."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import correlation, median
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.device_time import overlaps
from verl_profiler.analysis.explain.model import Call, Request, Stage, Tools, Work
from verl_profiler.analysis.selection import Rows, by_run, grouped
from verl_profiler.reading.tables.tables import Tables

# Waiting for at least this share of the computing is for a pool; so few calls or moments do not count.
_WAITS, _IGNORED = 0.05, 0.01
# When the replicas run no calls: begins and ends in microseconds, in order and without overlaps.
Stops = Sequence[tuple[int, int]]


class Recorded(NamedTuple):
    """Rows of requests, of the attempts of generate calls, and of tool calls."""

    requests: Rows
    calls: Rows
    tools: Rows


class Prompt(NamedTuple):
    """A prompt: its requests, when the last of them ended, and what became of it."""

    requests: Rows
    dispatched_us: int
    ready_us: int | None
    taken_us: int | None
    dropped_us: int | None


# Names of pools.
_TOOLS_POOL, _REWARD_POOL = "tools", "reward"
# Calls wait for each other if their number explains so much of the variance of so many.
CROWDED, CROWDED_CALLS = 0.4, 20


def pools_of(tables: Tables, own: str, tools: Rows) -> dict[str, dict[str, int]]:
    """Return how many calls of tools and rewards run at once, by run, where others wait for them.

    Adds to the calls of such tools which share of their time was no wait (`served`).

    Args:
        tables: Of the runs.
        own: SQL condition of the steps.
        tools: Rows of `recorded`.
    """
    found: dict[str, dict[str, int]] = {}
    scores = tables.rows(
        "SELECT run, wait_us, compute_us, begin_us + wait_us AS started_us, started_us + compute_us "
        f"AS ended_us FROM reward_scores WHERE NOT validate AND wait_us + compute_us > 0 AND {own}"
    )
    for run, each in by_run(scores).items():
        if sum(row["wait_us"] for row in each) > _WAITS * sum(row["compute_us"] for row in each):
            found[run] = {_REWARD_POOL: peak(each, ignored=_IGNORED)}
    for run, each in by_run(tools).items():
        ordered = sorted(each, key=lambda row: row["begin_us"])
        ends = sorted(row["end_us"] for row in ordered)
        others = [n - bisect_right(ends, row["begin_us"]) for n, row in enumerate(ordered)]
        lengths = [row["duration_us"] for row in ordered]
        if len(each) < CROWDED_CALLS or min(len(set(others)), len(set(lengths))) < 2:
            continue
        if correlation(others, lengths) < CROWDED**0.5:
            continue

        def takes_time(most: int, ordered: Rows = ordered) -> bool:
            served = _served_us(ordered, most)
            return sum(each <= 0 for each in served) <= _IGNORED * len(served)

        # At least as many at once as let each call take some time.
        possible = range(1, max(others) + 2)
        most = possible[min(bisect_left(possible, True, key=takes_time), max(others))]
        found.setdefault(run, {})[_TOOLS_POOL] = most
        for row, own_us in zip(ordered, _served_us(ordered, most), strict=True):
            row["served"] = min(max(own_us / max(row["duration_us"], 1), 0.0), 1.0)
    return found


def _served_us(calls: Rows, most: int) -> list[float]:
    """Return what calls take without waiting, in FIFO order with so many at once."""
    found: list[float] = []
    last: list[int] = []
    for row in calls:
        full = len(last) == most
        found.append(row["end_us"] - max(last[0] if full else 0, row["begin_us"]))
        (heapq.heappushpop if full else heapq.heappush)(last, row["end_us"])
    return found


def recorded(tables: Tables, own: str) -> Recorded:
    """Read the requests that were trained on, their generate calls with the engine's times, and their tool calls.

    Args:
        tables: Of the runs.
        own: SQL condition of the runs and steps.
    """
    return Recorded(*(tables.rows(query.format(own=own)) for query in (_REQUESTS, _CALLS, _TOOLS)))


def by_call(attempts: Iterable[dict[str, Any]]) -> list[Rows]:
    """Group the attempts of each call."""
    return list(grouped(attempts, "name", "request_id", "turn", "whole_us").values())


def prompts_of(requests: Rows) -> dict[str, Prompt]:
    """Return the prompts of a run by uid, in order of their first request."""
    groups = grouped((row for row in requests if row["uid"] is not None), "uid")
    return {
        uid: Prompt(
            rows,
            min(min(row["begin_us"], row["dispatched_us"]) for row in rows),
            max(row["end_us"] for row in rows) if all(r["finished"] for r in rows) else None,
            rows[0]["taken_us"],
            rows[0]["dropped_us"],
        )
        for uid, rows in groups.items()
    }


def _stopped_us(stops: Stops, begin_us: float, end_us: float) -> float:
    """Return how long the replicas were stopped between two times."""
    return sum(us for _, us in overlaps(stops, begin_us, end_us))


def kv_tokens(call: Mapping[str, Any]) -> int:
    """Return what a call occupies of a KV cache."""
    return (call["prompt_tokens"] or 0) + (call["response_tokens"] or 0)


def _call_of(attempts: Rows, *, queued: bool, stops: Stops) -> Call:
    """Join the attempts of a call, with `work` if the engine's times of all are known; lost tokens are made again."""
    last = attempts[-1]
    seen_us = last["end_us"] - attempts[0]["begin_us"]
    kept = [row for row in attempts if not row.get("lost")]
    if any("work" not in row for row in (last, *kept)):
        return Call(0.0, seen_us, 0.0, 0.0, seen_us, None, last["turn"])
    begin, arrived, started, decoding = (
        last[moment] for moment in ("begin_us", "arrived_us", "started_us", "decoding_us")
    )
    queue_us = started - arrived if queued else 0.0
    whole_us = decoding - started - _stopped_us(stops, started, decoding)
    fixed_us = last.get("own_prefill_us", whole_us)
    cold_us = min(last.get("cold_us") or 0, whole_us)
    return Call(
        arrived + queue_us - begin - _stopped_us(stops, begin, started),
        fixed_us,
        sum(row["work"] * (1 - _stopped_share(row, stops)) for row in kept),
        last["end_us"] - last["ended_us"],
        seen_us,
        last["replica"],
        last["turn"],
        sum(row["response_tokens"] or 0 for row in kept) or None,
        queue_us,
        cold_us * fixed_us / whole_us if whole_us else 0.0,
        kv_tokens(last),
    )


def _stopped_share(row: Mapping[str, Any], stops: Stops) -> float:
    length = row["ended_us"] - row["decoding_us"]
    return _stopped_us(stops, row["decoding_us"], row["ended_us"]) / length if length else 0.0


def requests_of(
    rows: Iterable[Mapping[str, Any]],
    calls: Iterable[Rows],
    tools: Rows,
    begin_us: Callable[[Mapping[str, Any]], float],
    *,
    queued: bool = True,
    stops: Stops = (),
) -> list[Request]:
    """Build the chains of requests.

    Args:
        rows: Of the requests.
        calls: Attempts of each generate call.
        tools: Rows of the tool calls, by their begin.
        begin_us: Returns when a request begins, after the dispatch.
        queued: Keep the queueing times as measured, instead of simulating them.
        stops: When the replicas ran no calls: not part of what the calls take.
    """
    calls_of: dict[Any, list[tuple[int, int, Call]]] = defaultdict(list)
    for attempts in calls:
        key = attempts[0]["name"], attempts[0]["request_id"]
        call = _call_of(attempts, queued=queued, stops=stops)
        calls_of[key].append((attempts[0]["begin_us"], attempts[-1]["end_us"], call))
    tools_of = grouped(tools, "name", "request_id")
    return [
        _request(row, calls_of.get(key, ()), tools_of.get(key, ()), begin_us(row))
        for row in rows
        for key in [(row["name"], row["request_id"])]
    ]


def _request(
    row: Mapping[str, Any],
    calls: Iterable[tuple[int, int, Call]],
    tools: Iterable[Mapping[str, Any]],
    begin_us: float,
) -> Request:
    """Build a request's chain; its durations add up to the measured one."""
    items: list[tuple[int, int, Stage]] = [*calls]
    for turn, group in groupby(tools, key=lambda call: call["turn"]):
        together = list(group)
        first, last = together[0]["begin_us"], max(call["end_us"] for call in together)
        lengths = tuple(
            (call["begin_us"] - first, call["duration_us"], call["tool"] or "tool")
            for call in together
        )
        served = together[0].get("served")
        shared = (_TOOLS_POOL, served) if served is not None and len(together) == 1 else (None, 1.0)
        stalled_us = min(call["stalled_us"] or 0 for call in together)
        items.append((first, last, Tools(lengths, turn, *shared, stalled_us)))
    stages: list[Stage] = []
    cursor = row["begin_us"]
    for first, last, stage in sorted(items, key=lambda item: item[:2]):
        end = min(last, row["end_us"])
        if end <= cursor:
            continue
        gap = first - cursor
        if gap > 0:
            # Before the first call it is work of the loop if prompts are built there for most of it.
            built = gap if stages or row.get("built_us") is None else row["built_us"]
            own = gap if 2 * built >= gap else built
            stages += [Work(own, own=True), *([Work(gap - own, own=False)] if own < gap else ())]
        # Calls that overlap another one, or the end of the request, keep only the time that they add.
        whole = first >= cursor and end == last
        stages.append(stage if whole else Work(end - max(first, cursor), own=False))
        cursor = end
    rest = row["end_us"] - cursor
    reward = min(row["reward_us"] or 0, rest)
    put = min(row["transfer_us"] or 0, rest - reward)
    waited = min(row["reward_wait_us"] or 0, reward)
    stages += [Work(rest - reward - put, own=True), Work(put, own=False)]
    shared = (_REWARD_POOL, 1 - waited / reward) if waited else (None, 1.0)
    stages.append(Work(reward, False, *shared))
    generated = sum(stage.tokens or 0 for stage in stages if isinstance(stage, Call))
    return Request(
        begin_us,
        row["duration_us"],
        row["name"],
        row["turns"] or 0,
        tuple(stages),
        row["prompt_tokens"] or 0,
        row["response_tokens"] or generated,
        generated,
        row["uid"],
        row["request_id"],
    )


def parked_us(calls: Iterable[Rows], stops: Stops) -> float:
    """Return how long an interrupted call waits after the replicas run again (median)."""
    gaps = [
        max(after["begin_us"] - end_us - _stopped_us(stops, end_us, after["begin_us"]), 0)
        for attempts in calls
        for row, after in pairwise(attempts)
        for end_us in [row["end_us"]]
    ]
    return float(median(gaps)) if gaps else 0.0


def undivided_share(calls: Rows) -> float:
    """Return the part of calls of which the queue, prefill and decode times were not recorded."""
    return sum(call["queue_us"] is None for call in calls) / max(len(calls), 1)


def peak(
    calls: Iterable[Mapping[str, Any]],
    size: Callable[[Mapping[str, Any]], int] = lambda _: 1,
    ignored: float = 0.0,
) -> int:
    """Return the maximum number of concurrent calls, or of `size`; back-to-back calls do not overlap.

    Args:
        calls: With the engine's times.
        size: Of a call.
        ignored: Share of the time for which more is no concurrency: clocks of an engine and its server
            differ by some microseconds.
    """
    changes = sorted(
        change
        for call in calls
        if call["ended_us"] > call["started_us"]
        for change in ((call["started_us"], size(call)), (call["ended_us"], -size(call)))
    )
    lasted: dict[int, int] = {}
    level = 0
    for (now_us, change), (next_us, _) in pairwise(changes):
        level += change
        if level > 0 and next_us > now_us:
            lasted[level] = lasted.get(level, 0) + next_us - now_us
    above_us, ignored_us = 0, ignored * sum(lasted.values())
    for level in sorted(lasted, reverse=True):
        above_us += lasted[level]
        if above_us > ignored_us:
            return level
    return 0


ENGINE_TIMES = """
    least(coalesce(engine_duration_us, duration_us), duration_us) AS served_us,
    -- On the client's clock: an interval that does not fit (another host's clock) is centered.
    CASE WHEN engine_begin_us BETWEEN begin_us AND end_us - served_us THEN engine_begin_us
        ELSE begin_us + (duration_us - served_us) // 2 END AS from_us,
    from_us + served_us AS until_us,
    least(from_us + coalesce(parked_us, 0), until_us) AS arrived_us,
    least(arrived_us + coalesce(queue_us, 0), until_us) AS started_us,
    least(started_us + coalesce(prefill_us, 0), until_us) AS decoding_us,
    -- The server's span lasts until its event loop notices, when other calls already run.
    least(decoding_us + coalesce(nullif(decode_us, 0), until_us), until_us) AS ended_us
"""
"""SQL of when a generate call came to its engine, arrived in its queue, was started, decoded and ended."""

_OWN = "NOT validate AND request_id IS NOT NULL AND {own}"
_REQUESTS = """
WITH waited AS (
    SELECT run, uid, session, sum(wait_us) AS reward_wait_us FROM reward_scores GROUP BY ALL
), moved AS (
    SELECT run, step, name, request_id, sum(duration_us) AS transfer_us FROM transfers
    WHERE request_id IS NOT NULL AND {own} GROUP BY ALL
), firsts AS (
    SELECT run, step, name, request_id, min(begin_us) AS first_us FROM engine_calls WHERE {own} GROUP BY ALL
), builds AS (
    SELECT run, name, end_us, sum(duration_us) OVER (PARTITION BY run, name ORDER BY end_us) AS until_us
    FROM event_fields WHERE event = 'prompt_build' AND duration_us IS NOT NULL
), built AS (
    -- What the worker builds prompts, of any of its requests, before the first call.
    SELECT r.run, r.step, r.name, r.request_id, b.until_us - coalesce(e.until_us, 0) AS built_us
    FROM requests AS r JOIN firsts AS f USING (run, step, name, request_id)
        ASOF JOIN builds AS b ON b.run = r.run AND b.name = r.name AND b.end_us <= f.first_us
        ASOF LEFT JOIN builds AS e ON e.run = r.run AND e.name = r.name AND e.end_us <= r.begin_us
), fates AS (
    SELECT run, uid, max(at_us) FILTER (fate = 'consumed') AS taken_us,
        CASE WHEN NOT bool_or(fate = 'consumed') THEN max(at_us) FILTER (fate = 'dropped') END AS dropped_us
    FROM samples WHERE uid IS NOT NULL GROUP BY run, uid
)
SELECT run, step, uid, name, request_id, begin_us, end_us, duration_us, finished, turns, reward_us,
    taken_us, dropped_us,
    reward_wait_us, transfer_us, prompt_tokens, response_tokens, built_us,
    coalesce(at_us, begin_us) AS dispatched_us
FROM (SELECT * FROM requests WHERE begin_us IS NOT NULL AND NOT validate AND {own})
    LEFT JOIN dispatched USING (run, uid) LEFT JOIN fates USING (run, uid) LEFT JOIN waited USING (run, uid, session)
    LEFT JOIN moved USING (run, step, name, request_id)
    LEFT JOIN built USING (run, step, name, request_id)
ORDER BY run, begin_us, name, request_id
"""
_TOOLS = f"""
SELECT run, step, name, request_id, turn, begin_us, end_us, duration_us, stalled_us, tool FROM tool_calls
WHERE duration_us IS NOT NULL AND {_OWN} ORDER BY run, begin_us, end_us
"""
# An attempt for each interruption of a call, with the interval of the engine that served it.
_CALLS = f"""
WITH attempts AS MATERIALIZED (
    SELECT run, step, name, request_id, turn, attempt, engine_request_id, server, begin_us, end_us,
        duration_us, prompt_tokens, response_tokens, coalesce(finish_reason LIKE 'abort%', false) AS aborted,
        aborted AND coalesce(response_tokens, 0) = 0 AS lost
    FROM engine_attempts WHERE duration_us IS NOT NULL AND {_OWN}
), served AS (
    SELECT DISTINCT ON (run, engine_request_id) run, engine_request_id, name AS engine_name,
        begin_us AS engine_begin_us, duration_us AS engine_duration_us, parked_us, queue_us, prefill_us,
        decode_us, cached_tokens
    FROM engine_requests LEFT JOIN (
        SELECT run, engine_request_id, begin_us, max(duration_us) AS parked_us FROM engine_parked
        GROUP BY ALL
    ) USING (run, engine_request_id, begin_us) WHERE engine_request_id IS NOT NULL AND duration_us IS NOT NULL
        AND run IN (SELECT run FROM attempts)
    ORDER BY run, engine_request_id, begin_us
), cold AS (
    SELECT run, name, request_id, turn, begin_us, sum(cold_us) AS cold_us FROM engine_call_times
    WHERE cold_us > 0 AND attempt = 0 GROUP BY ALL
), calls AS (
    SELECT * FROM attempts LEFT JOIN served USING (run, engine_request_id)
    UNION ALL BY NAME
    SELECT run, step, name, request_id, turn, 0 AS attempt, begin_us AS whole_us, server, begin_us,
        end_us, duration_us, prompt_tokens, response_tokens, false AS aborted, false AS lost, engine_name,
        engine_begin_us, engine_duration_us, parked_us, queue_us, prefill_us, decode_us, cached_tokens,
        retractions, cold_us
    FROM (SELECT * FROM engine_calls WHERE duration_us IS NOT NULL AND {_OWN})
        ANTI JOIN attempts USING (run, request_id, turn)
        LEFT JOIN cold USING (run, name, request_id, turn, begin_us)
)
SELECT *, coalesce(engine_name, server, 'unknown') AS replica, {ENGINE_TIMES} FROM calls
ORDER BY run, name, request_id, turn, attempt, begin_us
"""
