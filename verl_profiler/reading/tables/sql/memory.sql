CREATE TABLE memory AS
SELECT run, step, name, role, rank, end_us, rest->>'at' AS "at",
    integer_of(rest, 'allocated_bytes') AS allocated_bytes,
    integer_of(rest, 'reserved_bytes') AS reserved_bytes,
    integer_of(rest, 'used_bytes') AS used_bytes, integer_of(rest, 'total_bytes') AS total_bytes,
    integer_of(rest, 'rss_bytes') AS rss_bytes
FROM event_fields WHERE event = 'memory' AND family = 'memory';

-- A release or resume as it was recorded; and, for logs and processes without such events, as verl's
-- checkpoints after one show it: what the device holds then, against the checkpoint before.
CREATE TABLE memory_moves AS
WITH calls AS (
    SELECT run, step, name, role, rank, event, 'call' AS source, status, begin_us, end_us,
        duration_us, array_to_string(try_cast(rest->'tags' AS VARCHAR[]), ', ') AS tags,
        integer_of(rest, 'total_bytes') AS total_bytes,
        integer_of(rest, 'used_before_bytes') AS used_before_bytes,
        integer_of(rest, 'used_after_bytes') AS used_after_bytes,
        integer_of(rest, 'rss_before_bytes') AS rss_before_bytes,
        integer_of(rest, 'rss_after_bytes') AS rss_after_bytes,
        integer_of(rest, 'host_used_before_bytes') AS host_used_before_bytes,
        integer_of(rest, 'host_used_after_bytes') AS host_used_after_bytes
    FROM event_fields
    WHERE event IN ('memory_release', 'memory_resume') AND family = 'weights'
        AND duration_us IS NOT NULL
), checkpoints AS (
    SELECT *, lag(used_bytes) OVER ordered AS used_before_bytes,
        lag(end_us) OVER ordered AS begin_us
    FROM memory WHERE total_bytes > 1
    WINDOW ordered AS (PARTITION BY run, name ORDER BY end_us)
)
SELECT * FROM calls
UNION ALL BY NAME
SELECT run, step, name, role, rank,
    CASE WHEN "at" ILIKE 'after resume%' THEN 'memory_resume' ELSE 'memory_release' END AS event,
    'checkpoint' AS source,
    coalesce(nullif(regexp_extract("at", '(?i)^after resume (?:sglang )?(\w+)', 1), ''), 'all')
        AS tags,
    begin_us, end_us, total_bytes, used_before_bytes, used_bytes AS used_after_bytes
FROM checkpoints
WHERE used_before_bytes IS NOT NULL AND ("at" ILIKE 'after resume%'
    OR regexp_matches("at", '(?i)^after (sglang|vllm|rollout) (offload|sleep|release)'));

-- Every reading of memory, with the trainer's phase and step at that moment: engines count their
-- steps by the weights that they have.
CREATE TABLE memory_readings AS
WITH readings AS (
    SELECT run, step, name, role, rank, end_us AS at_us, 'checkpoint' AS source, "at",
        allocated_bytes, reserved_bytes, used_bytes, total_bytes, rss_bytes,
        NULL::BIGINT AS host_used_bytes
    FROM memory
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
    UNION ALL BY NAME
    SELECT r.run, r.step,
        format('device {}', r.device) || CASE WHEN d.hosts > 1 THEN ' on ' || r.host ELSE '' END AS name,
        'device' AS role, r.device AS rank, r.at_us, 'sample' AS source, 'sample' AS "at",
        r.used_bytes, d.total_bytes
    FROM device_readings AS r
    JOIN (
        SELECT o.*, h.hosts FROM devices AS o
        JOIN (SELECT run, count(DISTINCT host) AS hosts FROM devices GROUP BY run) AS h USING (run)
    ) AS d USING (run, host, device)
    WHERE r.used_bytes IS NOT NULL
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
    CASE WHEN r.total_bytes > 1 THEN r.used_bytes END) IS NOT NULL;
