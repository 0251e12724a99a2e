"""Stragglers, their caused wait time, and the reason: requests, tools, workers, replicas and ranks.

Whatever finishes waits for the last of its kind.  Each moment of that waiting is charged in equal
shares to those that have not finished; caused wait times add up to the total waiting.
"""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.derivations import SYNCHRONOUS, caused_wait
from verl_profiler.reading.tables.tables import Tables

# Why a request ended later than the median request of its step.
REASONS: dict[str, str] = {
    "late": "they start later",
    "queued": "they wait in the engine's queue or on the way there",
    "parked": "they wait while the engine is paused for a weight sync",
    "cold": "their prefix is no longer cached and is prefilled again",
    "prefill": "their prompts take longer to prefill",
    "recomputed": "they are retracted, or aborted, and computed again",
    "undivided": "their generate calls take longer (queue, prefill and decoding not recorded)",
    "long": "they generate more tokens",
    "slow": "they take longer per token",
    "tool": "they wait for tools",
    "other": "of reward, postprocessing or unattributed time",
}


def straggler_requests(tables: Tables, steps: Steps = None, count: int = 20) -> Rows:
    """Find the requests that caused the most wait time, and the reason.

    Returns:
        Table `straggler_requests`: at most `count` rows, one per request, most caused wait time
        first.  The components are the keys of `REASONS`.  Only finished training requests.
    """
    return tables.rows(
        f"""
        WITH batches AS (
            SELECT run, step, name, request_id,
                sum(batch * decode_us) / nullif(sum(decode_us) FILTER (batch IS NOT NULL), 0)
                    AS batch
            FROM engine_call_times WHERE NOT validate AND {in_steps(steps)} GROUP BY ALL
        ), typical AS (
            SELECT run, step, median(batch) AS typical_batch FROM batches GROUP BY run, step
        ), charged AS (
            SELECT *, caused_wait_us
                    / nullif(sum(caused_wait_us) OVER (PARTITION BY run, step), 0) AS share
            FROM request_caused_wait WHERE {in_steps(steps)} QUALIFY caused_wait_us > 0
            ORDER BY caused_wait_us DESC, run, step, name, request_id LIMIT {int(count)}
        )
        SELECT run, step, name, request_id, sample, caused_wait_us / 1e6 AS caused_wait_s, share,
            behind_us / 1e6 AS behind_s, because,
            {", ".join(f"{reason}_us / 1e6 AS {reason}_s" for reason in REASONS)},
            batch, typical_batch
        FROM charged LEFT JOIN batches USING (run, step, name, request_id)
            LEFT JOIN typical USING (run, step)
        ORDER BY caused_wait_us DESC, run, step, name, request_id
        """
    )


def stragglers(tables: Tables, steps: Steps = None) -> Rows:
    """Find the stragglers over all chosen steps.

    Returns:
        Table `stragglers`: one row per run, kind and who, most caused wait time first within a
        kind.  The reasons are the keys of `REASONS`.
    """
    return tables.rows(
        f"""
        WITH delaying AS NOT MATERIALIZED (
            SELECT * FROM request_caused_wait WHERE {in_steps(steps)}
        ), by_reason AS (
            SELECT run, step, because, bool_or(place = many AND many > 1) AS last,
                sum(caused_wait_us * sampled) AS caused_wait_us
            FROM delaying WHERE sampled IS NOT NULL GROUP BY run, step, because
        ), others AS (
            SELECT run, step, 'worker' AS kind, '' AS part, name AS who, max(end_us) AS end_us
            FROM requests WHERE finished AND NOT validate AND {SYNCHRONOUS} AND {in_steps(steps)}
            GROUP BY ALL
            UNION ALL
            SELECT run, step, 'replica', '', engine_name, max(engine_end_us)
            FROM engine_calls WHERE engine_name IS NOT NULL AND NOT validate AND {SYNCHRONOUS}
                AND {in_steps(steps)}
            GROUP BY ALL
            UNION ALL
            SELECT p.run, p.step, p.phase, p.begin_us::VARCHAR, r.name, max(r.end_us)
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.role NOT IN ('trainer', 'engine')
                AND (r.begin_us + r.end_us) // 2 BETWEEN p.begin_us AND p.end_us
            WHERE p.parent = 'step' AND p.phase <> 'gen' AND {in_steps(steps, "p.step")}
            GROUP BY ALL
        ), charged AS (
            SELECT run, step, kind, who, place = many AND many > 1 AS last, caused_wait_us
            FROM ({caused_wait("others", "run, step, kind, part")})
            UNION ALL
            SELECT run, step, 'request', because, last, caused_wait_us FROM by_reason
            UNION ALL
            SELECT run, step, 'tool', coalesce(tool, 'tool'), last, caused_wait_us
            FROM tool_caused_wait WHERE {in_steps(steps)}
        ), summed AS (
            SELECT run, kind, who, count(DISTINCT step) FILTER (caused_wait_us > 0) AS steps,
                count(DISTINCT step) FILTER (last) AS last, sum(caused_wait_us) AS caused_wait_us
            FROM charged GROUP BY run, kind, who
        ), counted AS (
            SELECT run, kind, count(DISTINCT step) AS of_steps FROM charged GROUP BY run, kind
        )
        SELECT s.run, s.kind, who, steps, of_steps, last, caused_wait_us / 1e6 AS caused_wait_s,
            caused_wait_us / of_steps / 1e6 AS per_step_s,
            caused_wait_us / nullif(sum(caused_wait_us) OVER (PARTITION BY s.run, s.kind), 0) AS share
        FROM summed AS s JOIN counted AS c ON c.run = s.run AND c.kind = s.kind
        WHERE caused_wait_us > 0
        ORDER BY s.run, coalesce(list_position(['request', 'tool', 'worker', 'replica'], s.kind), 9),
            s.kind, round(caused_wait_us) DESC, who
        """
    )
