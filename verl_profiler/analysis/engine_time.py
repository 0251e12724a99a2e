"""Where the time of requests' generate calls went, inside and outside the engines."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.tables.tables import Tables

# Parts of generate calls, in the order in which a call goes through them.
CALL_PARTS: dict[str, str] = {
    "outside": "outside the engine",
    "parked": "while the engine was paused",
    "queue": "in the engine's queue",
    "cold": "prefill of tokens that were cached before",
    "prefill": "prefill of new tokens",
    "recomputed": "retracted or aborted, and recomputed",
    "decode": "decoding",
    "undivided": "not divided: times not recorded",
}
# Of calls with undivided time.
UNRECORDED = (
    "queue, prefill and decode times were not recorded (SGLang and vLLM report them with "
    "profiler.events.engine_timing=true)"
)


def request_engine_time(
    tables: Tables,
    steps: Steps = None,
    count: int = 20,
    *,
    worker: int | None = None,
    validate: bool = False,
) -> Rows:
    """Split the generate calls' time of the requests with the most of it.

    Returns:
        Table `request_engine_time`: at most `count` rows, one per request, most time first.
        The parts of the time are the keys of `CALL_PARTS`.
    """
    where = rows_of(steps, worker=worker, validate=validate)
    sums = {part: f"sum({part}_us)" for part in CALL_PARTS}
    # One unknown is in the prefill of its call.
    sums["cold"] = "CASE WHEN count(cold_us) = count(*) THEN sum(cold_us) END"
    parts = ", ".join(f"{sums[part]} / 1e6 AS {part}_s" for part in CALL_PARTS)
    largest = f"greatest({', '.join(f'{part}_s' for part in CALL_PARTS)})"
    mostly = " ".join(f"WHEN {part}_s THEN '{part}'" for part in reversed(CALL_PARTS))
    return tables.rows(
        f"""
        WITH summed AS (
            SELECT run, step, name, request_id, count(DISTINCT turn) AS calls,
                count(DISTINCT engine_name) AS replicas, sum(call_us) / 1e6 AS engine_s, {parts},
                sum(decoded_tokens)::BIGINT AS tokens,
                sum(batch * decode_us)
                    / nullif(sum(decode_us) FILTER (batch IS NOT NULL), 0) AS batch,
                count(*) FILTER (moved) AS moved,
                CASE WHEN count(lost_tokens) = count(*) THEN sum(lost_tokens)::BIGINT END AS cold_tokens,
                sum(retractions)::BIGINT AS retractions
            FROM engine_call_times WHERE {where} GROUP BY run, step, name, request_id
            ORDER BY engine_s DESC, run, step, name, request_id LIMIT {int(count)}
        )
        SELECT run, step, name, request_id, calls, replicas, engine_s,
            {", ".join(f"{part}_s" for part in CALL_PARTS)},
            CASE WHEN engine_s > 0 THEN CASE {largest} {mostly} END END AS mostly,
            tokens, CASE WHEN undivided_s = 0 THEN decode_s / nullif(tokens, 0) END AS token_s, batch, moved, cold_tokens, retractions
        FROM summed ORDER BY engine_s DESC, run, step, name, request_id
        """
    )
