-- The devices that a process of each host sampled, as its header lists them; and who uses them, by UUID,
-- PCI bus, or number on the host.
CREATE VIEW devices AS
WITH sampled AS (
    SELECT run, host, unnest(from_json(header->'device_sampling'->'devices', '["JSON"]')) AS about,
        number_of(header->'device_sampling', 'interval_s') AS interval_s
    FROM processes WHERE (header->'device_sampling') IS NOT NULL
), known AS (
    SELECT run, host, integer_of(about, 'device') AS device, any_value(about->>'uuid') AS uuid,
        any_value(about->>'bus_id') AS bus_id,
        any_value(integer_of(about, 'total_bytes')) AS total_bytes,
        any_value(integer_of(about, 'power_limit_w')) AS power_limit_w,
        max(micros(interval_s)) AS interval_us
    FROM sampled GROUP BY ALL
), used AS (
    SELECT run, host, name, unnest(from_json(header->'devices', '["JSON"]')) AS about
    FROM processes WHERE (header->'devices') IS NOT NULL
), paired AS (
    SELECT k.run, k.host, k.device, string_agg(u.name, ', ' ORDER BY u.name) AS users
    FROM known AS k JOIN used AS u ON u.run = k.run AND u.host = k.host
        AND ((u.about->>'uuid') = k.uuid OR (u.about->>'bus_id') = k.bus_id
            OR integer_of(u.about, 'device') = k.device)
    GROUP BY ALL
)
SELECT k.*, p.users, p.users IS NOT NULL
    OR NOT EXISTS (FROM paired AS o WHERE o.run = k.run AND o.host = k.host) AS of_run
FROM known AS k LEFT JOIN paired AS p USING (run, host, device)
WHERE device IS NOT NULL;

-- A reading stands for the interval before it, which its library looks back on, and for what follows
-- while it did not change: at most ten seconds, then there is a line anyway.
CREATE VIEW device_readings AS
WITH readings AS (
    SELECT e.run, e.step, e.name, p.host, integer_of(rest, 'device') AS device, e.end_us AS at_us,
        integer_of(rest, 'utilization') AS utilization,
        integer_of(rest, 'memory_utilization') AS memory_utilization,
        integer_of(rest, 'used_bytes') AS used_bytes, integer_of(rest, 'power_w') AS power_w,
        integer_of(rest, 'sm_mhz') AS sm_mhz,
        integer_of(rest, 'memory_mhz') AS memory_mhz,
        integer_of(rest, 'temperature_c') AS temperature_c,
        array_to_string(try_cast(rest->'slowed_by' AS VARCHAR[]), ', ') AS slowed_by,
        micros(number_of(rest, 'gap_s')) AS gap_us
    FROM event_fields AS e JOIN processes AS p USING (run, name)
    WHERE e.event = 'device' AND e.family = 'devices'
), begun AS (
    SELECT r.*, greatest(r.at_us - coalesce(d.interval_us, 1_000_000), coalesce(
        lag(r.at_us) OVER ordered, r.at_us - coalesce(d.interval_us, 1_000_000))) AS begin_us
    FROM readings AS r LEFT JOIN devices AS d USING (run, host, device)
    WHERE r.device IS NOT NULL AND coalesce(d.of_run, true)
    WINDOW ordered AS (PARTITION BY r.run, r.host, r.device ORDER BY r.at_us)
)
SELECT * EXCLUDE (gap_us), CASE WHEN lead(at_us) OVER ordered - at_us <= 15_000_000
    THEN greatest(at_us, coalesce(lead(at_us - gap_us) OVER ordered, lead(begin_us) OVER ordered))
    ELSE at_us END AS end_us
FROM begun
WINDOW ordered AS (PARTITION BY run, host, device ORDER BY at_us);
