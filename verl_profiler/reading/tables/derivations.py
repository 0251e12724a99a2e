"""The SQL that makes each table from `events` and `processes`.

`DERIVATIONS` names the tables.  A derivation may read the events, the processes and other derived
tables, and gives at least the columns of `SCHEMAS`, under the same names.
"""

from __future__ import annotations

from verl_profiler.reading.legacy_names import FIELD_ALIASES
from verl_profiler.reading.tables.schemas import FIELDS, NUMBER_LIMIT, REQUEST_PARTS

__all__ = [
    "BLAME",
    "DERIVATIONS",
    "GEN_TOLERANCE_US",
    "STALL_NOTICED_US",
    "SYNCHRONOUS",
    "from_rest",
]

# Clocks of different hosts: a request may end after the `gen` that waited for it by so much.
GEN_TOLERANCE_US = 50_000


def _number(field: str, kind: str = "BIGINT", of: str = "rest") -> str:
    value = f"try_cast({of}->>'$.{field}' AS {kind})"
    if kind == "VARCHAR":
        return value
    return f"CASE WHEN {value} BETWEEN -{NUMBER_LIMIT} AND {NUMBER_LIMIT} THEN {value} END"


def from_rest(name: str, of: str = "rest") -> str:
    """Return the SQL of a field of an event that is in a JSON object, under any of its names."""
    keys = (name, *FIELD_ALIASES.get(name, ()))
    return f"coalesce({', '.join(_number(key, FIELDS[name], of) for key in keys)})"


_FIELDS = ", ".join(f'{from_rest(name, "extra")} AS "{name}"' for name in FIELDS)
_EVENT_FIELDS = f"SELECT *, {_FIELDS}, extra AS rest FROM events"


def _micros(field: str) -> str:
    # A stage of no time is one that never was.
    return f"nullif(try_cast(round({_number(field, 'DOUBLE')} * 1e6) AS BIGINT), 0)"


# Which traced call of which function an event of TransferQueue belongs to.
_TRACED = """nullif(e.trace_id, 'N/A') AS trace_id, e.call,
    coalesce(try_cast(greatest(e.sampled, 1) AS INTEGER), 1) AS sampled"""

_EVENT_COUNTS = """
SELECT run, step, role, family, event, count(*) AS events, count(request_id) AS of_requests,
    min(begin_us) AS begin_us, max(end_us) AS end_us
FROM event_fields GROUP BY run, step, role, family, event
"""


def _if(event: str, value: str) -> str:
    """What an aggregate takes of the rows of one event; FILTER takes twice as long (duckdb 2.0)."""
    return f"CASE WHEN event = '{event}' THEN {value} END"


# `request_start` is written before verl has given the request its id; it is matched to its request
# by sample and session, or stands for a request that never came so far.
_REQUESTS = f"""
WITH children AS (
    SELECT run, step, name, validate, request_id,
        any_value(rank) AS rank,
        any_value(sample) AS sample,
        any_value(session) AS session,
        min(begin_us) AS begin_us,
        max(end_us) AS last_us,
        max(CASE WHEN event IN ('turn', 'engine_call') THEN turn END) + 1 AS turns_seen,
        count({_if("engine_call", "1")}) AS engine_calls,
        count({_if("tool_call", "1")}) AS tool_calls,
        count({_if("tool_execution", "1")}) AS tool_executions,
        sum({_if("engine_call", "duration_us")}) AS engine_sum,
        sum({_if("engine_call", "response_tokens")}) AS engine_tokens,
        coalesce(sum({_if("tool_execution", "duration_us")}),
            sum({_if("tool_call", "duration_us")})) AS tool_sum,
        sum({_if("prompt_build", "duration_us")}) AS prompt_build_sum,
        sum({_if("tool_parsing", "duration_us")}) AS tool_parsing_sum,
        sum({_if("token_merge", "duration_us")}) AS token_merge_sum,
        max({_if("postprocess", "end_us")})
            - min({_if("postprocess", "begin_us")}) AS postprocess_sum,
        sum({_if("reward", "duration_us")}) AS reward_sum,
        min({_if("reward", "begin_us")}) >= min({_if("postprocess", "begin_us")})
            AND max({_if("reward", "end_us")}) <= max({_if("postprocess", "end_us")})
            AS reward_inside
    FROM event_fields
    WHERE family = 'rollout' AND request_id IS NOT NULL AND event <> 'request'
    GROUP BY run, step, name, validate, request_id
), borders AS MATERIALIZED (
    -- One scan for both events: unlike IN, a range is looked for by the Parquet reader, and no
    -- filter on an aggregate can move down to it.
    SELECT any_value(event) AS border, run, step, name, validate, request_id,
        CASE WHEN request_id IS NULL THEN sample END AS loose_sample,
        CASE WHEN request_id IS NULL THEN session END AS loose_session,
        any_value(rank) AS rank, max(sample) AS sample, max(session) AS session,
        count(*) AS endings, max(status) AS status, max(error) AS error,
        min(begin_us) AS begin_us, max(end_us) AS end_us, max(agent) AS agent, max(uid) AS uid,
        max(turns) AS turns, max(prompt_tokens) AS prompt_tokens,
        max(response_tokens) AS response_tokens, max(generated_tokens) AS generated_tokens,
        max(tool_tokens) AS tool_tokens, max(reward) AS reward
    FROM event_fields
    WHERE event BETWEEN 'request' AND 'request_start' AND family = 'rollout'
    GROUP BY event, run, step, name, validate, request_id, loose_sample, loose_session
), ended AS (
    SELECT * EXCLUDE (border) FROM borders WHERE border = 'request'
), started AS (
    SELECT * FROM borders WHERE border = 'request_start'
), named AS MATERIALIZED (
    SELECT coalesce(e.run, c.run) AS run, coalesce(e.step, c.step) AS step,
        coalesce(e.name, c.name) AS name, coalesce(e.validate, c.validate) AS validate,
        coalesce(e.request_id, c.request_id) AS request_id, coalesce(e.rank, c.rank) AS rank,
        coalesce(e.sample, c.sample) AS sample, coalesce(e.session, c.session) AS session,
        coalesce(e.endings, 0) AS endings, e.status, e.error,
        coalesce(e.begin_us, c.begin_us) AS begin_us, e.end_us,
        greatest(e.end_us, c.last_us) AS last_us, e.agent, e.uid, e.turns, e.prompt_tokens,
        e.response_tokens, e.generated_tokens, e.tool_tokens, e.reward,
        c.* EXCLUDE (run, step, name, validate, request_id, rank, sample, session, begin_us, last_us)
    FROM (SELECT * FROM ended WHERE request_id IS NOT NULL) AS e
    FULL JOIN children AS c ON e.run = c.run AND e.step IS NOT DISTINCT FROM c.step
        AND e.name = c.name AND e.validate = c.validate AND e.request_id = c.request_id
), loose_starts AS (
    SELECT * FROM started WHERE request_id IS NULL
), begun AS MATERIALIZED (
    SELECT n.* REPLACE (CASE WHEN n.endings = 0 THEN coalesce(s.begin_us, l.begin_us, n.begin_us)
            ELSE n.begin_us END AS begin_us),
        coalesce(s.uid, l.uid) AS start_uid,
        coalesce(s.prompt_tokens, l.prompt_tokens) AS start_prompt_tokens
    FROM named AS n
    LEFT JOIN started AS s
        ON n.run = s.run AND n.step IS NOT DISTINCT FROM s.step AND n.name = s.name
        AND n.validate = s.validate AND n.request_id = s.request_id
    LEFT JOIN loose_starts AS l
        ON n.run = l.run AND n.step IS NOT DISTINCT FROM l.step AND n.name = l.name
        AND n.validate = l.validate AND n.sample = l.sample
        AND n.session IS NOT DISTINCT FROM l.session
    WHERE n.endings > 0 OR n.engine_calls > 0 OR s.begin_us IS NOT NULL OR l.begin_us IS NOT NULL
), matched AS (
    SELECT run, step, name, validate, sample, session FROM begun
    UNION ALL
    SELECT run, step, name, validate, sample, session FROM ended WHERE request_id IS NULL
), every AS MATERIALIZED (
    SELECT * FROM begun
    UNION ALL BY NAME
    SELECT * EXCLUDE (loose_sample, loose_session), end_us AS last_us
    FROM ended WHERE request_id IS NULL
    UNION ALL BY NAME
    SELECT s.run, s.step, s.name, s.validate, s.request_id, s.sample, s.session, s.rank,
        0 AS endings, s.begin_us, s.begin_us AS last_us, s.uid AS start_uid,
        s.prompt_tokens AS start_prompt_tokens
    FROM loose_starts AS s
    WHERE NOT EXISTS (
        SELECT 1 FROM matched AS m
        WHERE s.run = m.run AND s.step IS NOT DISTINCT FROM m.step AND s.name = m.name
        AND s.validate = m.validate AND s.sample IS NOT DISTINCT FROM m.sample
        AND s.session IS NOT DISTINCT FROM m.session)
), seen AS (
    SELECT run, bool_or(event = 'engine_call') AS engine,
        bool_or(event IN ('tool_call', 'tool_execution')) AS tool,
        bool_or(event = 'prompt_build') AS prompt_build,
        bool_or(event = 'tool_parsing') AS tool_parsing,
        bool_or(event = 'token_merge') AS token_merge,
        bool_or(event = 'postprocess') AS postprocess, bool_or(event = 'reward') AS reward
    FROM event_counts WHERE family = 'rollout' AND of_requests > 0 GROUP BY run
), parts AS (
    SELECT g.*, s.tool AS tools_seen,
        endings > 0 AND coalesce(status, '') <> 'unfinished' AS finished,
        coalesce(postprocess_sum, 0) - CASE WHEN reward_inside THEN reward_sum ELSE 0 END
            AS postprocess_own,
        CASE WHEN endings > 0 AND coalesce(status, '') <> 'unfinished'
            THEN end_us - begin_us END AS duration_us,
        -- Runs recorded before the two were: what their generate calls returned is generated.
        coalesce(generated_tokens, try_cast(engine_tokens AS BIGINT)) AS generated,
        CASE WHEN s.engine THEN coalesce(engine_sum, 0) END AS engine_us,
        CASE WHEN s.tool THEN coalesce(tool_sum, 0) END AS tool_us,
        CASE WHEN s.prompt_build THEN coalesce(prompt_build_sum, 0) END AS prompt_build_us,
        CASE WHEN s.tool_parsing THEN coalesce(tool_parsing_sum, 0) END AS tool_parsing_us,
        CASE WHEN s.token_merge THEN coalesce(token_merge_sum, 0) END AS token_merge_us,
        CASE WHEN s.postprocess THEN postprocess_own END AS postprocess_us,
        CASE WHEN s.reward THEN coalesce(reward_sum, 0) END AS reward_us,
        coalesce(engine_sum, 0) + coalesce(tool_sum, 0) + coalesce(prompt_build_sum, 0)
            + coalesce(tool_parsing_sum, 0) + coalesce(token_merge_sum, 0) + postprocess_own
            + coalesce(reward_sum, 0) AS known_us
    FROM every AS g LEFT JOIN seen AS s USING (run)
)
SELECT run, step, name, validate, request_id, rank, sample, session,
    agent, coalesce(uid, start_uid) AS uid,
    coalesce(status, CASE WHEN endings = 0 THEN 'unfinished' END) AS status,
    error, finished, endings, begin_us,
    CASE WHEN finished THEN end_us END AS end_us,
    duration_us, last_us,
    coalesce(turns, turns_seen) AS turns,
    CASE WHEN tools_seen AND (coalesce(tool_calls, 0) > 0 OR coalesce(tool_executions, 0) = 0)
        THEN coalesce(tool_calls, 0) END AS tool_calls,
    coalesce(prompt_tokens, start_prompt_tokens) AS prompt_tokens, response_tokens,
    generated AS generated_tokens,
    coalesce(tool_tokens, CASE WHEN response_tokens >= generated
        THEN response_tokens - generated END) AS tool_tokens,
    reward,
    {", ".join(f"{part}_us" for part in REQUEST_PARTS)},
    greatest(duration_us - known_us, 0) AS other_us,
    CASE WHEN duration_us IS NOT NULL THEN greatest(known_us - duration_us, 0) END AS overlap_us
FROM parts
"""

_TURNS = f"""
WITH chosen AS (
    SELECT run, step, name, validate, request_id, turn, event, status, begin_us, end_us,
        duration_us, CASE WHEN event = 'engine_call' THEN response_tokens END AS response_tokens,
        CASE WHEN event = 'engine_call' THEN prompt_tokens END AS prompt_tokens
    FROM event_fields
    WHERE turn IS NOT NULL AND family = 'rollout' AND event IN
        ('turn', 'engine_call', 'tool_call', 'tool_execution', 'tool_parsing', 'token_merge')
), grouped AS (
    SELECT run, step, name, validate, request_id, turn,
        bool_or(event = 'turn' AND coalesce(status, '') <> 'unfinished') AS finished,
        min(begin_us) AS begin_us,
        max(end_us) AS end_us,
        count({_if("engine_call", "1")}) AS engine_calls,
        count({_if("tool_call", "1")}) AS tool_calls,
        min(prompt_tokens) AS prompt_tokens,
        try_cast(sum(response_tokens) AS BIGINT) AS response_tokens,
        try_cast(coalesce(sum({_if("engine_call", "duration_us")}), 0) AS BIGINT) AS engine_us,
        try_cast(coalesce(sum({_if("tool_execution", "duration_us")}),
            sum({_if("tool_call", "duration_us")}), 0) AS BIGINT) AS tool_us,
        try_cast(coalesce(sum({_if("tool_parsing", "duration_us")}), 0) AS BIGINT) AS tool_parsing_us,
        try_cast(coalesce(sum({_if("token_merge", "duration_us")}), 0) AS BIGINT) AS token_merge_us
    FROM chosen WHERE request_id IS NOT NULL
    GROUP BY run, step, name, validate, request_id, turn
)
SELECT run, step, name, validate, request_id, turn, finished, begin_us,
    CASE WHEN finished THEN end_us END AS end_us,
    CASE WHEN finished THEN end_us - begin_us END AS duration_us,
    engine_calls, tool_calls, prompt_tokens, response_tokens,
    engine_us, tool_us, tool_parsing_us, token_merge_us,
    CASE WHEN finished THEN greatest(end_us - begin_us
        - engine_us - tool_us - tool_parsing_us - token_merge_us, 0) END AS other_us
FROM grouped
UNION ALL BY NAME
SELECT run, step, name, validate, request_id, turn, true AS finished, begin_us, end_us,
    duration_us
FROM chosen WHERE request_id IS NULL AND event = 'turn'
"""

# A call that ends so soon after a stall of its event loop had waited for the loop.
STALL_NOTICED_US = 50_000

_TOOL_CALLS = f"""
WITH calls AS (
    SELECT row_number() OVER () AS number, run, step, name, validate, request_id, turn, tool, status,
        error, begin_us, end_us, duration_us
    FROM event_fields WHERE event = 'tool_call' AND family = 'rollout'
), stalled AS (
    -- By what other requests did in the same loop.
    SELECT c.number, sum(least(c.end_us, g.end_us) - greatest(c.begin_us, g.begin_us)) AS stalled_us
    FROM calls AS c JOIN lags AS g ON g.run = c.run AND g.name = c.name
        AND g.request_id <> c.request_id AND g.begin_us < c.end_us AND g.end_us > c.begin_us
        AND c.end_us <= g.end_us + {STALL_NOTICED_US}
    GROUP BY c.number
)
SELECT c.* EXCLUDE (number), least(coalesce(s.stalled_us, 0), duration_us)::BIGINT AS stalled_us
FROM calls AS c LEFT JOIN stalled AS s USING (number)
"""


def _microseconds(name: str) -> str:
    return (
        f"CASE WHEN {name}_s BETWEEN 0 AND 1e9 THEN try_cast(round({name}_s * 1e6) AS BIGINT) END"
    )


_ENGINE_REQUESTS = f"""
SELECT e.run, e.step, e.name, p.replica, e.engine_request_id, e.request_id, e.validate, e.status,
    e.begin_us, e.end_us, e.duration_us,
    e.prompt_tokens, e.response_tokens, e.cached_tokens, e.finish_reason,
    {_microseconds("queue")} AS queue_us,
    {_microseconds("prefill")} AS prefill_us,
    {_microseconds("decode")} AS decode_us,
    {_microseconds("e2e")} AS e2e_us,
    e.weight_version
FROM event_fields AS e LEFT JOIN processes AS p USING (run, name)
WHERE e.event = 'engine_request' AND e.family = 'engine'
"""

# One engine request id may stand for several calls (verl's full_determinism passes the request's
# own id every turn); then the server's interval that overlaps the client's most is its own.
_ENGINE_CALLS = """
WITH calls AS NOT MATERIALIZED (
    SELECT run, step, name, validate, request_id, turn, status, error, begin_us, end_us,
        duration_us, engine_request_id AS id, server, prompt_tokens, response_tokens, finish_reason
    FROM event_fields WHERE event = 'engine_call' AND family = 'rollout'
), served AS NOT MATERIALIZED (
    SELECT run, engine_request_id AS id, name AS engine_name, replica,
        begin_us AS engine_begin_us, end_us AS engine_end_us, duration_us AS engine_duration_us,
        prompt_tokens AS engine_prompt_tokens, response_tokens AS engine_response_tokens,
        finish_reason AS engine_finish_reason, cached_tokens, queue_us, prefill_us, decode_us,
        weight_version
    FROM engine_requests WHERE engine_request_id IS NOT NULL
), repeated AS MATERIALIZED (
    SELECT run, id FROM served GROUP BY run, id HAVING count(*) > 1
), joined AS (
    SELECT * FROM (SELECT * FROM calls ANTI JOIN repeated USING (run, id))
    LEFT JOIN served USING (run, id)
    UNION ALL BY NAME
    SELECT * EXCLUDE (number) FROM (
        SELECT DISTINCT ON (c.number) c.*, s.* EXCLUDE (run, id)
        FROM (SELECT row_number() OVER () AS number, * FROM calls SEMI JOIN repeated USING (run, id))
            AS c
        LEFT JOIN served AS s ON s.run = c.run AND s.id = c.id
            AND c.end_us > s.engine_begin_us AND s.engine_end_us > c.begin_us
        ORDER BY c.number,
            least(c.end_us, engine_end_us) - greatest(c.begin_us, engine_begin_us) DESC,
            engine_begin_us
    )
)
SELECT * REPLACE (
        coalesce(prompt_tokens, engine_prompt_tokens) AS prompt_tokens,
        coalesce(response_tokens, engine_response_tokens) AS response_tokens,
        coalesce(finish_reason, engine_finish_reason) AS finish_reason
    ), id AS engine_request_id, duration_us - engine_duration_us AS outside_us
FROM joined
"""

# Spans of one process and step lie 2^64 us from those of any other, so that which span contains which is
# asked with inequalities alone: duckdb joins these by ranges.  With an equality it would hash, and hold
# each span of a step against all others.
_PHASES = """
WITH spans AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY run, step, name, begin_us, duration_us DESC, event)
        AS number, run, step, name, rank, event, validate, begin_us, end_us, duration_us
    FROM event_fields WHERE family = 'trainer' AND duration_us IS NOT NULL
), intervals AS MATERIALIZED (
    SELECT place * 18446744073709551616::HUGEINT + begin_us AS begin_at,
        place * 18446744073709551616::HUGEINT + end_us AS end_at,
        any_value(duration_us) AS duration_us, min(number) AS first, max(number) AS last
    FROM (SELECT *, dense_rank() OVER (ORDER BY run, step, name) AS place FROM spans)
    GROUP BY place, begin_us, end_us
), around AS (
    SELECT child.first AS number, arg_min(parent.last, (parent.duration_us, -parent.last)) AS parent
    FROM intervals AS child JOIN intervals AS parent
        ON parent.begin_at <= child.begin_at AND parent.end_at >= child.end_at
        AND parent.duration_us > child.duration_us
    GROUP BY child.first
), nested AS (
    SELECT number, coalesce(before, parent) AS parent FROM (
        SELECT number, lag(number) OVER (
            PARTITION BY run, step, name, begin_us, end_us ORDER BY number) AS before
        FROM spans
    ) LEFT JOIN around USING (number) WHERE coalesce(before, parent) IS NOT NULL
), children AS (
    SELECT nested.parent AS number, sum(spans.duration_us) AS inside_us
    FROM nested JOIN spans USING (number) GROUP BY nested.parent
)
SELECT s.run, s.step, s.name, s.rank, s.event AS phase, p.event AS parent, s.validate,
    s.begin_us, s.end_us, s.duration_us,
    try_cast(greatest(s.duration_us - coalesce(c.inside_us, 0), 0) AS BIGINT) AS self_us
FROM spans AS s
LEFT JOIN nested AS n ON n.number = s.number
LEFT JOIN spans AS p ON p.number = n.parent
LEFT JOIN children AS c ON c.number = s.number
"""

# A step that has no `step` event (the trainer was not recorded, or was killed in it) gets the span
# of its phases and requests, or of all its events, and is marked as not finished.  Stray events do
# not make a step: an engine counts its step by the weights it has, and so is one ahead at times.
_STEPS = """
WITH recorded AS (
    SELECT run, step, min(begin_us) AS begin_us, max(end_us) AS end_us
    FROM phases WHERE phase = 'step' GROUP BY run, step
), worked AS (
    SELECT run, step, begin_us, end_us FROM phases
    UNION ALL
    SELECT run, step, begin_us, coalesce(end_us, last_us) FROM requests
), spanned AS (
    SELECT run, step, min(begin_us) AS begin_us, max(end_us) AS end_us
    FROM worked WHERE step IS NOT NULL GROUP BY run, step
    UNION ALL
    SELECT run, step, min(begin_us), max(end_us) FROM event_counts
    WHERE step IS NOT NULL AND run NOT IN (SELECT DISTINCT run FROM worked)
    GROUP BY run, step
), inside AS (
    SELECT run, step, try_cast(sum(duration_us) AS BIGINT) AS phases_us
    FROM phases WHERE parent = 'step' GROUP BY run, step
), counted AS (
    SELECT run, step,
        count(*) FILTER (NOT validate) AS requests,
        count(*) FILTER (NOT validate AND NOT finished) AS unfinished_requests,
        count(*) FILTER (validate) AS validation_requests,
        try_cast(sum(generated_tokens) FILTER (finished AND NOT validate) AS BIGINT)
            AS generated_tokens,
        try_cast(sum(tool_tokens) FILTER (finished AND NOT validate) AS BIGINT) AS tool_tokens
    FROM requests GROUP BY run, step
)
SELECT run, step, r.step IS NOT NULL AS finished,
    coalesce(r.begin_us, e.begin_us) AS begin_us,
    coalesce(r.end_us, e.end_us) AS end_us,
    coalesce(r.end_us, e.end_us) - coalesce(r.begin_us, e.begin_us) AS duration_us,
    CASE WHEN r.step IS NOT NULL THEN coalesce(i.phases_us, 0) END AS phases_us,
    CASE WHEN r.step IS NOT NULL
        THEN r.end_us - r.begin_us - coalesce(i.phases_us, 0) END AS unaccounted_us,
    coalesce(c.requests, 0) AS requests,
    coalesce(c.unfinished_requests, 0) AS unfinished_requests,
    coalesce(c.validation_requests, 0) AS validation_requests,
    c.generated_tokens, c.tool_tokens,
    CASE WHEN r.step IS NOT NULL THEN c.generated_tokens * 1e6 / nullif(r.end_us - r.begin_us, 0)
        END AS generated_tokens_per_s
FROM spanned AS e
LEFT JOIN recorded AS r USING (run, step)
LEFT JOIN inside AS i USING (run, step)
LEFT JOIN counted AS c USING (run, step)
ORDER BY run, step
"""

_RANK_SPANS = """
SELECT run, step, name, role, rank, event, family, status, begin_us, end_us, duration_us
FROM event_fields WHERE family IN ('workers', 'weights') AND duration_us IS NOT NULL
"""

# Waiting of those that are done, charged to those that are not: for the k-th of n to end, the sum
# over the gaps before its end of (number done) / (number not done).
BLAME = """
    SELECT * EXCLUDE (gap_us), sum(gap_us * (place - 1) / (many - place + 1)) OVER (
            PARTITION BY {group} ORDER BY place
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS blame_us
    FROM (
        SELECT *, row_number() OVER ordered AS place, count(*) OVER (PARTITION BY {group}) AS many,
            coalesce(end_us - lag(end_us) OVER ordered, 0) AS gap_us
        FROM {ends}
        WINDOW ordered AS (PARTITION BY {group} ORDER BY end_us, who)
    )
"""

# The one definition of how long `gen` is: the sum of a step's `gen` in the process that has most of
# it, which is the trainer where it was recorded.  First begin and last end are for positions only.
_GENS = """
SELECT run, step, name, in_step, gens, begin_us, end_us, duration_us
FROM (
    SELECT run, step, name, bool_or(parent = 'step') IS TRUE AS in_step, count(*) AS gens,
        min(begin_us) AS begin_us, max(end_us) AS end_us,
        try_cast(sum(duration_us) AS BIGINT) AS duration_us
    FROM phases WHERE phase = 'gen' AND NOT validate AND (parent IS NULL OR parent = 'step')
    GROUP BY run, step, name
)
QUALIFY row_number() OVER (PARTITION BY run, step
    ORDER BY in_step DESC, duration_us DESC, name) = 1
"""

# A trainer that consumes what earlier steps dispatched: most requests end after the `gen` of their own
# step.  A synchronous one may leave a few behind that it sampled beyond its need.
_LATE_SHARE = 0.2
_ASYNCHRONOUS = f"""
SELECT run, count(*) AS requests,
    count(*) FILTER (r.end_us > g.end_us + {GEN_TOLERANCE_US}) AS later
FROM requests AS r JOIN gens AS g USING (run, step)
WHERE r.finished AND NOT r.validate AND g.in_step
GROUP BY run HAVING later > {_LATE_SHARE} * count(*)
"""
# Explanations that join on the step that dispatched a request hold for these runs only.
SYNCHRONOUS = "run NOT IN (SELECT run FROM asynchronous)"

# What a request's time after the step's first begin consists of, and the median request's.  Decoding
# is tokens times time per token; each of the two is charged with what it adds.
_REQUEST_BLAME = f"""
WITH calls AS (
    SELECT run, step, name, request_id, sum(duration_us) AS call_us,
        sum(coalesce(engine_duration_us, duration_us) - coalesce(queue_us, 0)
            - coalesce(prefill_us, 0)) AS decode_us,
        sum(coalesce(prefill_us, 0)) AS prefill_us,
        -- The first token is prefill's, where that is known.
        sum(CASE WHEN prefill_us IS NULL THEN response_tokens
            ELSE greatest(response_tokens - 1, 0) END) AS tokens
    FROM engine_calls WHERE duration_us IS NOT NULL AND NOT validate GROUP BY ALL
), stalls AS (
    SELECT run, step, name, request_id, sum(stalled_us) AS stalled_us
    FROM tool_calls WHERE stalled_us > 0 AND NOT validate GROUP BY ALL
), begins AS (
    SELECT run, step, min(begin_us) AS first_us
    FROM requests WHERE finished AND NOT validate AND {SYNCHRONOUS} GROUP BY run, step
), parts AS MATERIALIZED (
    SELECT r.run, r.step, r.name, r.request_id, r.sample, r.end_us,
        r.end_us - first_us AS whole_us, r.begin_us - first_us AS late_us,
        coalesce(c.call_us - c.decode_us - c.prefill_us, 0) AS queued_us,
        coalesce(c.prefill_us, 0) AS prefill_us, coalesce(c.decode_us, 0) AS decode_us,
        greatest(coalesce(c.tokens, 0), 1) AS tokens,
        greatest(coalesce(r.tool_us, 0) - coalesce(g.stalled_us, 0), 0) AS tool_us
    FROM requests AS r JOIN begins USING (run, step)
    LEFT JOIN calls AS c USING (run, step, name, request_id)
    LEFT JOIN stalls AS g USING (run, step, name, request_id)
    WHERE r.finished AND NOT r.validate
), typical AS (
    SELECT run, step, median(whole_us) AS whole_us, median(late_us) AS late_us,
        median(queued_us) AS queued_us, median(prefill_us) AS prefill_us,
        median(tool_us) AS tool_us, median(tokens) AS tokens,
        median(decode_us / tokens) AS token_us
    FROM parts GROUP BY run, step
), excess AS (
    SELECT p.run, p.step, p.name, p.request_id, p.sample, p.end_us,
        p.whole_us - t.whole_us AS behind_us, p.late_us - t.late_us AS late_us,
        p.queued_us - t.queued_us AS queued_us,
        p.prefill_us - t.prefill_us + (p.tokens - t.tokens) * t.token_us AS long_us,
        p.tokens * (p.decode_us / p.tokens - t.token_us) AS slow_us,
        p.tool_us - t.tool_us AS tool_us
    FROM parts AS p JOIN typical AS t USING (run, step)
), reasons AS (
    SELECT *, behind_us - late_us - queued_us - long_us - slow_us - tool_us AS other_us
    FROM excess
), ends AS (
    SELECT *, coalesce(request_id, name) AS who FROM reasons
)
SELECT run, step, name, request_id, sample, place, many, blame_us, behind_us, late_us, queued_us,
    long_us, slow_us, tool_us, other_us,
    CASE greatest(late_us, queued_us, long_us, slow_us, tool_us, other_us)
        WHEN late_us THEN 'late' WHEN queued_us THEN 'queued' WHEN long_us THEN 'long'
        WHEN slow_us THEN 'slow' WHEN tool_us THEN 'tool' ELSE 'other' END AS because
FROM ({BLAME.format(ends="ends", group="run, step")})
"""

# A request's blame, as far as tools made it late, goes to its tools by the time of their calls.
_TOOL_BLAME = """
WITH calls AS (
    SELECT b.run, b.step, b.name, b.request_id, t.tool,
        t.duration_us - coalesce(t.stalled_us, 0) AS duration_us, b.place = b.many AS last,
        b.blame_us * least(b.tool_us / b.behind_us, 1) AS tool_blame_us
    FROM request_blame AS b JOIN tool_calls AS t USING (run, step, name, request_id)
    WHERE b.tool_us > 0 AND b.behind_us > 0 AND NOT t.validate AND t.duration_us IS NOT NULL
), sums AS (
    SELECT run, step, name, request_id, try_cast(sum(duration_us) AS BIGINT) AS all_us
    FROM calls GROUP BY run, step, name, request_id
)
SELECT c.run, c.step, c.tool, bool_or(c.last) AS last,
    sum(c.tool_blame_us * c.duration_us / nullif(all_us, 0)) AS blame_us
FROM calls AS c JOIN sums USING (run, step, name, request_id)
GROUP BY c.run, c.step, c.tool
"""

# The request that each `gen` waited for last.
_LAST_REQUESTS = f"""
WITH timed AS (
    SELECT run, step, name AS trainer, begin_us AS gen_begin_us, end_us AS gen_end_us
    FROM gens WHERE in_step AND {SYNCHRONOUS}
), waits AS (
    SELECT g.run, g.step, max(p.end_us) AS wait_end_us FROM timed AS g JOIN phases AS p
        ON p.run = g.run AND p.step = g.step AND p.phase = 'sample_wait'
        AND p.begin_us >= g.gen_begin_us AND p.end_us <= g.gen_end_us
    GROUP BY g.run, g.step
), ends AS (
    SELECT g.run, g.step, max(r.end_us) AS end_us FROM timed AS g JOIN requests AS r
        ON r.run = g.run AND r.step = g.step AND r.finished AND NOT r.validate
        AND r.end_us <= g.gen_end_us + {GEN_TOLERANCE_US} AND r.end_us > g.gen_begin_us
    GROUP BY g.run, g.step
)
SELECT g.*, w.wait_end_us, r.name, r.request_id, r.begin_us, r.end_us
FROM timed AS g JOIN ends AS e USING (run, step) LEFT JOIN waits AS w USING (run, step)
JOIN requests AS r ON r.run = g.run AND r.step = g.step AND r.finished AND NOT r.validate
    AND r.end_us = e.end_us
QUALIFY row_number() OVER (PARTITION BY g.run, g.step
    ORDER BY r.begin_us, r.name, r.request_id) = 1
"""

_TRANSFERS = f"""
SELECT e.run, step, name, validate, request_id, role, event, op, partition, status,
    begin_us, end_us, duration_us, size_bytes, rows, e.func, {_TRACED}
FROM event_fields AS e
WHERE family = 'transfer_queue' AND NOT starts_with(event, 'tq_function')
"""

_TQ_CALLS = f"""
SELECT run, step, name, validate, request_id, role, e.func, {_TRACED},
    'events' AS source,
    'FUNCTION_END' AS stage, status, duration_us IS NOT NULL AS finished, false AS estimated,
    begin_us, end_us, duration_us, {_micros("get_s")} AS get_us,
    {_micros("compute_s")} AS compute_us, {_micros("put_s")} AS put_us,
    coalesce({_number("waits", "BOOLEAN")}, false) AS waits, rows, rest AS more
FROM event_fields AS e WHERE family = 'transfer_queue' AND event = 'tq_function'
"""

_TQ_STAGES = """
SELECT run, step, name, func, call,
    substr(event, length('tq_function_') + 1) AS stage, begin_us, end_us, duration_us
FROM event_fields WHERE family = 'transfer_queue' AND starts_with(event, 'tq_function_')
"""

# Reward workers are not told whether a request is of validation; their requests say it.
_REWARD_SCORES = f"""
WITH origins AS (
    SELECT run, uid, bool_and(validate) AS validate FROM requests
    WHERE uid IS NOT NULL GROUP BY run, uid
)
SELECT e.run, e.step, e.name, e.request_id, e.uid, e.session, coalesce(o.validate, e.validate) AS validate,
    e.status, e.begin_us, e.end_us, e.duration_us, e.score,
    try_cast(round({_number("wait_s", "DOUBLE")} * 1e6) AS BIGINT) AS wait_us,
    try_cast(round({_number("compute_s", "DOUBLE")} * 1e6) AS BIGINT) AS compute_us
FROM event_fields AS e LEFT JOIN origins AS o ON o.run = e.run AND o.uid = e.uid
WHERE e.family = 'reward' AND e.event = 'reward_score'
"""

_MEMORY = f"""
SELECT run, step, name, role, rank, end_us, rest->>'$.at' AS "at",
    {_number("allocated_bytes")} AS allocated_bytes, {_number("reserved_bytes")} AS reserved_bytes,
    {_number("used_bytes")} AS used_bytes, {_number("total_bytes")} AS total_bytes,
    {_number("rss_bytes")} AS rss_bytes
FROM event_fields WHERE event = 'memory' AND family = 'memory'
"""

_MOVE_BYTES = ", ".join(
    f"{_number(name)} AS {name}"
    for name in (
        "total_bytes",
        *(
            f"{what}_{when}_bytes"
            for what in ("used", "rss", "host_used")
            for when in ("before", "after")
        ),
    )
)

# A release or resume as it was recorded; and, for logs and processes without such events, as verl's
# checkpoints after one show it: what the device holds then, against the checkpoint before.
_MEMORY_MOVES = f"""
WITH calls AS (
    SELECT run, step, name, role, rank, event, 'call' AS source, status, begin_us, end_us,
        duration_us, array_to_string((rest->'$.tags')::VARCHAR[], ', ') AS tags, {_MOVE_BYTES}
    FROM event_fields
    WHERE event IN ('memory_release', 'memory_resume') AND family = 'weights'
        AND duration_us IS NOT NULL
), checkpoints AS (
    SELECT *, lag(used_bytes) OVER ordered AS used_before_bytes, lag(end_us) OVER ordered AS begin_us
    FROM memory WHERE total_bytes > 1
    WINDOW ordered AS (PARTITION BY run, name ORDER BY end_us)
)
SELECT * FROM calls
UNION ALL BY NAME
SELECT run, step, name, role, rank,
    CASE WHEN "at" ILIKE 'after resume%' THEN 'memory_resume' ELSE 'memory_release' END AS event,
    'checkpoint' AS source,
    coalesce(nullif(regexp_extract("at", '(?i)^after resume (?:sglang )?(\\w+)', 1), ''), 'all') AS tags,
    begin_us, end_us, total_bytes, used_before_bytes, used_bytes AS used_after_bytes
FROM checkpoints
WHERE used_before_bytes IS NOT NULL AND ("at" ILIKE 'after resume%'
    OR regexp_matches("at", '(?i)^after (sglang|vllm|rollout) (offload|sleep|release)'))
"""

# Every reading of memory, with the trainer's phase and step at that moment: engines count their
# steps by the weights that they have, and samples are taken by a thread that knows no step.
_MEMORY_READINGS = f"""
WITH readings AS (
    SELECT run, step, name, role, rank, end_us AS at_us, 'checkpoint' AS source, "at",
        allocated_bytes, reserved_bytes, used_bytes, total_bytes, rss_bytes,
        NULL::BIGINT AS host_used_bytes
    FROM memory
    UNION ALL BY NAME
    SELECT run, step, name, role, rank, end_us AS at_us, 'sample' AS source,
        {_number("used_bytes")} AS used_bytes, {_number("total_bytes")} AS total_bytes,
        {_number("rss_bytes")} AS rss_bytes, {_number("host_used_bytes")} AS host_used_bytes
    FROM event_fields WHERE event = 'memory_sample' AND family = 'memory'
    UNION ALL BY NAME
    SELECT run, step, name, role, rank, begin_us AS at_us, 'move' AS source,
        'before ' || event AS "at", used_before_bytes AS used_bytes, total_bytes,
        rss_before_bytes AS rss_bytes, host_used_before_bytes AS host_used_bytes
    FROM memory_moves WHERE source = 'call'
    UNION ALL BY NAME
    SELECT run, step, name, role, rank, end_us AS at_us, 'move' AS source,
        'after ' || event AS "at", used_after_bytes AS used_bytes, total_bytes,
        rss_after_bytes AS rss_bytes, host_used_after_bytes AS host_used_bytes
    FROM memory_moves WHERE source = 'call'
), top AS (
    SELECT run, step, phase, begin_us, end_us FROM phases
    WHERE parent = 'step' OR (parent IS NULL AND phase <> 'step')
)
SELECT r.run,
    CASE WHEN r.at_us <= t.end_us THEN t.step ELSE coalesce(s.step, r.step) END AS step,
    CASE WHEN r.at_us <= t.end_us THEN t.phase END AS phase,
    r.name, r.role, r.rank, r.at_us, r.source, r."at", r.allocated_bytes, r.reserved_bytes,
    CASE WHEN r.total_bytes > 1 THEN r.used_bytes END AS used_bytes,
    CASE WHEN r.total_bytes > 1 THEN r.total_bytes END AS total_bytes,
    r.rss_bytes, r.host_used_bytes
FROM readings AS r
ASOF LEFT JOIN top AS t ON t.run = r.run AND t.begin_us <= r.at_us
ASOF LEFT JOIN (SELECT * FROM steps WHERE finished) AS s
    ON s.run = r.run AND s.begin_us <= r.at_us
WHERE coalesce(nullif(r.reserved_bytes, 0), r.rss_bytes, r.host_used_bytes,
    CASE WHEN r.total_bytes > 1 THEN r.used_bytes END) IS NOT NULL
"""

_LAGS = f"""
SELECT run, step, name, role, loop, during, coalesce({_number("function", "VARCHAR")},
        CASE WHEN rest->>'$.file' IS NOT NULL THEN during END) AS function,
    {_number("innermost", "VARCHAR")} AS innermost, {_number("file", "VARCHAR")} AS file,
    try_cast({_number("line")} AS INTEGER) AS line, tool, request_id, turn,
    {_micros("begin_error_s")} AS begin_error_us, begin_us, end_us, duration_us
FROM event_fields WHERE family = 'event_loop' AND duration_us IS NOT NULL
"""

_COSTS = f"""
SELECT run, step, name, role, {_number("events")} AS events, {_number("bytes")} AS size_bytes,
    {_number("dropped")} AS dropped, {_number("wrapper_s", "DOUBLE")} AS wrapper_s,
    {_number("wrapper_cpu_s", "DOUBLE")} AS wrapper_cpu_s,
    {_number("writer_s", "DOUBLE")} AS writer_s,
    {_number("writer_cpu_s", "DOUBLE")} AS writer_cpu_s
FROM event_fields WHERE family = 'profiler' AND event = 'profiler_cost'
"""

# Name → its SQL, and whether it is kept as a table or read from the events again each time.
DERIVATIONS: dict[str, tuple[str, bool]] = {
    "event_fields": (_EVENT_FIELDS, False),
    "event_counts": (_EVENT_COUNTS, True),
    "requests": (_REQUESTS, True),
    "turns": (_TURNS, True),
    "tool_calls": (_TOOL_CALLS, True),
    "engine_requests": (_ENGINE_REQUESTS, False),
    "engine_calls": (_ENGINE_CALLS, True),
    "phases": (_PHASES, True),
    "steps": (_STEPS, True),
    "gens": (_GENS, False),
    "asynchronous": (_ASYNCHRONOUS, True),
    "last_requests": (_LAST_REQUESTS, True),
    "request_blame": (_REQUEST_BLAME, True),
    "tool_blame": (_TOOL_BLAME, True),
    "rank_spans": (_RANK_SPANS, True),
    "transfers": (_TRANSFERS, True),
    "tq_calls": (_TQ_CALLS, True),
    "tq_stages": (_TQ_STAGES, True),
    "reward_scores": (_REWARD_SCORES, True),
    "memory": (_MEMORY, True),
    "memory_moves": (_MEMORY_MOVES, True),
    "memory_readings": (_MEMORY_READINGS, True),
    "lags": (_LAGS, True),
    "costs": (_COSTS, False),
}
