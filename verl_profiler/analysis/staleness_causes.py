"""Where the samples of an asynchronous run were while the trainer's weights went on without them."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, grouped, in_steps
from verl_profiler.reading.tables.tables import Tables

# What a sample is in from its dispatch to its consumption, in that order.
CAUSES = {
    "dispatch": "from dispatch to the first generate call",
    "generating": "in generate calls, queueing in the engine and prefill included",
    "redone": "in generate calls whose tokens an abort discarded",
    "paused": "aborted until sent again, or parked in a paused engine",
    "between_calls": "tools, rewards, processing",
    "group": "finished, other requests of the prompt not yet",
    "queue": "the whole prompt finished, not yet consumed",
    "unknown": "the request's generate calls were not recorded",
}

# Requests that are named.
_REQUESTS = 10


def staleness_causes(tables: Tables, steps: Steps = None) -> Rows:
    """Attribute the age of consumed samples, in seconds and weight versions, to what they were in.

    Only of asynchronous runs; `steps` are those that consumed. The seconds from a sample's dispatch
    to its consumption are each in one cause. A version counts for the cause that the sample was in
    when its weight sync began. Versions after that of the sample's oldest token are `behind`, and sum
    to those of `staleness`; those before it are `earlier`, and make nothing stale.

    Returns:
        Table `staleness_causes`: one row per run, step, part, what and cause; means over samples.
    """
    if not tables.row("SELECT run FROM asynchronous LIMIT 1"):
        return []
    return tables.rows(_ROWS.replace("{chosen}", in_steps(steps, "s.consumed_step")))


_ROWS = f"""
WITH taken AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY s.run, consumed_step, s.uid, s.session) AS number, s.run,
        consumed_step AS step, s.step AS dispatched, s.uid, trainer_version AS version,
        min_weight_version AS oldest, at_us, r.request_id, r.begin_us, r.end_us, r.detailed
    FROM samples AS s JOIN requests AS r ON r.run = s.run AND r.uid = s.uid AND NOT r.validate
        AND r.session IS NOT DISTINCT FROM s.session AND r.begin_us < s.at_us
    WHERE fate = 'consumed' AND {{chosen}} AND s.run IN (SELECT run FROM asynchronous)
        AND trainer_version IS NOT NULL AND min_weight_version IS NOT NULL
    -- A prompt that was dispatched twice counts from the second time.
    QUALIFY row_number() OVER (
        PARTITION BY s.run, consumed_step, s.uid, s.session ORDER BY r.begin_us DESC) = 1
), dispatches AS (
    SELECT run, step, uid, begin_us, try_cast(weight_version AS BIGINT) AS version
    FROM event_fields WHERE event = 'dispatch'
), named AS (
    SELECT t.number, max_by(d, d.begin_us) AS dispatch FROM taken AS t JOIN dispatches AS d
        ON d.run = t.run AND d.uid = t.uid AND d.begin_us <= t.begin_us GROUP BY t.number
), of_steps AS (
    SELECT t.number, d.begin_us, d.version FROM taken AS t
    ASOF JOIN (SELECT * FROM dispatches WHERE uid IS NULL) AS d
        ON d.run = t.run AND d.step = t.dispatched AND d.begin_us <= t.begin_us
), aged AS MATERIALIZED (
    SELECT t.* EXCLUDE (begin_us, end_us, at_us), t.begin_us AS request_us, t.at_us,
        coalesce(n.dispatch.begin_us, s.begin_us, t.begin_us) AS from_us,
        least(coalesce(n.dispatch.version, s.version, t.oldest), t.oldest) AS at_dispatch,
        least(t.end_us, t.at_us) AS end_us,
        least(max(t.end_us) OVER (PARTITION BY t.run, t.uid), t.at_us) AS group_us
    FROM taken AS t LEFT JOIN named AS n USING (number) LEFT JOIN of_steps AS s USING (number)
), parked AS (
    SELECT run, engine_request_id, max(end_us) AS parked_us FROM engine_parked GROUP BY ALL
), calls AS (
    SELECT number, turn, lost, c.begin_us, least(c.end_us, at_us) AS end_us, parked_us,
        lag(turn) OVER own AS last_turn,
        -- Calls that overlap count once.
        max(c.end_us) OVER (own ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS idle_us
    FROM (
        SELECT run, request_id, turn, attempt, engine_request_id, begin_us, end_us,
            finish_reason LIKE 'abort%' AND coalesce(response_tokens, 0) = 0 AS lost
        FROM engine_attempts
        UNION ALL
        SELECT run, request_id, turn, 0, engine_request_id, begin_us, end_us, false
        FROM engine_calls ANTI JOIN engine_attempts USING (run, request_id, turn)
    ) AS c JOIN (SELECT run, request_id, number, at_us FROM aged) USING (run, request_id)
    LEFT JOIN parked USING (run, engine_request_id)
    WHERE c.end_us IS NOT NULL AND c.begin_us < at_us
    WINDOW own AS (PARTITION BY number ORDER BY c.begin_us, turn, attempt)
), served AS (
    SELECT *, greatest(begin_us, coalesce(idle_us, begin_us)) AS first_us FROM calls
), split AS (
    SELECT *, greatest(first_us, least(end_us, coalesce(parked_us, first_us))) AS served_us
    FROM served
), ends AS (
    SELECT number, max(end_us) AS last_us FROM calls GROUP BY number
), pieces AS MATERIALIZED (
    SELECT number, greatest(p.begin_us, from_us) AS begin_us, least(p.end_us, at_us) AS end_us, cause
    FROM (
        SELECT number, idle_us AS begin_us, first_us AS end_us,
            if(turn = last_turn, 'paused', 'between_calls') AS cause
        FROM split WHERE idle_us IS NOT NULL
        UNION ALL
        SELECT s.number, from_us, first_us, 'dispatch' FROM split AS s JOIN aged USING (number)
        WHERE idle_us IS NULL
        UNION ALL
        SELECT number, first_us, served_us, 'paused' FROM split
        UNION ALL
        SELECT number, served_us, end_us, if(lost, 'redone', 'generating') FROM split
        UNION ALL
        SELECT number, last_us, greatest(end_us, last_us), 'between_calls'
        FROM aged JOIN ends USING (number)
        UNION ALL
        SELECT number, from_us, request_us, 'dispatch' FROM aged ANTI JOIN ends USING (number)
        UNION ALL
        SELECT number, request_us, end_us, 'unknown' FROM aged ANTI JOIN ends USING (number)
        UNION ALL
        SELECT number, greatest(end_us, coalesce(last_us, end_us)),
            greatest(group_us, coalesce(last_us, end_us)), 'group'
        FROM aged LEFT JOIN ends USING (number)
        UNION ALL
        SELECT number, greatest(group_us, coalesce(last_us, group_us)), at_us, 'queue'
        FROM aged LEFT JOIN ends USING (number)
    ) AS p JOIN (SELECT number, from_us, at_us FROM aged) USING (number)
    WHERE least(p.end_us, at_us) > greatest(p.begin_us, from_us)
), syncs AS (
    SELECT run, try_cast(weight_version AS BIGINT) AS version, min(begin_us) AS sync_us
    FROM event_fields WHERE event = 'weight_sync' AND try_cast(weight_version AS BIGINT) IS NOT NULL
    GROUP BY run, version
), updates AS (
    SELECT run, end_us AS update_us FROM phases WHERE phase = 'update_actor' AND end_us IS NOT NULL
), missed AS (
    SELECT number, run, from_us, at_us, oldest,
        unnest(range(at_dispatch + 1, version + 1)) AS version FROM aged
), timed AS (
    -- A version that no sync has sent yet is the trainer's since its last update.
    SELECT number, m.version > oldest AS stale, greatest(from_us + 1, least(at_us, if(
        sync_us < at_us, sync_us, coalesce(update_us, at_us)))) AS version_us
    FROM missed AS m ASOF LEFT JOIN syncs AS s ON s.run = m.run AND m.version <= s.version
    ASOF LEFT JOIN updates AS u ON u.run = m.run AND m.at_us >= u.update_us
), placed AS (
    -- What the sample was in when the sync began, not what the sync made of it.
    SELECT t.number, coalesce(p.cause, 'queue') AS cause, count(*) FILTER (stale) AS behind,
        count(*) FILTER (NOT stale) AS earlier
    FROM timed AS t ASOF LEFT JOIN pieces AS p
        ON p.number = t.number AND t.version_us > p.begin_us
    GROUP BY ALL
), parts AS (
    SELECT number, cause, sum(age_us) AS age_us, sum(behind) AS behind, sum(earlier) AS earlier
    FROM (
        SELECT number, cause, end_us - begin_us AS age_us, 0 AS behind, 0 AS earlier FROM pieces
        UNION ALL
        SELECT number, cause, 0, behind, earlier FROM placed
    ) GROUP BY number, cause
), stalest AS (
    SELECT number FROM aged
    QUALIFY row_number() OVER (
        PARTITION BY run ORDER BY version - oldest DESC, at_us - from_us DESC, number
    ) <= {_REQUESTS} AND version > oldest
), counted AS (
    SELECT run, step, 'all' AS part, 'all' AS what, cause, age_us, behind, earlier, number, 0 AS place
    FROM parts JOIN aged USING (number)
    UNION ALL
    SELECT run, step, 'request', coalesce(request_id, uid), cause, age_us, behind, earlier, number,
        oldest - version
    FROM parts JOIN aged USING (number) SEMI JOIN stalest USING (number)
), totals AS (
    SELECT run, step, 'all' AS part, 'all' AS what, count(*) AS samples FROM aged GROUP BY run, step
    UNION ALL
    SELECT run, step, 'request', coalesce(request_id, uid), 1 FROM aged SEMI JOIN stalest USING (number)
)
SELECT run, step, part, what, cause, any_value(samples)::BIGINT AS samples,
    count(*) FILTER (behind > 0) AS stale_samples, sum(behind) / any_value(samples) AS behind,
    sum(earlier) / any_value(samples) AS earlier,
    sum(age_us) / 1e6 / any_value(samples) AS age_s
FROM counted JOIN totals USING (run, step, part, what)
GROUP BY run, step, part, what, cause
ORDER BY run, part, min(place), step, what, array_position({list(CAUSES)}, cause)
"""


def mean_causes(rows: Rows) -> Rows:
    """Return the causes in `staleness_causes` over all samples: cause, age_s, behind, share and stale_samples."""
    whole = [row for row in rows if row["part"] == "all"]
    samples = sum({row["step"]: row["samples"] for row in whole}.values())
    found = grouped(whole, "cause")
    means = {
        cause: {
            name: sum(row[name] * row["samples"] for row in found[cause]) / samples
            for name in ("behind", "age_s")
        }
        for cause in CAUSES
        if cause in found
    }
    behind = sum(each["behind"] for each in means.values()) or 1.0
    return [
        {"cause": cause, **each, "share": each["behind"] / behind}
        | {"stale_samples": sum(row["stale_samples"] for row in found[cause])}
        for cause, each in means.items()
    ]
