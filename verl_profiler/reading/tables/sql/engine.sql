CREATE VIEW engine_requests AS
SELECT e.run, e.step, e.name, p.replica, e.engine_request_id, e.request_id, e.validate, e.status,
    e.begin_us, e.end_us, e.duration_us,
    e.prompt_tokens, e.response_tokens, e.cached_tokens, e.finish_reason,
    micros(queue_s) AS queue_us,
    micros(prefill_s) AS prefill_us,
    micros(decode_s) AS decode_us,
    micros(e2e_s) AS e2e_us,
    e.weight_version,
    integer_of(rest, 'dp_rank') AS dp_rank,
    integer_of(rest, 'retractions') AS retractions,
    integer_of(rest, 'cached_host_tokens') AS cached_host_tokens,
    integer_of(rest, 'draft_tokens') AS draft_tokens,
    integer_of(rest, 'accepted_draft_tokens') AS accepted_draft_tokens
FROM event_fields AS e LEFT JOIN processes AS p USING (run, name)
WHERE e.event = 'engine_request' AND e.family = 'engine';

-- One engine request id may stand for several calls (verl's full_determinism passes the request's
-- own id every turn); then the server's interval that overlaps the client's most is its own.
CREATE TABLE engine_calls AS
WITH calls AS NOT MATERIALIZED (
    SELECT run, step, name, validate, request_id, turn, status, error, begin_us, end_us,
        duration_us, engine_request_id AS id, server, prompt_tokens, response_tokens, finish_reason
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
FROM joined;

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
