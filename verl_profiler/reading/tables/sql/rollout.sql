-- `request_start` is written before verl has given the request its id; it is matched to its request
-- by sample and session, or stands for a request that never came so far.
CREATE TABLE requests AS
WITH children AS (
    SELECT run, step, name, validate, request_id,
        any_value(rank) AS rank,
        any_value(sample) AS sample,
        any_value(session) AS session,
        min(begin_us) AS begin_us,
        max(end_us) AS last_us,
        max(CASE WHEN event IN ('turn', 'engine_call') THEN turn END) + 1 AS turns_seen,
        count(given(event = 'engine_call', 1)) AS engine_calls,
        count(given(event = 'tool_call', 1)) AS tool_calls,
        count(given(event = 'tool_execution', 1)) AS tool_executions,
        sum(given(event = 'engine_call', duration_us)) AS engine_sum,
        sum(given(event = 'engine_call', response_tokens)) AS engine_tokens,
        coalesce(sum(given(event = 'tool_execution', duration_us)),
            sum(given(event = 'tool_call', duration_us))) AS tool_sum,
        sum(given(event = 'prompt_build', duration_us)) AS prompt_build_sum,
        sum(given(event = 'tool_parsing', duration_us)) AS tool_parsing_sum,
        sum(given(event = 'token_merge', duration_us)) AS token_merge_sum,
        max(given(event = 'postprocess', end_us))
            - min(given(event = 'postprocess', begin_us)) AS postprocess_sum,
        sum(given(event = 'reward', duration_us)) AS reward_sum,
        within(min(given(event = 'reward', begin_us)), max(given(event = 'reward', end_us)),
            min(given(event = 'postprocess', begin_us)), max(given(event = 'postprocess', end_us)))
            AS reward_inside,
        max(sampled) AS sampled,
        count(given(event <> 'request_start', 1)) AS details
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
        max(tool_tokens) AS tool_tokens, max(reward) AS reward,
        max(tool_calls) AS line_tool_calls, any_value(rest) AS rest
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
        e.response_tokens, e.generated_tokens, e.tool_tokens, e.reward, e.line_tool_calls, e.rest,
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
), summed AS (
    -- Where details are sampled, the request's own line has their sums.
    SELECT * REPLACE (
            coalesce(micros(number_of(of_line, 'engine')), engine_sum) AS engine_sum,
            coalesce(micros(number_of(of_line, 'tool')), tool_sum) AS tool_sum,
            coalesce(micros(number_of(of_line, 'prompt_build')), prompt_build_sum) AS prompt_build_sum,
            coalesce(micros(number_of(of_line, 'tool_parsing')), tool_parsing_sum) AS tool_parsing_sum,
            coalesce(micros(number_of(of_line, 'token_merge')), token_merge_sum) AS token_merge_sum,
            coalesce(micros(number_of(of_line, 'postprocess')), postprocess_sum) AS postprocess_sum,
            coalesce(micros(number_of(of_line, 'reward')), reward_sum) AS reward_sum,
            CASE WHEN of_line IS NULL THEN reward_inside END AS reward_inside,
            coalesce(line_tool_calls, tool_calls) AS tool_calls,
            coalesce(integer_of(rest, 'engine_calls'), engine_calls) AS engine_calls
        ), of_line IS NULL OR coalesce(details, 0) > 0 AS detailed
    FROM (SELECT *, rest->'components' AS of_line FROM every)
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
        -- Older runs lack both fields: what their generate calls returned is generated.
        coalesce(generated_tokens, try_cast(engine_tokens AS BIGINT)) AS generated,
        coalesce(engine_sum, CASE WHEN s.engine THEN 0 END) AS engine_us,
        coalesce(tool_sum, CASE WHEN s.tool THEN 0 END) AS tool_us,
        coalesce(prompt_build_sum, CASE WHEN s.prompt_build THEN 0 END) AS prompt_build_us,
        coalesce(tool_parsing_sum, CASE WHEN s.tool_parsing THEN 0 END) AS tool_parsing_us,
        coalesce(token_merge_sum, CASE WHEN s.token_merge THEN 0 END) AS token_merge_us,
        CASE WHEN s.postprocess OR postprocess_sum IS NOT NULL THEN postprocess_own END
            AS postprocess_us,
        coalesce(reward_sum, CASE WHEN s.reward THEN 0 END) AS reward_us,
        coalesce(engine_sum, 0) + coalesce(tool_sum, 0) + coalesce(prompt_build_sum, 0)
            + coalesce(tool_parsing_sum, 0) + coalesce(token_merge_sum, 0) + postprocess_own
            + coalesce(reward_sum, 0) AS known_us
    FROM summed AS g LEFT JOIN seen AS s USING (run)
)
SELECT run, step, name, validate, request_id, rank, sample, session,
    agent, coalesce(uid, start_uid) AS uid,
    coalesce(status, CASE WHEN endings = 0 THEN 'unfinished' END) AS status,
    error, finished, endings, begin_us,
    CASE WHEN finished THEN end_us END AS end_us,
    duration_us, last_us,
    coalesce(turns, turns_seen) AS turns,
    CASE WHEN (tools_seen OR tool_calls > 0)
            AND (coalesce(tool_calls, 0) > 0 OR coalesce(tool_executions, 0) = 0)
        THEN coalesce(tool_calls, 0) END AS tool_calls,
    coalesce(prompt_tokens, start_prompt_tokens) AS prompt_tokens, response_tokens,
    generated AS generated_tokens,
    coalesce(tool_tokens, CASE WHEN response_tokens >= generated
        THEN response_tokens - generated END) AS tool_tokens,
    reward,
    prompt_build_us, engine_us, tool_us, tool_parsing_us, token_merge_us, postprocess_us, reward_us,
    greatest(duration_us - known_us, 0) AS other_us,
    CASE WHEN duration_us IS NOT NULL THEN greatest(known_us - duration_us, 0) END AS overlap_us,
    engine_calls, detailed,
    CASE WHEN detailed THEN greatest(coalesce(sampled, 1), 1) END AS sampled
FROM parts;

CREATE TABLE turns AS
WITH chosen AS (
    SELECT run, step, name, validate, request_id, turn, event, status, begin_us, end_us,
        duration_us, CASE WHEN event = 'engine_call' THEN response_tokens END AS response_tokens,
        CASE WHEN event = 'engine_call' THEN prompt_tokens END AS prompt_tokens, sampled
    FROM event_fields
    WHERE turn IS NOT NULL AND family = 'rollout' AND event IN
        ('turn', 'engine_call', 'tool_call', 'tool_execution', 'tool_parsing', 'token_merge')
), grouped AS (
    SELECT run, step, name, validate, request_id, turn,
        bool_or(event = 'turn' AND coalesce(status, '') <> 'unfinished') AS finished,
        min(begin_us) AS begin_us,
        max(end_us) AS end_us,
        count(given(event = 'engine_call', 1)) AS engine_calls,
        count(given(event = 'tool_call', 1)) AS tool_calls,
        min(prompt_tokens) AS prompt_tokens,
        try_cast(sum(response_tokens) AS BIGINT) AS response_tokens,
        try_cast(coalesce(sum(given(event = 'engine_call', duration_us)), 0) AS BIGINT) AS engine_us,
        try_cast(coalesce(sum(given(event = 'tool_execution', duration_us)),
            sum(given(event = 'tool_call', duration_us)), 0) AS BIGINT) AS tool_us,
        try_cast(coalesce(sum(given(event = 'tool_parsing', duration_us)), 0) AS BIGINT)
            AS tool_parsing_us,
        try_cast(coalesce(sum(given(event = 'token_merge', duration_us)), 0) AS BIGINT)
            AS token_merge_us,
        greatest(coalesce(max(sampled), 1), 1) AS sampled
    FROM chosen WHERE request_id IS NOT NULL
    GROUP BY run, step, name, validate, request_id, turn
)
SELECT run, step, name, validate, request_id, turn, finished, begin_us,
    CASE WHEN finished THEN end_us END AS end_us,
    CASE WHEN finished THEN end_us - begin_us END AS duration_us,
    engine_calls, tool_calls, prompt_tokens, response_tokens,
    engine_us, tool_us, tool_parsing_us, token_merge_us,
    CASE WHEN finished THEN greatest(end_us - begin_us
        - engine_us - tool_us - tool_parsing_us - token_merge_us, 0) END AS other_us, sampled
FROM grouped
UNION ALL BY NAME
SELECT run, step, name, validate, request_id, turn, true AS finished, begin_us, end_us,
    duration_us, 1 AS sampled
FROM chosen WHERE request_id IS NULL AND event = 'turn';

CREATE TABLE tool_calls AS
WITH calls AS (
    SELECT row_number() OVER () AS number, run, step, name, validate, request_id, turn, tool, status,
        error, begin_us, end_us, duration_us, greatest(coalesce(sampled, 1), 1) AS sampled
    FROM event_fields WHERE event = 'tool_call' AND family = 'rollout'
), stalled AS (
    -- Stalls of the same loop that other requests caused, up to the end of the call.
    SELECT c.number, sum(least(c.end_us, g.end_us) - greatest(c.begin_us, g.begin_us)) AS stalled_us
    FROM calls AS c JOIN lags AS g ON g.run = c.run AND g.name = c.name AND g.request_id <> c.request_id
        AND g.begin_us < c.end_us AND g.end_us > c.begin_us AND c.end_us <= g.until_us + $stall_noticed_us
    GROUP BY c.number
)
SELECT c.* EXCLUDE (number), least(coalesce(s.stalled_us, 0), duration_us)::BIGINT AS stalled_us
FROM calls AS c LEFT JOIN stalled AS s USING (number);

-- Reward workers do not know whether a request is of validation; it is looked up by `uid`.
CREATE TABLE reward_scores AS
WITH origins AS (
    SELECT run, uid, bool_and(validate) AS validate FROM requests
    WHERE uid IS NOT NULL GROUP BY run, uid
)
SELECT e.run, e.step, e.name, e.request_id, e.uid, e.session,
    coalesce(o.validate, e.validate) AS validate,
    e.status, e.begin_us, e.end_us, e.duration_us, e.score,
    micros(number_of(rest, 'wait_s')) AS wait_us,
    micros(number_of(rest, 'compute_s')) AS compute_us
FROM event_fields AS e LEFT JOIN origins AS o ON o.run = e.run AND o.uid = e.uid
WHERE e.family = 'reward' AND e.event = 'reward_score';

-- What became of each sample: the step that consumed it, or why it was dropped, then of all of its prompt.
CREATE TABLE samples AS
SELECT run, step, uid, session,
    CASE event WHEN 'sample_consumed' THEN 'consumed' ELSE 'dropped' END AS fate,
    max(consumed_step) AS consumed_step, max(rest->>'reason') AS reason,
    min(min_weight_version) AS min_weight_version, max(max_weight_version) AS max_weight_version,
    max(trainer_version) AS trainer_version, min(begin_us) AS at_us
FROM event_fields WHERE event IN ('sample_consumed', 'sample_dropped') AND uid IS NOT NULL
GROUP BY run, step, uid, session, fate;

-- The load balancer's choices, as the client sees them: it follows a request to its replica, or chooses
-- anew.  The balancer's own line lies within the client's call; with sampled details it is there only of a
-- replica that was not the least loaded.  It names the replicas only where they changed.
CREATE VIEW server_routes AS
WITH routes AS (
    SELECT run, request_id, server, end_us AS at_us, integer_of(rest, 'in_flight') AS in_flight,
        coalesce(integer_of(rest, 'least_in_flight'), integer_of(rest, 'in_flight')) AS least_in_flight, rest->>'reason' AS reason,
        try_cast(rest->'loads' AS BIGINT[]) AS counts,
        try_cast(last_value(rest->'servers' IGNORE NULLS) OVER (
            PARTITION BY run, name ORDER BY end_us) AS VARCHAR[]) AS servers
    FROM event_fields WHERE event = 'server_route' AND request_id IS NOT NULL
)
SELECT a.run, a.step, a.name, a.validate, a.request_id, a.turn, a.server, a.begin_us AS at_us,
    coalesce(a.server = lag(a.server) OVER (
        PARTITION BY a.run, a.step, a.validate, a.request_id ORDER BY a.begin_us), false) AS sticky,
    r.reason, r.in_flight, r.least_in_flight, CASE WHEN len(r.counts) = len(r.servers)
        THEN to_json(map(r.servers, r.counts)) END AS loads,
    greatest(coalesce(a.sampled, 1), 1) AS sampled
FROM (SELECT * FROM event_fields WHERE event = 'server_acquire' AND server IS NOT NULL) AS a
LEFT JOIN routes AS r ON r.run = a.run AND r.request_id = a.request_id AND r.server = a.server
    -- Clocks of two hosts differ a little; the calls of a request are further apart.
    AND r.at_us BETWEEN a.begin_us - 2000 AND a.end_us + 2000;
