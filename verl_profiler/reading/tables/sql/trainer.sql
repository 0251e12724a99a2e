-- Spans of one process and step lie 2^64 us from those of any other, so that which span contains which is
-- asked with inequalities alone: duckdb joins these by ranges.  With an equality it would hash, and hold
-- each span of a step against all others.
-- Of what may contain a span, the shortest does; of equally long ones, the deepest of the vocabulary.
-- A span begins and ends within what contains it; its duration is as recorded.
CREATE TABLE phases AS
WITH spans AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY run, step, name, duration_us DESC, depth, begin_us, event)
        AS number, *
    FROM (
        SELECT run, step, name, rank, event, validate, begin_us, end_us, duration_us,
            $depth AS depth
        FROM event_fields
        WHERE family = 'trainer' AND duration_us IS NOT NULL
    )
), intervals AS MATERIALIZED (
    SELECT place * 18446744073709551616::HUGEINT + begin_us AS begin_at,
        place * 18446744073709551616::HUGEINT + end_us AS end_at,
        any_value(begin_us) AS begin_us, any_value(end_us) AS end_us,
        min(number) AS first, max(number) AS last
    FROM (SELECT *, dense_rank() OVER (ORDER BY run, step, name) AS place FROM spans)
    GROUP BY place, begin_us, end_us, depth
), around AS (
    SELECT child.first AS number, max(parent.last) AS parent,
        max(parent.begin_us) AS from_us, min(parent.end_us) AS until_us
    FROM intervals AS child JOIN intervals AS parent
        ON within(child.begin_at, child.end_at, parent.begin_at, parent.end_at)
        AND parent.last < child.first
    GROUP BY child.first
), nested AS (
    SELECT s.number, coalesce(before, parent) AS parent, from_us, until_us
    FROM (
        SELECT number, lag(number) OVER alike AS before, first_value(number) OVER alike AS first
        FROM spans WINDOW alike AS (
            PARTITION BY run, step, name, begin_us, end_us, depth ORDER BY number)
    ) AS s LEFT JOIN around AS a ON a.number = s.first
), children AS (
    SELECT nested.parent AS number, sum(spans.duration_us) AS inside_us
    FROM nested JOIN spans USING (number) WHERE parent IS NOT NULL GROUP BY nested.parent
)
SELECT s.run, s.step, s.name, s.rank, s.event AS phase, p.event AS parent, s.validate,
    greatest(s.begin_us, n.from_us) AS begin_us, least(s.end_us, n.until_us) AS end_us,
    s.duration_us, try_cast(greatest(s.duration_us - coalesce(c.inside_us, 0), 0) AS BIGINT) AS self_us
FROM spans AS s
LEFT JOIN nested AS n ON n.number = s.number
LEFT JOIN spans AS p ON p.number = n.parent
LEFT JOIN children AS c ON c.number = s.number;

-- A step that has no `step` event (the trainer was not recorded, or was killed in it) gets the span
-- of its phases and requests, or of all its events, and is marked as not finished.  Stray events do
-- not make a step: an engine counts its step by the weights it has, and so is one ahead at times.
CREATE TABLE steps AS
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
), unrecorded AS (
    -- Runs whose processes have probes, but none of requests: the family rollout was off.
    SELECT run FROM processes WHERE json_type(header, '$$.probes.installed') = 'OBJECT'
        AND (header->>'$$.probes.installed') <> '{}'
    GROUP BY run HAVING bool_and(json_type(header, '$$.probes.installed.request') IS NULL)
)
SELECT run, step, r.step IS NOT NULL AS finished,
    coalesce(r.begin_us, e.begin_us) AS begin_us,
    coalesce(r.end_us, e.end_us) AS end_us,
    coalesce(r.end_us, e.end_us) - coalesce(r.begin_us, e.begin_us) AS duration_us,
    CASE WHEN r.step IS NOT NULL THEN coalesce(i.phases_us, 0) END AS phases_us,
    CASE WHEN r.step IS NOT NULL
        THEN r.end_us - r.begin_us - coalesce(i.phases_us, 0) END AS unaccounted_us,
    coalesce(c.requests, e.none) AS requests,
    coalesce(c.unfinished_requests, e.none) AS unfinished_requests,
    coalesce(c.validation_requests, e.none) AS validation_requests,
    c.generated_tokens, c.tool_tokens,
    CASE WHEN r.step IS NOT NULL THEN c.generated_tokens * 1e6 / nullif(r.end_us - r.begin_us, 0)
        END AS generated_tokens_per_s
FROM (SELECT *, CASE WHEN run NOT IN (SELECT run FROM unrecorded) THEN 0 END AS none FROM spanned)
    AS e
LEFT JOIN recorded AS r USING (run, step)
LEFT JOIN inside AS i USING (run, step)
LEFT JOIN counted AS c USING (run, step)
ORDER BY run, step;

-- The one definition of how long `gen` is: the sum of a step's `gen` in the process that has most of
-- it, which is the trainer where it was recorded.  First begin and last end are for positions only.
CREATE VIEW gens AS
SELECT run, step, name, in_step, gens, begin_us, end_us, duration_us
FROM (
    SELECT run, step, name, bool_or(parent = 'step') IS TRUE AS in_step, count(*) AS gens,
        min(begin_us) AS begin_us, max(end_us) AS end_us,
        try_cast(sum(duration_us) AS BIGINT) AS duration_us
    FROM phases WHERE phase = 'gen' AND NOT validate AND (parent IS NULL OR parent = 'step')
    GROUP BY run, step, name
)
QUALIFY row_number() OVER (PARTITION BY run, step
    ORDER BY in_step DESC, duration_us DESC, name) = 1;

-- When prompts that have an id were dispatched first: each by itself, or with others of its step by the trainer.
CREATE VIEW dispatched AS
WITH dispatches AS (
    SELECT run, step, uid, begin_us AS at_us FROM event_fields WHERE event = 'dispatch'
), begun AS (
    SELECT run, step, uid, min(begin_us) AS begin_us FROM requests
    WHERE uid IS NOT NULL AND NOT validate GROUP BY run, step, uid
)
SELECT run, uid, min(at_us) AS at_us FROM dispatches WHERE uid IS NOT NULL GROUP BY run, uid
UNION ALL
-- Clocks of hosts differ: a request may seem to begin before.
SELECT run, b.uid, coalesce(max(at_us) FILTER (at_us <= begin_us), min(at_us))
FROM begun AS b JOIN dispatches AS d USING (run, step)
WHERE run NOT IN (SELECT run FROM dispatches WHERE uid IS NOT NULL) GROUP BY run, b.uid;

-- A trainer that consumes what earlier steps dispatched, as its replay buffer noted; a synchronous one may
-- leave a few behind that it sampled beyond its need.  A rollouter is asynchronous in any case, and so are replicas with devices of their own,
-- also if nothing is dispatched ahead or all of that is dropped as stale.  Older runs lack the notes: there most requests end after the `gen` of
-- their own step.
CREATE TABLE asynchronous AS
WITH consumed AS (
    SELECT run, count(*) AS requests, count(*) FILTER (consumed_step > step) AS later
    FROM samples WHERE fate = 'consumed' GROUP BY run
), ended AS (
    SELECT run, count(*) AS requests,
        count(*) FILTER (r.end_us > g.end_us + $gen_tolerance_us) AS later
    FROM requests AS r JOIN gens AS g USING (run, step)
    WHERE r.finished AND NOT r.validate AND g.in_step AND run NOT IN (SELECT run FROM consumed)
    GROUP BY run
)
SELECT run, requests, later FROM (SELECT * FROM consumed UNION ALL SELECT * FROM ended)
WHERE later > 0.2 * requests OR run IN (SELECT run FROM processes WHERE role = 'rollouter') OR run IN (
    SELECT run FROM event_fields WHERE event = 'replica_pool' AND rest->>'pool' = 'standalone');

-- The request that each `gen` waited for last.
CREATE TABLE last_requests AS
WITH timed AS (
    SELECT run, step, name AS trainer, begin_us AS gen_begin_us, end_us AS gen_end_us
    FROM gens WHERE in_step AND $synchronous
), waits AS (
    SELECT g.run, g.step, max(p.end_us) AS wait_end_us FROM timed AS g JOIN phases AS p
        ON p.run = g.run AND p.step = g.step AND p.phase = 'sample_wait'
        AND within(p.begin_us, p.end_us, g.gen_begin_us, g.gen_end_us)
    GROUP BY g.run, g.step
), ends AS (
    SELECT g.run, g.step, max(r.end_us) AS end_us FROM timed AS g JOIN requests AS r
        ON r.run = g.run AND r.step = g.step AND r.finished AND NOT r.validate
        AND r.end_us <= g.gen_end_us + $gen_tolerance_us AND r.end_us > g.gen_begin_us
    GROUP BY g.run, g.step
)
SELECT g.*, w.wait_end_us, r.name, r.request_id, r.begin_us, r.end_us
FROM timed AS g JOIN ends AS e USING (run, step) LEFT JOIN waits AS w USING (run, step)
JOIN requests AS r ON r.run = g.run AND r.step = g.step AND r.finished AND NOT r.validate
    AND r.end_us = e.end_us
QUALIFY row_number() OVER (PARTITION BY g.run, g.step
    ORDER BY r.begin_us, r.name, r.request_id) = 1;

CREATE TABLE rank_spans AS
SELECT run, step, name, role, rank, event, family, status, begin_us, end_us, duration_us
FROM event_fields WHERE family IN ('workers', 'weights') AND duration_us IS NOT NULL;

-- What weight syncs move: the ranks that send and receive, their buckets, and what goes to engines.
-- Buckets are numbered in each process; the senders and receivers of a sync have the same ones.
CREATE TABLE weight_moves AS
SELECT run, step, name, role, rank, event, status, begin_us, end_us, duration_us,
    try_cast(rest->>'sender' AS BOOLEAN) AS sender, integer_of(rest, 'tensors') AS tensors,
    integer_of(rest, 'size_bytes') AS size_bytes, integer_of(rest, 'buckets') AS buckets,
    number_of(rest, 'transfer_s') AS transfer_s,
    CASE WHEN event = 'weight_bucket' THEN row_number() OVER (
        PARTITION BY run, step, name, event ORDER BY begin_us, end_us) END AS bucket
FROM event_fields
WHERE event IN ('weight_send', 'weight_receive', 'weight_transfer', 'weight_bucket', 'weight_load')
    AND family = 'weights' AND duration_us IS NOT NULL;
