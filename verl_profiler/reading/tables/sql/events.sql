CREATE TABLE event_counts AS
SELECT run, step, role, family, event, count(*) AS events, count(request_id) AS of_requests,
    min(begin_us) AS begin_us, max(end_us) AS end_us
FROM event_fields GROUP BY run, step, role, family, event;
