"""What the devices did in each phase, from samples of their drivers.

A driver's utilization is the share of its last sample period in which any kernel ran: a device counts as
busy while one small kernel runs, or NCCL waits for another rank.  Idle time is thus a lower bound.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps, summed
from verl_profiler.reading.tables.tables import Tables

# The part of a step in no phase.
UNACCOUNTED = "unaccounted"

# Readings and phases are joined by pieces of time: a join by overlap alone compares each with each.  A reading
# stands for up to 15 s.
_PIECE_US = 20_000_000

# Time without overlaps, each moment in the phase of the trainer that began last (one inside another is no
# phase of its own here); what of a step is in no phase is called unaccounted.
_INTERVALS = f"""
sampled AS MATERIALIZED (
    SELECT DISTINCT run FROM device_readings
), top AS MATERIALIZED (
    SELECT run, step, phase, begin_us, end_us FROM phases
    WHERE run IN (FROM sampled) AND (parent = 'step' OR (parent IS NULL AND phase <> 'step'))
), whole AS MATERIALIZED (
    SELECT run, step, begin_us, end_us FROM steps WHERE finished AND run IN (FROM sampled)
), marks AS (
    SELECT run, begin_us AS at_us FROM top UNION SELECT run, end_us FROM top
    UNION SELECT run, begin_us FROM whole UNION SELECT run, end_us FROM whole
), pieces AS (
    SELECT run, at_us AS begin_us, lead(at_us) OVER (PARTITION BY run ORDER BY at_us) AS end_us
    FROM marks
), latest AS MATERIALIZED (
    SELECT p.run, p.begin_us, p.end_us, t.step, t.phase, t.end_us >= p.end_us AS inside
    FROM pieces AS p ASOF LEFT JOIN top AS t ON t.run = p.run AND t.begin_us <= p.begin_us
    WHERE p.end_us IS NOT NULL
), intervals AS MATERIALIZED (
    SELECT run, step, phase, begin_us, end_us FROM latest WHERE inside
    UNION ALL
    SELECT l.run, w.step, '{UNACCOUNTED}', l.begin_us, l.end_us
    FROM (SELECT run, begin_us, end_us FROM latest WHERE inside IS NOT TRUE) AS l
    ASOF JOIN whole AS w ON w.run = l.run AND w.begin_us <= l.begin_us
    WHERE w.end_us >= l.end_us
)
"""


def device_use(tables: Tables, steps: Steps = None) -> Rows:
    """Integrate the readings of each device over each phase of each step.

    Idle time is (1 - utilization) × time.  Time without readings is not covered, and neither idle nor
    busy.  Energy is power × time.

    Returns:
        Table `device_use`: one row per run, step, phase, host and device, in the order of a step.
    """
    return tables.rows(
        f"""
        WITH {_INTERVALS}, placed_intervals AS (
            SELECT *, unnest(range(begin_us // {_PIECE_US}, end_us // {_PIECE_US} + 1)) AS piece
            FROM intervals
        ), placed_readings AS (
            SELECT *, unnest(range(begin_us // {_PIECE_US}, end_us // {_PIECE_US} + 1)) AS piece
            FROM (
                -- A reading without reasons is a device's that supports them, or that does not.
                SELECT *, CASE WHEN bool_or(slowed_by IS NOT NULL) OVER (PARTITION BY run, host, device)
                    THEN coalesce(slowed_by, '') <> '' END AS slowed
                FROM device_readings
            )
        ), parts AS (
            SELECT i.run, i.step, i.phase, r.host, r.device, i.begin_us AS phase_us,
                least(i.end_us, r.end_us) - greatest(i.begin_us, r.begin_us) AS us,
                r.utilization, r.power_w, r.sm_mhz, r.used_bytes, r.slowed
            FROM placed_readings AS r JOIN placed_intervals AS i
                ON i.run = r.run AND i.piece = r.piece
                AND i.begin_us < r.end_us AND i.end_us > r.begin_us
            -- Where they share several pieces of time, the first counts.
            WHERE r.piece = greatest(i.begin_us, r.begin_us) // {_PIECE_US}
                AND {in_steps(steps, "i.step")}
        ), summed AS (
            SELECT run, step, phase, host, device, min(phase_us) AS phase_us,
                sum(us) / 1e6 AS covered_s,
                sum(utilization * us) / nullif(sum(us) FILTER (utilization IS NOT NULL), 0) / 100
                    AS busy_share,
                sum((100 - utilization) * us) / 1e8 AS idle_s,
                sum(power_w * us) / 1e6 AS energy_j,
                sum(power_w * us) / nullif(sum(us) FILTER (power_w IS NOT NULL), 0) AS power_w,
                sum(sm_mhz * us) / nullif(sum(us) FILTER (sm_mhz IS NOT NULL), 0) AS sm_mhz,
                max(used_bytes) AS max_used_bytes,
                sum(us * slowed::INTEGER) / nullif(sum(us) FILTER (slowed IS NOT NULL), 0)
                    AS slowed_share
            FROM parts GROUP BY run, step, phase, host, device
        )
        SELECT s.* EXCLUDE (phase_us), d.users FROM summed AS s
        LEFT JOIN devices AS d USING (run, host, device)
        ORDER BY run, step, phase_us, phase, host, device
        """
    )


def device_times(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the time of workers' calls on the host with that on the device.

    The device's time is that between two CUDA events in the stream, gaps between kernels included.

    Returns:
        Table `device_times`: one row per run, step, process and event.
    """
    return tables.rows(
        f"""
        WITH timed AS (
            SELECT run, step, name, of AS event, number_of(rest, 'host_s') AS host_s,
                number_of(rest, 'device_s') AS device_s
            FROM event_fields WHERE event = 'device_time' AND family = 'workers'
        )
        SELECT run, step, name, event, count(*) AS calls, sum(host_s) AS host_s,
            sum(device_s) AS device_s, sum(device_s) / nullif(sum(host_s), 0) AS device_per_host
        FROM timed WHERE {in_steps(steps)} GROUP BY run, step, name, event
        ORDER BY run, step, name, event
        """
    )


def idle_time(rows: Rows) -> dict[str, Any]:
    """Return the idle time after start-up of all devices together; empty without readings.

    Args:
        rows: Of `device_use`.

    Returns:
        devices, each_s (the time with readings of each), share (of it that is idle), and phases: of the idle time
        the share of each phase, the largest first.
    """
    kept = [row for row in rows if row["step"] > 0 and row["idle_s"] is not None]
    idle_s, covered_s = (sum(row[name] for row in kept) for name in ("idle_s", "covered_s"))
    if not covered_s:
        return {}
    devices = len({(row["host"], row["device"]) for row in kept})
    sums = summed(kept, "idle_s", "phase") if idle_s else {}
    return {
        "devices": devices,
        "each_s": covered_s / devices,
        "share": idle_s / covered_s,
        "phases": {phase: spent_s / idle_s for phase, spent_s in sums.items()},
    }
