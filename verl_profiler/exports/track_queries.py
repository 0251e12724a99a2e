"""The questions behind a timeline: spans in the order of their lanes, arrows, and counters."""

from __future__ import annotations

from verl_profiler.reading.tables.derivations import DEPTH, NESTING_US, UNKNOWN_PAUSE

# All processes that left a header or an event, in the order in which they are shown.
PROCESSES = """
SELECT * FROM (
    SELECT run, name, coalesce(any_value(p.role), any_value(e.role)) AS role,
        any_value(p.rank) AS rank, coalesce(any_value(p.host), 'unknown') AS host,
        any_value(p.pid) AS pid, any_value(actor_class) AS actor_class,
        any_value(shift_us) AS shift_us
    FROM (SELECT DISTINCT run, name, role FROM event_fields) AS e
    FULL JOIN processes AS p USING (run, name) GROUP BY run, name
) ORDER BY run, host, role <> 'trainer', role, rank, name
"""

# The lanes of a process, in the order in which they are shown, and what lies in them.  Requests
# keep together; other spans share lanes where they are nested.
LANES = {
    "phases": "role = 'trainer' AND family = 'trainer'",
    "requests": "request_id IS NOT NULL AND family IN ('rollout', 'user')",
    "engine requests": "family = 'engine'",
    "work": "family IN ('workers', 'weights', 'memory', 'trainer')",
    "reward scores": "family = 'reward'",
    "transfers": "family = 'transfer_queue'",
    "event-loop stalls": "family = 'event_loop'",
    "events": "true",
}

SPANS = f"""
CREATE OR REPLACE TEMP TABLE spans AS
SELECT hash(run, name, event, begin_us, end_us, request_id, turn, extra) & ~3::UBIGINT AS id,
    CASE WHEN request_id IS NOT NULL THEN hash(run, name, step, validate, request_id) END AS story,
    run, name, step, validate, request_id, turn, event, family,
    greatest(begin_us, 0) AS begin_us, greatest(end_us, 0) AS end_us, duration_us IS NULL AS instant,
    CASE {" ".join(f"WHEN {claim} THEN {place}" for place, claim in enumerate(LANES.values()))} END
        AS lane,
    CASE WHEN event IN ('engine_call', 'engine_request')
        THEN extra->>'$.engine_request_id' END AS engine_request_id,
    CASE event WHEN 'tool_call' THEN extra->>'$.tool' WHEN 'turn' THEN turn::VARCHAR
        WHEN 'step' THEN step::VARCHAR END AS label,
    CASE WHEN event IN ('reward_score', 'sample_consumed', 'sample_dropped')
        THEN extra->>'$.uid' END AS uid,
    sample, session, extra
FROM events
WHERE {{selected}} AND end_us IS NOT NULL AND event NOT IN
    ('memory', 'profiler_cost', 'request_start', 'engine_state', 'engine_iterations', 'device',
        'device_time')
    AND NOT {UNKNOWN_PAUSE}
"""

# One row per end of an arrow: the span, the arrow's number, and whether it comes from there.  The
# numbers are those of the calling span (an engine call, a tool call, a reward), and one more for the
# way back; of samples, those of their consumption, or of the request whose sample was dropped.
ARROWS = f"""
CREATE OR REPLACE TEMP TABLE arrows AS
WITH followed AS (
    SELECT id, event, end_us, engine_request_id,
        lead(id) OVER story AS next_id, lead(begin_us) OVER story AS next_us,
        last_value(CASE WHEN event = 'tool_parsing' THEN id END IGNORE NULLS) OVER (
            story ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS asked_id,
        first_value(CASE WHEN event IN ('engine_call', 'postprocess') THEN id END IGNORE NULLS)
            OVER (story ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS answered_id
    FROM spans WHERE family = 'rollout' AND story IS NOT NULL AND event IN
        ('engine_call', 'tool_parsing', 'tool_call', 'token_merge', 'postprocess')
    WINDOW story AS (PARTITION BY story ORDER BY begin_us, end_us, id)
), calls AS (
    SELECT c.*, s.id AS served_id FROM followed AS c
    JOIN spans AS s ON s.event = 'engine_request' AND s.engine_request_id = c.engine_request_id
    WHERE c.event = 'engine_call'
), rewards AS (
    SELECT w.id, s.id AS scored_id FROM spans AS w
    JOIN requests AS r USING (run, name, step, validate, request_id)
    JOIN spans AS s ON s.event = 'reward_score' AND s.run = r.run AND s.uid = r.uid
        AND s.session IS NOT DISTINCT FROM r.session
        AND s.begin_us BETWEEN w.begin_us - {NESTING_US} AND w.end_us
    WHERE w.event = 'reward' AND w.family = 'rollout'
), taken AS (
    SELECT q.id AS made_id, t.id, t.event FROM spans AS q
    JOIN requests AS r USING (run, name, step, validate, request_id)
    JOIN spans AS t ON t.run = r.run AND t.uid = r.uid AND NOT r.validate
        AND t.event IN ('sample_consumed', 'sample_dropped')
        AND (t.event = 'sample_dropped' OR t.session IS NOT DISTINCT FROM r.session)
    WHERE q.event = 'request' AND q.family = 'rollout'
), edges AS (
    SELECT id AS arrow, id AS source, served_id AS target FROM calls
    UNION ALL SELECT id + 1, served_id, next_id FROM calls WHERE next_us >= end_us
    UNION ALL SELECT id, asked_id, id FROM followed WHERE event = 'tool_call'
    UNION ALL SELECT id + 1, id, answered_id FROM followed WHERE event = 'tool_call'
    UNION ALL SELECT id, id, scored_id FROM rewards
    -- A step takes several outputs of a request; a drop stands for several requests.
    UNION ALL SELECT if(event = 'sample_dropped', made_id, id), made_id, id FROM taken
)
SELECT id, list_sort(list(arrow) FILTER (leaving)) AS sources,
    list_sort(list(arrow) FILTER (NOT leaving)) AS targets
FROM (
    SELECT unnest([source, target]) AS id, arrow, unnest([true, false]) AS leaving
    FROM edges WHERE source IS NOT NULL AND target IS NOT NULL
) GROUP BY id
"""

# `unit` is what keeps together: a request, or all spans of a lane that are nested anyway.
ORDERED = f"""
WITH united AS (
    SELECT *, left(CASE WHEN event = 'request' THEN request_id END, 8) AS request,
        {DEPTH} AS depth,
        CASE lane WHEN 1 THEN hash(request_id, step, validate) WHEN 0 THEN 0 WHEN 3 THEN 0
            ELSE id END AS unit
    FROM spans
), bounded AS (
    SELECT *, min(begin_us) OVER (PARTITION BY run, name, lane, unit) AS unit_begin_us FROM united
)
SELECT run, name, lane, unit, begin_us, end_us, depth, concat_ws(' ', event, nullif(label, ''), request), family,
    instant, extra, sources, targets
FROM bounded LEFT JOIN arrows USING (id)
ORDER BY run, name, lane, unit_begin_us, unit, begin_us, end_us DESC, depth, id
"""

# A number that rises and falls with spans: what each adds while it lasts, by process.
_UNDER_WAY = """
SELECT run, name, time_us, sum(sum(change)) OVER (
    PARTITION BY run, name ORDER BY time_us ROWS UNBOUNDED PRECEDING) AS value
FROM (
    SELECT run, name, begin_us AS time_us, {change} AS change FROM {table} WHERE {which}
    UNION ALL
    SELECT run, name, end_us, -{change} FROM {table} WHERE {which} AND end_us IS NOT NULL
) GROUP BY run, name, time_us
"""
_RATE = "response_tokens * 1e6 / duration_us"
_WITH_RATE = "response_tokens > 0 AND duration_us > 0 AND {selected}"
_EVERYWHERE = "(SELECT * REPLACE ('' AS name) FROM {})"

# (counter, unit, query with run, name, time_us and value, in any order); without a process where
# name is ''.
COUNTERS = (
    (
        "requests in flight",
        "requests",
        _UNDER_WAY.format(table="requests", change="1", which="{selected}"),
    ),
    (
        "requests in flight",
        "requests",
        _UNDER_WAY.format(table=_EVERYWHERE.format("requests"), change="1", which="{selected}"),
    ),
    (
        "engine requests in flight",
        "requests",
        _UNDER_WAY.format(table="engine_requests", change="1", which="{selected}"),
    ),
    (
        "generated tokens per second",
        "tokens/s",
        _UNDER_WAY.format(table="engine_requests", change=_RATE, which=_WITH_RATE),
    ),
    (
        "generated tokens per second",
        "tokens/s",
        _UNDER_WAY.format(table=_EVERYWHERE.format("engine_calls"), change=_RATE, which=_WITH_RATE),
    ),
    *(
        (
            f"memory {kind}",
            "bytes",
            (
                f"SELECT run, name, end_us AS time_us, {kind}_bytes AS value FROM memory "
                f"WHERE {kind}_bytes IS NOT NULL AND {{selected}}"
            ),
        )
        for kind in ("allocated", "reserved", "used")
    ),
    (
        "event-loop lag",
        "ms",
        (
            "SELECT run, name, time_us, max(value) AS value FROM ("
            "SELECT run, name, begin_us AS time_us, duration_us / 1000 AS value FROM lags "
            "WHERE {selected} UNION ALL SELECT run, name, end_us, 0.0 FROM lags WHERE {selected}"
            ") GROUP BY run, name, time_us"
        ),
    ),
)

# The engines' own readings and iterations, of one data-parallel rank each.
ENGINE_RANKS = (
    "SELECT dp_rank FROM engine_states UNION SELECT dp_rank FROM engine_iterations ORDER BY dp_rank"
)
_READ = (
    "SELECT run, name, at_us AS time_us, {value} AS value FROM engine_states "
    "WHERE dp_rank = {rank} AND {value} IS NOT NULL AND {{selected}}"
)
# A row's value holds from its begin; after it, the engine idles until the next one.
_ITERATED = """
WITH rows AS (
    SELECT run, name, begin_us, end_us, {value} AS value,
        lead(begin_us) OVER (PARTITION BY run, name ORDER BY begin_us) AS next_us
    FROM engine_iterations
    WHERE dp_rank = {rank} AND iterations > 0 AND busy_us > 0 AND {{selected}}
)
SELECT run, name, begin_us AS time_us, value FROM rows WHERE value IS NOT NULL
UNION ALL
SELECT run, name, end_us, 0 FROM rows
WHERE value IS NOT NULL AND coalesce(next_us > end_us + 1000, true)
"""


def engine_counters(rank: int, *, alone: bool) -> tuple[tuple[str, str, str], ...]:
    """Return the counters of a data-parallel rank of each engine; the only one goes without a number."""
    which = "" if alone else f" (DP rank {rank})"
    return tuple(
        (f"{name}{which}", unit, query.format(value=value, rank=rank))
        for name, unit, query, value in (
            ("engine running", "requests", _READ, "running_requests"),
            ("engine waiting", "requests", _READ, "waiting_requests"),
            ("engine KV cache", "%", _READ, "100 * kv_share"),
            ("engine batch", "decoding requests", _ITERATED, "decode_requests / iterations"),
            ("engine iteration", "ms", _ITERATED, "busy_us / 1e3 / iterations"),
            ("engine prefill", "tokens/s", _ITERATED, "prefill_tokens * 1e6 / busy_us"),
            ("engine retracted", "waiting requests", _ITERATED, "retracted_requests"),
        )
    )


# Devices with readings, and whether they are of several hosts.
DEVICES = """
SELECT DISTINCT host, device, count(DISTINCT host) OVER () > 1 AS several
FROM (SELECT DISTINCT host, device FROM device_readings) ORDER BY host, device
"""
_SAMPLED = (
    "SELECT run, '' AS name, at_us AS time_us, {value} AS value FROM device_readings "
    "WHERE device = {device} AND coalesce(host, '') = '{host}' AND {value} IS NOT NULL AND {{selected}}"
)


def device_counters(host: str, device: int, *, several: bool) -> tuple[tuple[str, str, str], ...]:
    """Return the counters of a device, which belong to no process; of several hosts, with the host's name."""
    which = f"device {device}" + (f" on {host}" if several else "")
    # The query is a format, and in quotes.
    quoted = host.replace("'", "''").replace("{", "{{").replace("}", "}}")
    return tuple(
        (f"{which} {name}", unit, _SAMPLED.format(value=value, device=device, host=quoted))
        for name, unit, value in (
            ("utilization", "%", "utilization"),
            ("memory used", "bytes", "used_bytes"),
            ("power", "W", "power_w"),
            ("SM clock", "MHz", "sm_mhz"),
        )
    )


# So far, of each engine: by its readings where they count them, else by its answers.
RETRACTIONS = (
    "engine retractions",
    "requests",
    """
    SELECT run, name, at_us AS time_us, sum(sum(many)) OVER (
        PARTITION BY run, name ORDER BY at_us ROWS UNBOUNDED PRECEDING) AS value
    FROM (
        SELECT run, name, step, at_us, retractions AS many FROM engine_states
        UNION ALL
        SELECT run, name, step, end_us, retractions FROM engine_requests
        WHERE run NOT IN (SELECT run FROM engine_states WHERE retractions IS NOT NULL)
    ) WHERE many > 0 AND at_us IS NOT NULL AND {selected} GROUP BY run, name, at_us
    """,
)

# The same, for asynchronous runs alone.
ASYNCHRONOUS_COUNTERS = (
    (
        "weight version",
        "version",
        """
        SELECT w.run, p.name, w.end_us AS time_us, max(w.weight_version::BIGINT) AS value
        FROM (
            SELECT run, end_us, weight_version,
                unnest(from_json(rest->'$.replicas', '["BIGINT"]')) AS replica
            FROM event_fields
            WHERE event = 'weight_sync' AND weight_version IS NOT NULL AND {selected}
        ) AS w JOIN processes AS p
            ON p.run = w.run AND p.replica = w.replica AND p.role = 'engine'
        GROUP BY w.run, p.name, w.end_us
        """,
    ),
    *(
        (
            f"queue: {state}",
            "prompts",
            (
                "SELECT run, name, end_us AS time_us, "
                f"arg_max(integer_of(rest, '{state}'), begin_us) AS value FROM event_fields "
                f"WHERE event = 'queue_depth' AND integer_of(rest, '{state}') IS NOT NULL "
                "AND {selected} GROUP BY run, name, end_us"
            ),
        )
        for state in ("ready", "running", "pending", "failed", "capacity")
    ),
)

UNFINISHED = """
SELECT run, name, request_id, step, validate, begin_us, turns, tool_calls
FROM requests WHERE NOT finished AND end_us IS NULL AND {selected}
ORDER BY run, name, begin_us, request_id {limit}
"""
