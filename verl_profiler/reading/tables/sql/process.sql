CREATE TABLE lags AS
WITH stalls AS (
    SELECT run, step, name, role, loop, during, coalesce(rest->>'function',
            CASE WHEN rest->>'file' IS NOT NULL THEN during END) AS function,
        rest->>'innermost' AS innermost, rest->>'file' AS file,
        try_cast(integer_of(rest, 'line') AS INTEGER) AS line, tool, request_id, turn,
        nullif(micros(number_of(rest, 'begin_error_s')), 0) AS begin_error_us,
        begin_us, end_us, duration_us
    FROM event_fields WHERE family = 'event_loop' AND duration_us IS NOT NULL
), joined AS (
    -- Stalls that follow each other are one: what waits for the first waits for all of them.
    SELECT *, sum(apart::INTEGER) OVER (PARTITION BY run, name ORDER BY begin_us, end_us) AS place
    FROM (SELECT *, coalesce(begin_us > $stall_noticed_us
        + max(end_us) OVER (PARTITION BY run, name ORDER BY begin_us, end_us
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS apart FROM stalls)
), long AS (
    SELECT s.*, p.host FROM stalls AS s LEFT JOIN processes AS p ON p.run = s.run AND p.name = s.name
    -- No shorter one overlaps 80 % of half a second.
    WHERE s.duration_us >= 400000
), of_hosts AS (
    -- Of a stall of half a second or more, 80 % overlap stalls of three other processes of the host, in two roles:
    -- the machine was paused or overloaded.
    SELECT g.run, g.name, g.begin_us, g.end_us FROM long AS g JOIN long AS o ON o.run = g.run AND o.name <> g.name
        AND o.during IS NULL AND o.host IS NOT DISTINCT FROM g.host
        AND least(o.end_us, g.end_us) - greatest(o.begin_us, g.begin_us) >= 0.8 * g.duration_us
    WHERE g.duration_us >= 500000 GROUP BY ALL
    HAVING count(DISTINCT o.name) >= 3 AND count(DISTINCT o.role) >= 2
)
SELECT j.* EXCLUDE (apart, place), max(j.end_us) OVER (PARTITION BY j.run, j.name, place) AS until_us,
    h.run IS NOT NULL AS of_host
FROM joined AS j LEFT JOIN of_hosts AS h USING (run, name, begin_us, end_us);

CREATE VIEW costs AS
SELECT run, step, name, role, integer_of(rest, 'events') AS events,
    integer_of(rest, 'bytes') AS size_bytes,
    integer_of(rest, 'dropped') AS dropped, number_of(rest, 'wrapper_s') AS wrapper_s,
    number_of(rest, 'wrapper_cpu_s') AS wrapper_cpu_s,
    number_of(rest, 'writer_s') AS writer_s,
    number_of(rest, 'writer_cpu_s') AS writer_cpu_s
FROM event_fields WHERE family = 'profiler' AND event = 'profiler_cost';
