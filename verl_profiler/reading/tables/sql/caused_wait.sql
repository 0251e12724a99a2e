-- What a request's time after the step's first begin consists of, and the median request's.  Decoding
-- is tokens times time per token; each of the two is charged with what it adds.
CREATE TABLE request_caused_wait AS
WITH calls AS (
    SELECT run, step, name, request_id,
        sum(CASE WHEN undivided_us = 0 THEN outside_us + queue_us END) AS queued_us,
        sum(parked_us) AS parked_us, sum(CASE WHEN undivided_us = 0 THEN prefill_us END) AS prefill_us,
        sum(CASE WHEN undivided_us = 0 THEN coalesce(cold_us, 0) END) AS cold_us,
        sum(recomputed_us) AS recomputed_us, sum(decode_us) AS decode_us,
        sum(CASE WHEN undivided_us <> 0 THEN call_us - coalesce(parked_us, 0) ELSE 0 END) AS undivided_us,
        greatest(sum(decoded_tokens) FILTER (decode_us IS NOT NULL), 1) AS tokens
    FROM engine_call_times WHERE NOT validate GROUP BY ALL
), stalls AS (
    SELECT run, step, name, request_id, sum(stalled_us) AS stalled_us
    FROM tool_calls WHERE stalled_us > 0 AND NOT validate GROUP BY ALL
), begins AS (
    SELECT run, step, min(begin_us) AS first_us
    FROM requests WHERE finished AND NOT validate AND $synchronous GROUP BY run, step
), parts AS MATERIALIZED (
    SELECT r.run, r.step, r.name, r.request_id, r.sample, r.end_us,
        r.end_us - first_us AS whole_us, r.begin_us - first_us AS late_us,
        -- A request without calls spent nothing on them.
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.queued_us END AS queued_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.parked_us END AS parked_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.cold_us END AS cold_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.recomputed_us END AS recomputed_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.prefill_us END AS prefill_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.decode_us END AS decode_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 0 ELSE c.undivided_us END AS undivided_us,
        CASE WHEN r.detailed AND c.undivided_us IS NULL THEN 1 ELSE c.tokens END AS tokens,
        CASE WHEN r.tool_us IS NOT NULL THEN greatest(r.tool_us - coalesce(g.stalled_us, 0), 0) END
            AS tool_us, r.sampled
    FROM requests AS r JOIN begins USING (run, step)
    LEFT JOIN calls AS c USING (run, step, name, request_id)
    LEFT JOIN stalls AS g USING (run, step, name, request_id)
    WHERE r.finished AND NOT r.validate
), typical AS (
    -- Of sampled details each counts as often as it stands for others.
    SELECT * FROM (
        SELECT run, step, median(whole_us) AS whole_us, median(late_us) AS late_us,
            median(tool_us) AS tool_us
        FROM parts GROUP BY run, step
    ) LEFT JOIN (
        SELECT run, step, median(queued_us) AS queued_us, median(parked_us) AS parked_us,
            median(cold_us) AS cold_us, median(recomputed_us) AS recomputed_us,
            median(prefill_us) AS prefill_us, median(undivided_us) AS undivided_us,
            median(tokens) AS tokens,
            median(decode_us / tokens) AS token_us
        FROM (SELECT *, unnest(range(sampled)) AS copy FROM parts) GROUP BY run, step
    ) USING (run, step)
), excess AS (
    SELECT p.run, p.step, p.name, p.request_id, p.sample, p.end_us,
        p.whole_us - t.whole_us AS behind_us, p.late_us - t.late_us AS late_us,
        p.queued_us - t.queued_us AS queued_us, p.parked_us - t.parked_us AS parked_us,
        p.cold_us - t.cold_us AS cold_us, p.recomputed_us - t.recomputed_us AS recomputed_us,
        p.prefill_us - t.prefill_us AS prefill_us, p.undivided_us - t.undivided_us AS undivided_us,
        (p.tokens - t.tokens) * t.token_us AS long_us,
        p.tokens * (p.decode_us / p.tokens - t.token_us) AS slow_us,
        p.tool_us - t.tool_us AS tool_us, p.sampled
    FROM parts AS p JOIN typical AS t USING (run, step)
), reasons AS (
    SELECT *, behind_us - late_us - coalesce(tool_us, 0)
        - coalesce(queued_us, 0) - coalesce(parked_us, 0) - coalesce(cold_us, 0) - coalesce(prefill_us, 0)
        - coalesce(recomputed_us, 0) - coalesce(undivided_us, 0) - coalesce(long_us, 0)
        - coalesce(slow_us, 0) AS other_us
    FROM excess
), ends AS (
    SELECT *, coalesce(request_id, name) AS who FROM reasons
)
SELECT run, step, name, request_id, sample, place, many, caused_wait_us, behind_us, late_us, queued_us,
    parked_us, cold_us, prefill_us, recomputed_us, undivided_us, long_us, slow_us, tool_us, other_us,
    CASE greatest(late_us, queued_us, parked_us, cold_us, prefill_us, recomputed_us, undivided_us,
            long_us, slow_us, tool_us, other_us)
        WHEN late_us THEN 'late' WHEN queued_us THEN 'queued' WHEN parked_us THEN 'parked'
        WHEN cold_us THEN 'cold' WHEN prefill_us THEN 'prefill' WHEN recomputed_us THEN 'recomputed'
        WHEN undivided_us THEN 'undivided' WHEN long_us THEN 'long'
        WHEN slow_us THEN 'slow' WHEN tool_us THEN 'tool' ELSE 'other' END AS because, sampled
FROM ($caused_wait);

-- The wait time caused by a request, as far as tools made it late, goes to its tools by the time of
-- their calls.
CREATE TABLE tool_caused_wait AS
WITH calls AS (
    SELECT b.run, b.step, b.name, b.request_id, t.tool,
        t.duration_us - coalesce(t.stalled_us, 0) AS duration_us, b.place = b.many AS last,
        b.caused_wait_us * least(b.tool_us / b.behind_us, 1) * t.sampled AS tool_caused_wait_us
    FROM request_caused_wait AS b JOIN tool_calls AS t USING (run, step, name, request_id)
    WHERE b.tool_us > 0 AND b.behind_us > 0 AND NOT t.validate AND t.duration_us IS NOT NULL
), sums AS (
    SELECT run, step, name, request_id, try_cast(sum(duration_us) AS BIGINT) AS all_us
    FROM calls GROUP BY run, step, name, request_id
)
SELECT c.run, c.step, c.tool, bool_or(c.last) AS last,
    sum(c.tool_caused_wait_us * c.duration_us / nullif(all_us, 0)) AS caused_wait_us
FROM calls AS c JOIN sums USING (run, step, name, request_id)
GROUP BY c.run, c.step, c.tool;
