CREATE TABLE transfers AS
SELECT e.run, step, name, validate, request_id, role, event, op, partition, status,
    begin_us, end_us, duration_us, size_bytes, rows, e.func,
    nullif(e.trace_id, 'N/A') AS trace_id, e.call,
    coalesce(try_cast(greatest(e.sampled, 1) AS INTEGER), 1) AS sampled
FROM event_fields AS e
WHERE family = 'transfer_queue' AND NOT starts_with(event, 'tq_function');

CREATE TABLE tq_calls AS
SELECT run, step, name, validate, request_id, role, e.func,
    nullif(e.trace_id, 'N/A') AS trace_id, e.call,
    coalesce(try_cast(greatest(e.sampled, 1) AS INTEGER), 1) AS sampled,
    'events' AS source,
    'FUNCTION_END' AS stage, status, duration_us IS NOT NULL AS finished, false AS estimated,
    begin_us, end_us, duration_us, nullif(micros(number_of(rest, 'get_s')), 0) AS get_us,
    nullif(micros(number_of(rest, 'compute_s')), 0) AS compute_us,
    nullif(micros(number_of(rest, 'put_s')), 0) AS put_us,
    coalesce(try_cast(rest->>'waits' AS BOOLEAN), false) AS waits, rows, rest AS more
FROM event_fields AS e WHERE family = 'transfer_queue' AND event = 'tq_function';

CREATE TABLE tq_stages AS
SELECT run, step, name, func, call,
    substr(event, length('tq_function_') + 1) AS stage, begin_us, end_us, duration_us
FROM event_fields WHERE family = 'transfer_queue' AND starts_with(event, 'tq_function_');
