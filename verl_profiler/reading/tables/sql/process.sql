CREATE TABLE lags AS
SELECT run, step, name, role, loop, during, coalesce(rest->>'function',
        CASE WHEN rest->>'file' IS NOT NULL THEN during END) AS function,
    rest->>'innermost' AS innermost, rest->>'file' AS file,
    try_cast(integer_of(rest, 'line') AS INTEGER) AS line, tool, request_id, turn,
    nullif(micros(number_of(rest, 'begin_error_s')), 0) AS begin_error_us,
    begin_us, end_us, duration_us
FROM event_fields WHERE family = 'event_loop' AND duration_us IS NOT NULL;

CREATE VIEW costs AS
SELECT run, step, name, role, integer_of(rest, 'events') AS events,
    integer_of(rest, 'bytes') AS size_bytes,
    integer_of(rest, 'dropped') AS dropped, number_of(rest, 'wrapper_s') AS wrapper_s,
    number_of(rest, 'wrapper_cpu_s') AS wrapper_cpu_s,
    number_of(rest, 'writer_s') AS writer_s,
    number_of(rest, 'writer_cpu_s') AS writer_cpu_s
FROM event_fields WHERE family = 'profiler' AND event = 'profiler_cost';
