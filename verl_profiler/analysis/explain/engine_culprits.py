"""What the engines cost the requests that end last, and the replica behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Named,
    concentration,
    lost_in,
    lost_to,
    places_of,
)
from verl_profiler.analysis.explain.engine_speed import in_work
from verl_profiler.analysis.explain.rollout_culprits import shares_of
from verl_profiler.analysis.explain.step_rows import KV_FULL
from verl_profiler.analysis.explain.work import Earlier, held_up
from verl_profiler.analysis.selection import Rows, Steps, by_run, in_steps
from verl_profiler.reading.tables.tables import Tables

# A batch is small if so many times as many requests would fit, and if it is at most so large.
_ROOM, _SMALL = 8, 8


def engines(earlier: Earlier) -> Iterator[Named]:
    """Find the replicas where last requests queue, are retracted, or lose their prefix cache."""
    tables, steps = earlier.tables, earlier.steps
    shares = shares_of(tables, "engine_name", "engine_calls", steps)
    cold = (
        "SELECT * FROM engine_calls JOIN (SELECT run, engine_request_id, sum(cold_us) AS cold_us "
        f"FROM engine_call_times GROUP BY ALL) USING (run, engine_request_id) WHERE NOT validate AND prefill_us > 0 AND {in_work(steps)}"
    )
    sooner = earlier(
        held_up(
            cold,
            "length_us * sum(cold_us) / sum(prefill_us) FILTER (request_id IS NOT NULL)",
            "coalesce(cold_us, 0)",
            alike=True,
        ),
        "all",
    )
    replicas: dict[str, Culprit] = {}
    for run, own in by_run(lost_by_engine(tables, steps)).items():
        by_calls = shares.get(run, {})
        for finding, about in _ABOUT.items():
            # A replica that gets more calls than others is itself a reason to queue there.
            expected = len(by_calls) if finding in _QUEUES else by_calls
            lost = [row for row in own if row[finding]]
            last = {row["step"]: row["request_id"] for row in lost}
            places = [
                replace(each, what=last[each.step])
                for each in places_of((r["step"], r["engine_name"], r[finding]) for r in lost)
            ]
            if not places:
                continue
            culprit = concentration("replica", places, expected, verb=about)
            if finding == "retractions":
                culprit = replace(culprit, because=_retracted(tables, run, steps))
            if finding != "cold_prefix_cache":
                yield Named(run, finding, culprit, lost_in(places))
            elif culprit.who is not None:
                replicas[run] = culprit
    # What other calls prefill delays the last request as well.
    for (run, _), places in sooner.items():
        named = lost_to(run, "cold_prefix_cache", "phase", "prefill", places)
        yield named._replace(culprit=replicas.get(run, named.culprit))


def _retracted(tables: Tables, run: str, steps: Steps) -> str:
    (row,) = tables.rows(
        "SELECT count(*) AS calls, count(*) FILTER (retractions > 0) AS retracted, "
        "median(retractions) FILTER (retractions > 0) AS times FROM engine_call_times "
        f"WHERE run = ? AND NOT validate AND retractions IS NOT NULL AND {in_steps(steps)}",
        [run],
    )
    text = f"{row['retracted']:,} of {row['calls']:,} calls were retracted, {row['times']:g} times (median)"
    if row["retracted"] < row["calls"]:
        return f"{text}."
    return f"{text}; as no call was spared, the time includes all of their decoding."


def lost_by_engine(tables: Tables, steps: Steps, *, last_only: bool = True) -> Rows:
    """Return the seconds that calls lose to each reason.

    Args:
        tables: Of the runs.
        steps: Those to count; None for all.
        last_only: Count the calls of each step's last request only.

    Returns:
        One row per run, step and engine: run, step, engine_name, request_id (one of them), calls_s (all
        of the calls' time), and for each reason its seconds.
    """
    only = _LAST_ONLY if last_only else ""
    return tables.rows(
        _LOST.format(only=only, steps=in_steps(steps), full=KV_FULL, room=_ROOM, small=_SMALL)
    )


_ABOUT = {
    "kv_bound": "longest queue with a full KV cache",
    "unbalanced_replicas": "longest queue",
    "retractions": "most lost",
    "cold_prefix_cache": "most recomputed",
    "small_batches": "most time",
}
_QUEUES = ("kv_bound", "unbalanced_replicas")


# Seconds that calls, or those of a step's last request, lost to each reason, by the replica that served the call.
# Of an engine with several data-parallel ranks, the rank that explains most counts.
_LAST_ONLY = """SEMI JOIN last_requests AS l
        ON l.run = t.run AND l.step = t.step AND l.name = t.name AND l.request_id = t.request_id"""
_LOST = """
WITH pieces AS MATERIALIZED (
    SELECT row_number() OVER () AS number, t.*
    FROM engine_call_times AS t {only}
    WHERE NOT t.validate AND t.engine_name IS NOT NULL AND {steps}
), states AS MATERIALIZED (
    SELECT run, name, dp_rank, at_us, at_us + held_us AS until_us, kv_share >= {full} AS is_full,
        waiting_requests = 0 AND coalesce(running_requests < running_limit, true)
            AND coalesce(kv_share < {full}, true) AS has_room
    FROM engine_states WHERE held_us > 0 AND run IN (SELECT run FROM pieces)
), shared AS (
    SELECT p.number, s.name = p.engine_name AS is_own, s.name, s.dp_rank,
        sum(CASE WHEN is_full THEN least(p.queue_from_us + p.queue_us, s.until_us)
            - greatest(p.queue_from_us, s.at_us) ELSE 0 END) AS full_us,
        sum(CASE WHEN has_room THEN least(p.queue_from_us + p.queue_us, s.until_us)
            - greatest(p.queue_from_us, s.at_us) ELSE 0 END) AS free_us
    FROM pieces AS p JOIN states AS s ON s.run = p.run AND s.at_us < p.queue_from_us + p.queue_us
        AND s.until_us > p.queue_from_us
    WHERE p.queue_us > 0 GROUP BY p.number, p.engine_name, s.name, s.dp_rank
), queued AS (
    SELECT number, coalesce(max(CASE WHEN is_own THEN full_us END), 0) AS full_us,
        coalesce(max(CASE WHEN NOT is_own THEN free_us END), 0) AS free_us
    FROM shared GROUP BY number
), limits AS (
    SELECT run, name AS engine_name, max(running_limit) AS running_limit FROM engine_states
    GROUP BY run, name
), retracted AS (
    SELECT run, step, count(*) FILTER (retractions = 0) AS spared FROM engine_call_times
    WHERE NOT validate AND {steps} GROUP BY run, step
), typical AS (
    SELECT run, step, engine_name, median(batch) AS batch FROM engine_call_times
    WHERE NOT validate AND {steps} GROUP BY run, step, engine_name
)
SELECT run, step, engine_name, any_value(request_id) AS request_id,
    sum(call_us) / 1e6 AS calls_s,
    sum(greatest(coalesce(full_us, 0) - coalesce(free_us, 0), 0)) / 1e6 AS kv_bound,
    sum(coalesce(free_us, 0)) / 1e6 AS unbalanced_replicas,
    coalesce(sum(queue_us), 0) / 1e6 AS engine_queue,
    -- Where no call of the step was spared, nothing tells decoding from what is decoded again.
    sum(CASE WHEN retractions > 0 THEN recomputed_us
        + CASE WHEN e.spared = 0 THEN decode_us ELSE 0 END ELSE 0 END) / 1e6 AS retractions,
    sum(cold_us) / 1e6 AS cold_prefix_cache,
    sum(CASE WHEN t.batch <= {small} AND {room} * t.batch <= running_limit
        THEN decode_us ELSE 0 END) / 1e6 AS small_batches
FROM pieces AS p LEFT JOIN queued USING (number) LEFT JOIN limits USING (run, engine_name)
LEFT JOIN typical AS t USING (run, step, engine_name) LEFT JOIN retracted AS e USING (run, step)
GROUP BY run, step, engine_name ORDER BY run, step, engine_name
"""
