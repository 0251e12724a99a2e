CREATE TABLE engine_requests AS
SELECT e.run, e.step, e.name, p.replica, e.engine_request_id, e.request_id, e.validate, e.status,
    e.begin_us, e.end_us, e.duration_us,
    e.prompt_tokens, e.response_tokens, e.cached_tokens, e.finish_reason,
    -- Some engines count the wait in a pause, which is `engine_parked`, as time in their queue too: then the
    -- parts are longer than the whole.
    micros(queue_s) - CASE WHEN micros(queue_s + coalesce(prefill_s, 0) + coalesce(decode_s, 0)) + held_us / 2
        > e.duration_us THEN least(held_us, micros(queue_s)) ELSE 0 END AS queue_us,
    micros(prefill_s) AS prefill_us,
    micros(decode_s) AS decode_us,
    micros(e2e_s) AS e2e_us,
    queue_us + micros(prefill_s) AS first_token_us,
    CASE WHEN e.response_tokens > 1
        THEN (e.response_tokens - 1) * 1e6 / nullif(micros(decode_s), 0) END AS decode_tokens_per_s,
    e.weight_version,
    integer_of(rest, 'dp_rank') AS dp_rank,
    integer_of(rest, 'retractions') AS retractions,
    integer_of(rest, 'draft_tokens') AS draft_tokens,
    integer_of(rest, 'accepted_draft_tokens') AS accepted_draft_tokens
FROM event_fields AS e LEFT JOIN processes AS p USING (run, name)
LEFT JOIN (
    SELECT run, engine_request_id, begin_us, max(duration_us) AS held_us FROM event_fields
    WHERE event = 'engine_parked' AND duration_us IS NOT NULL AND NOT $unknown_pause GROUP BY ALL
) AS h ON h.run = e.run AND h.engine_request_id = e.engine_request_id AND h.begin_us = e.begin_us
WHERE e.event = 'engine_request' AND e.family = 'engine';

-- Waits of calls in paused engines. Where the end of a pause has no probe, they are unknown: recordings of
-- version 0.1 have them until the end of each call there (verl 0.9.0 with vLLM).
CREATE VIEW engine_parked AS
SELECT run, name, engine_request_id, begin_us, end_us, duration_us FROM event_fields
WHERE event = 'engine_parked' AND engine_request_id IS NOT NULL AND duration_us IS NOT NULL
    AND NOT $unknown_pause;

-- A call without attempts is its only one.
CREATE VIEW engine_attempts AS
SELECT run, step, name, validate, request_id, turn, attempt, engine_request_id, server, begin_us, end_us,
    duration_us, prompt_tokens, response_tokens, weight_version, finish_reason
FROM event_fields WHERE event = 'engine_attempt';

-- One engine request id may stand for several calls (verl's full_determinism passes the request's
-- own id every turn); then the server's interval that overlaps the client's most is its own.
CREATE TABLE engine_calls AS
WITH calls AS NOT MATERIALIZED (
    SELECT run, step, name, validate, request_id, turn, status, error, begin_us, end_us,
        duration_us, engine_request_id AS id, server, prompt_tokens, response_tokens, finish_reason,
        greatest(coalesce(sampled, 1), 1) AS sampled
    FROM event_fields WHERE event = 'engine_call' AND family = 'rollout'
), served AS NOT MATERIALIZED (
    SELECT run, engine_request_id AS id, name AS engine_name, replica,
        begin_us AS engine_begin_us, end_us AS engine_end_us, duration_us AS engine_duration_us,
        prompt_tokens AS engine_prompt_tokens, response_tokens AS engine_response_tokens,
        finish_reason AS engine_finish_reason, cached_tokens, queue_us, prefill_us, decode_us,
        weight_version, retractions, draft_tokens, accepted_draft_tokens
    FROM engine_requests WHERE engine_request_id IS NOT NULL
), repeated AS MATERIALIZED (
    SELECT run, id FROM served GROUP BY run, id HAVING count(*) > 1
), parked AS MATERIALIZED (
    SELECT run, engine_request_id AS id, begin_us, duration_us FROM engine_parked
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
    ), id AS engine_request_id, duration_us - engine_duration_us AS outside_us,
    (SELECT sum(p.duration_us) FROM parked AS p WHERE p.run = j.run AND p.id = j.id
        AND p.begin_us BETWEEN j.engine_begin_us AND j.engine_end_us)::BIGINT AS parked_us
FROM joined AS j;

-- Readings come every half second, and are left out for at most ten while nothing changes.
CREATE VIEW engine_states AS
SELECT run, step, name, replica, dp_rank, at_us,
    CASE WHEN next_us - at_us <= 15_000_000 THEN next_us - at_us END AS held_us,
    running_requests, waiting_requests, running_limit, kv_used_tokens, kv_capacity_tokens,
    kv_used_tokens / nullif(kv_capacity_tokens, 0) AS kv_share, iterations, prefill_tokens,
    decode_tokens, retractions, prefix_queried_tokens, prefix_hit_tokens
FROM (
    SELECT e.run, e.step, e.name, p.replica, coalesce(integer_of(rest, 'dp_rank'), 0) AS dp_rank,
        e.end_us AS at_us, lead(e.end_us) OVER (
            PARTITION BY e.run, e.name, coalesce(integer_of(rest, 'dp_rank'), 0) ORDER BY e.end_us
        ) AS next_us,
        integer_of(rest, 'running_requests') AS running_requests,
        integer_of(rest, 'waiting_requests') AS waiting_requests,
        integer_of(rest, 'running_limit') AS running_limit,
        integer_of(rest, 'kv_used_tokens') AS kv_used_tokens,
        integer_of(rest, 'kv_capacity_tokens') AS kv_capacity_tokens,
        integer_of(rest, 'iterations') AS iterations,
        integer_of(rest, 'prefill_tokens') AS prefill_tokens,
        integer_of(rest, 'decode_tokens') AS decode_tokens,
        integer_of(rest, 'retractions') AS retractions,
        integer_of(rest, 'prefix_queried_tokens') AS prefix_queried_tokens,
        integer_of(rest, 'prefix_hit_tokens') AS prefix_hit_tokens
    FROM event_fields AS e LEFT JOIN processes AS p USING (run, name)
    WHERE e.event = 'engine_state' AND e.family = 'engine'
);

-- Consecutive iterations of an engine, without idle time: SGLang's own rows, and what vLLM did between two
-- readings if requests ran all the time.
CREATE VIEW engine_iterations AS
SELECT e.run, e.step, e.name, p.replica, coalesce(integer_of(rest, 'dp_rank'), 0) AS dp_rank,
    e.begin_us, e.end_us, micros(number_of(rest, 'busy_s')) AS busy_us,
    integer_of(rest, 'iterations') AS iterations,
    integer_of(rest, 'decode_requests') AS decode_requests,
    integer_of(rest, 'prefill_tokens') AS prefill_tokens,
    integer_of(rest, 'context_tokens') AS context_tokens,
    integer_of(rest, 'running_requests') AS running_requests,
    integer_of(rest, 'waiting_requests') AS waiting_requests,
    integer_of(rest, 'retracted_requests') AS retracted_requests
FROM event_fields AS e LEFT JOIN processes AS p USING (run, name)
WHERE e.event = 'engine_iterations' AND e.family = 'engine'
UNION ALL
SELECT run, step, name, replica, dp_rank, before_us, at_us, at_us - before_us, iterations,
    decode_tokens, prefill_tokens, (kv_before + kv_used_tokens) * iterations // 2,
    running_requests, waiting_requests, NULL
FROM (
    SELECT *, lag(at_us) OVER readings AS before_us,
        lag(running_requests) OVER readings AS running_before,
        lag(kv_used_tokens) OVER readings AS kv_before
    FROM engine_states
    WINDOW readings AS (PARTITION BY run, name, dp_rank ORDER BY at_us)
)
WHERE iterations > 0 AND running_before > 0 AND at_us - before_us BETWEEN 1 AND 5_000_000;

-- Where the time of each generate call went, one row per request that an engine served of it: an aborted
-- call has several attempts, and waits between them.  The parts add up to the time from the attempt
-- before (or the call's begin) until the end.  What was not recorded is NULL; undivided_us has its time.
CREATE TABLE engine_call_times AS
WITH attempts AS MATERIALIZED (
    SELECT run, step, name, validate, request_id, turn, engine_request_id, attempt, begin_us, end_us,
        duration_us, prompt_tokens, response_tokens, greatest(coalesce(sampled, 1), 1) AS sampled,
        greatest(begin_us - lag(end_us) OVER (
            PARTITION BY run, name, request_id, turn ORDER BY begin_us), 0) AS gap_us
    FROM event_fields WHERE event = 'engine_attempt' AND family = 'rollout' AND request_id IS NOT NULL
), pieces AS MATERIALIZED (
    SELECT row_number() OVER () AS number, * FROM (
        SELECT run, step, name, validate, request_id, turn, 0 AS attempt, 0 AS gap_us, begin_us,
            duration_us, engine_request_id, engine_name, engine_begin_us, engine_end_us,
            engine_duration_us, prompt_tokens, response_tokens, cached_tokens, queue_us, prefill_us,
            retractions, sampled
        FROM engine_calls ANTI JOIN attempts USING (run, name, request_id, turn)
        WHERE duration_us IS NOT NULL AND request_id IS NOT NULL
        UNION ALL BY NAME
        SELECT a.* EXCLUDE (end_us), s.engine_name, s.engine_begin_us, s.engine_end_us,
            s.engine_duration_us, s.cached_tokens, s.queue_us, s.prefill_us, s.retractions
        FROM attempts AS a LEFT JOIN (
            SELECT DISTINCT ON (run, engine_request_id) run, engine_request_id, name AS engine_name,
                begin_us AS engine_begin_us, end_us AS engine_end_us,
                duration_us AS engine_duration_us, cached_tokens, queue_us, prefill_us, retractions
            FROM engine_requests WHERE run IN (SELECT run FROM attempts)
            ORDER BY run, engine_request_id, begin_us
        ) AS s USING (run, engine_request_id)
        WHERE a.duration_us IS NOT NULL
    )
), parked AS MATERIALIZED (
    SELECT run, engine_request_id, sum(duration_us)::BIGINT AS parked_us FROM engine_parked GROUP BY ALL
), unknown AS MATERIALIZED (
    SELECT DISTINCT run, name AS engine_name, true AS pauses_unknown FROM event_fields
    JOIN (SELECT run, name FROM processes WHERE NOT has_probe(header, 'engine_resume'))
        USING (run, name)
    WHERE event = 'engine_abort'
), known AS MATERIALIZED (
    SELECT p.* EXCLUDE (queue_us, prefill_us, engine_duration_us),
        coalesce(engine_duration_us, duration_us) AS engine_us,
        CASE WHEN engine_duration_us IS NOT NULL
            THEN least(coalesce(k.parked_us, 0), engine_duration_us) END AS held_us,
        pauses_unknown, queue_us, prefill_us, engine_duration_us IS NOT NULL AS served,
        lag(engine_name) OVER turns AS before_name, lag(prompt_tokens) OVER turns AS before_prompt,
        lag(response_tokens) OVER turns AS before_response
    FROM pieces AS p LEFT JOIN parked AS k USING (run, engine_request_id)
    LEFT JOIN unknown USING (run, engine_name)
    WINDOW turns AS (PARTITION BY request_id, run, step, name, validate ORDER BY begin_us)
), parts AS MATERIALIZED (
    SELECT *, engine_us - held_us - queue_us - prefill_us AS decoding_us,
        -- Without times of the engine, the batch is that of all of the call.
        coalesce(decoding_us, engine_us - held_us) AS active_us,
        -- The first token is prefill's, where that is known.
        CASE WHEN prefill_us IS NULL THEN response_tokens ELSE greatest(response_tokens - 1, 0) END
            AS tokens,
        CASE WHEN attempt > 0 OR before_prompt IS NULL THEN 0
            -- Engines cache whole blocks of tokens.
            WHEN cached_tokens < greatest(before_prompt / 2, 0.9 * before_prompt - 64)
            THEN least(prompt_tokens, before_prompt + coalesce(before_response, 0)) - cached_tokens
            WHEN cached_tokens IS NOT NULL THEN 0 END AS lost_tokens
    FROM known
), others AS (
    -- How long the other calls of the replica took per token while a retracted one was there.
    SELECT r.number, sum(o.decoding_us / o.tokens * (least(r.engine_end_us, o.engine_end_us)
            - greatest(r.engine_end_us - r.decoding_us, o.engine_end_us - o.decoding_us)))
        / sum(least(r.engine_end_us, o.engine_end_us)
            - greatest(r.engine_end_us - r.decoding_us, o.engine_end_us - o.decoding_us)) AS token_us
    FROM (SELECT * FROM parts WHERE retractions > 0) AS r JOIN parts AS o
        ON o.run = r.run AND o.engine_name = r.engine_name
        AND o.step IS NOT DISTINCT FROM r.step
        AND o.engine_end_us - o.decoding_us < r.engine_end_us
        AND o.engine_end_us > r.engine_end_us - r.decoding_us
    WHERE coalesce(o.retractions, 0) = 0 AND o.tokens > 0 AND o.decoding_us > 0
    GROUP BY r.number
), engines AS MATERIALIZED (
    -- Numbers are sorted in half the time of names.
    SELECT run, name, row_number() OVER () AS engine FROM (SELECT DISTINCT run, name FROM engine_requests)
), running AS MATERIALIZED (
    SELECT engine,
        least(begin_us + coalesce(queue_us, 0) + coalesce(parked_us, 0), end_us) AS from_us, end_us,
        least(from_us + coalesce(prefill_us, 0), end_us) AS first_us,
        (coalesce(prompt_tokens, 0) + coalesce(response_tokens, 0) // 2)::HUGEINT AS tokens
    FROM engine_requests JOIN engines USING (run, name) LEFT JOIN parked USING (run, engine_request_id)
    WHERE duration_us IS NOT NULL
), apart AS (
    SELECT *, coalesce(from_us > max(first_us) OVER (PARTITION BY engine ORDER BY from_us
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true)::INTEGER AS is_apart
    FROM running WHERE first_us > from_us
), prefills AS (
    -- In which an engine prefills without a break.
    SELECT engine, min(from_us) AS from_us, max(first_us) AS until_us FROM (
        SELECT *, sum(is_apart) OVER (PARTITION BY engine ORDER BY from_us) AS number FROM apart
    ) GROUP BY engine, number
), moments AS (
    SELECT NULL AS number, engine, unnest([from_us, end_us]) AS at_us, unnest([1, -1]) AS calls,
        unnest([tokens, -tokens]) AS tokens, 0 AS prefills FROM running
    UNION ALL
    SELECT NULL, engine, unnest([from_us, until_us]), 0, 0, unnest([1, -1]) FROM prefills
    UNION ALL
    SELECT number, engine, unnest([engine_end_us - active_us, engine_end_us]), 0, 0, 0
    FROM parts AS p LEFT JOIN engines AS e ON e.run = p.run AND e.name = p.engine_name WHERE active_us > 0
), areas AS (
    -- Since the first request: running requests, their tokens, and whether one is in prefill, times time.
    SELECT number,
        (at_us * sum(calls) OVER moments - sum(calls * at_us) OVER moments)::DOUBLE AS calls,
        (at_us * sum(tokens) OVER moments - sum(tokens * at_us) OVER moments)::DOUBLE AS tokens,
        (at_us * sum(prefills) OVER moments - sum(prefills * at_us) OVER moments)::DOUBLE AS prefills
    FROM moments
    WINDOW moments AS (PARTITION BY engine ORDER BY at_us
        ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), batches AS (
    SELECT number, max(calls) - min(calls) AS calls, max(tokens) - min(tokens) AS tokens,
        max(prefills) - min(prefills) AS prefills
    FROM areas WHERE number IS NOT NULL GROUP BY number
)
SELECT p.run, p.step, p.name, p.validate, p.request_id, p.turn, p.attempt, p.engine_request_id,
    p.engine_name, p.begin_us, p.gap_us + p.duration_us AS call_us,
    CASE WHEN p.served THEN p.duration_us - p.engine_us END AS outside_us,
    least(p.engine_begin_us + p.held_us, p.engine_end_us) AS queue_from_us, p.queue_us,
    CASE WHEN p.pauses_unknown IS NULL THEN p.gap_us + p.held_us END AS parked_us,
    CASE WHEN p.attempt > 0 AND p.prefill_us IS NOT NULL THEN 0
        ELSE p.prefill_us - coalesce(cold_us, 0) END AS prefill_us,
    cold_us, p.decoding_us - retracted_us AS decode_us,
    retracted_us + CASE WHEN p.attempt > 0 THEN p.prefill_us ELSE 0 END AS recomputed_us,
    CASE WHEN p.decoding_us IS NOT NULL THEN 0 WHEN p.served
        THEN p.engine_us - p.held_us - coalesce(p.queue_us, 0) - coalesce(p.prefill_us, 0)
        ELSE p.gap_us + p.engine_us END AS undivided_us,
    p.tokens AS decoded_tokens, CASE WHEN p.served THEN coalesce(p.retractions, 0) END AS retractions,
    CASE WHEN p.prompt_tokens > p.cached_tokens OR p.lost_tokens IS NULL THEN p.lost_tokens
        ELSE 0 END AS lost_tokens,
    p.engine_name <> p.before_name AS moved,
    b.calls / p.active_us AS batch, b.tokens / p.active_us AS batch_tokens, b.prefills AS others_prefill_us,
    p.sampled
FROM (
    SELECT p.*,
        CASE WHEN lost_tokens > 0 AND prompt_tokens > cached_tokens
            THEN prefill_us * lost_tokens / (prompt_tokens - cached_tokens)
            WHEN lost_tokens IS NOT NULL AND prefill_us IS NOT NULL THEN 0 END AS cold_us,
        CASE WHEN decoding_us IS NOT NULL THEN coalesce(CASE WHEN retractions > 0
            THEN greatest(p.decoding_us - p.tokens * o.token_us, 0) END, 0) END AS retracted_us
    FROM parts AS p LEFT JOIN others AS o USING (number)
) AS p
LEFT JOIN batches AS b USING (number);
