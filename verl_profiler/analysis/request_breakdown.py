"""What single requests spent their time on, and everything that happened in one of them."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables

__all__ = ["request_breakdown", "request_timeline"]


def request_breakdown(
    tables: Tables,
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool | None = False,
    request_id: str | None = None,
    count: int | None = 20,
) -> Rows:
    """Cut the time of the slowest requests, over all selected steps and workers, into parts.

    `validate` is None for training and validation; `request_id` narrows to ids that begin so;
    `count` is None for all.

    Returns:
        One row per request, slowest first, unfinished ones last: run, step, name, validate,
        request_id, sample, session, agent, status, error, finished, turns, tool_calls,
        prompt_tokens, response_tokens, generated_tokens, tool_tokens, reward, begin_us, duration_s (None when unfinished), seen_s
        (from begin to the last event); then `<part>_s` for every part of a request, other_s and
        overlap_s, where duration_s is the sum of the parts minus overlap_s; then queue_s,
        prefill_s, decode_s and outside_s, which add up to engine_s and are None unless the engine
        reported them for every call; then stalled_s (how long its worker's event loop was seen to
        stand still meanwhile, in whatever parts).
    """
    parts = ", ".join(
        f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other", "overlap")
    )
    same = (
        "{other}.run = c.run AND {other}.step IS NOT DISTINCT FROM c.step AND {other}.name = c.name "
        "AND {other}.validate IS NOT DISTINCT FROM c.validate "
        "AND {other}.request_id IS NOT DISTINCT FROM c.request_id"
    )
    narrowed = "" if request_id is None else "AND starts_with(request_id, $1)"
    limit = "" if count is None else f"LIMIT {int(count)}"
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT * FROM requests
            WHERE {rows_of(steps, worker=worker, validate=validate)} {narrowed}
            ORDER BY finished DESC, duration_us DESC, begin_us, run, step, name, request_id {limit}
        ), engines AS (
            SELECT e.run, e.step, e.name, e.validate, e.request_id,
                count(*) AS calls, count(queue_us + prefill_us + decode_us) AS reported,
                sum(queue_us) AS queue_us, sum(prefill_us) AS prefill_us,
                sum(decode_us) AS decode_us,
                sum(duration_us) - sum(queue_us + prefill_us + decode_us) AS outside_us
            FROM engine_calls AS e
            WHERE request_id IN (SELECT request_id FROM chosen) GROUP BY ALL
        ), stalls AS (
            SELECT c.run, c.step, c.name, c.validate, c.request_id,
                sum(least(c.last_us, g.end_us) - greatest(c.begin_us, g.begin_us)) AS stalled_us
            FROM chosen AS c JOIN lags AS g ON g.run = c.run AND g.name = c.name
                AND g.begin_us < c.last_us AND g.end_us > c.begin_us
            GROUP BY ALL
        )
        SELECT c.run, c.step, c.name, c.validate, c.request_id, sample, session, agent, status,
            error, finished, turns, tool_calls, prompt_tokens, response_tokens, generated_tokens,
            tool_tokens, reward, begin_us,
            duration_us / 1e6 AS duration_s, (last_us - begin_us) / 1e6 AS seen_s, {parts},
            CASE WHEN reported = calls THEN e.queue_us / 1e6 END AS queue_s,
            CASE WHEN reported = calls THEN e.prefill_us / 1e6 END AS prefill_s,
            CASE WHEN reported = calls THEN e.decode_us / 1e6 END AS decode_s,
            CASE WHEN reported = calls THEN e.outside_us / 1e6 END AS outside_s,
            coalesce(s.stalled_us, 0) / 1e6 AS stalled_s
        FROM chosen AS c LEFT JOIN engines AS e ON {same.format(other="e")}
            LEFT JOIN stalls AS s ON {same.format(other="s")}
        ORDER BY finished DESC, c.duration_us DESC, begin_us, c.run, c.step, c.name, c.request_id
        """,
        None if request_id is None else [request_id],
    )


def request_timeline(
    tables: Tables, request_id: str, step: int | None = None, *, validate: bool | None = None
) -> Rows:
    """List everything that happened in one request, in order.

    Ids can repeat from step to step and in validation: then `step` and `validate` tell them apart.

    Returns:
        One row per interval: run, step, name, validate, event, turn, what (the tool or the replica),
        status, error, begin_s and end_s (from the request's begin), duration_s, tokens, and for
        `engine_request` queue_s, prefill_s, decode_s.  Events of other processes (the engine's)
        have those processes' names.
    """
    steps = None if step is None else (step, step)
    return tables.rows(
        f"""
        WITH own AS (
            SELECT run, step, name, validate, event, turn,
                coalesce(tool, server, "of", op) AS what,
                status, error, begin_us, end_us, duration_us,
                response_tokens AS tokens,
                NULL::BIGINT AS queue_us, NULL::BIGINT AS prefill_us, NULL::BIGINT AS decode_us
            FROM event_fields WHERE request_id = $1 AND duration_us IS NOT NULL
                AND role = 'agent_loop' AND {rows_of(steps, validate=validate)}
        ), served AS (
            SELECT run, step, engine_name AS name, validate, 'engine_request' AS event, turn,
                server AS what, status, error, engine_begin_us AS begin_us,
                engine_end_us AS end_us, engine_duration_us AS duration_us,
                response_tokens AS tokens, queue_us, prefill_us, decode_us
            FROM engine_calls WHERE request_id = $1 AND engine_name IS NOT NULL
                AND {rows_of(steps, validate=validate)}
        ), every AS (
            SELECT * FROM own UNION ALL SELECT * FROM served
        ), starts AS (
            SELECT run, step, name, validate, begin_us AS start_us, last_us FROM requests
            WHERE request_id = $1 AND {rows_of(steps, validate=validate)}
        )
        SELECT e.run, e.step, e.name, e.validate, event, turn, what, status, error,
            (begin_us - start_us) / 1e6 AS begin_s, (end_us - start_us) / 1e6 AS end_s,
            duration_us / 1e6 AS duration_s, tokens, queue_us / 1e6 AS queue_s,
            prefill_us / 1e6 AS prefill_s, decode_us / 1e6 AS decode_s
        FROM every AS e JOIN (
            SELECT run, step, validate, min(start_us) AS start_us FROM starts
            GROUP BY run, step, validate
        ) AS s ON e.run = s.run AND e.step IS NOT DISTINCT FROM s.step
            AND e.validate IS NOT DISTINCT FROM s.validate
        ORDER BY e.run, e.step, begin_us, end_us DESC, event
        """,
        [request_id],
    )
