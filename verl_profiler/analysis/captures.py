"""What nsys saw: ranges and the GPU work that they launched, kernels, and how long GPUs were idle.

Only captured processes and steps are in these tables.  A GPU that another process used meanwhile
looks idle, unless that process was captured too.
"""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["gpu_idle", "range_times", "span_kernels", "top_kernels"]

# The range that nsys waited for.
_CAPTURE = "(event = 'capture' AND coalesce(domain, '') = 'verl_profiler')"
# A plain call's range holds what its thread launched; one of a coroutine what its process launched.
_LAUNCHED_IN = """
    w.run = r.run AND w.file = r.file AND w.pid = r.pid
    AND w.launch_ns BETWEEN r.begin_ns AND r.end_ns AND (r.kind = 'start' OR w.tid = r.tid)
"""


def range_times(tables: Tables, steps: Steps = None) -> Rows:
    """Sum the NVTX ranges of each captured process, with the GPU work launched inside them.

    Returns:
        One row per run, step, process, domain and event, most time first: ranges, total_s, max_s,
        launches, gpu_s (time of the kernels, graphs and copies launched inside, wherever they ran
        on the time axis).  Ranges of coroutines overlap, so their times and their work may count
        the same moment more than once.
    """
    return tables.rows(
        f"""
        WITH ranges AS (
            SELECT *, row_number() OVER () AS id FROM capture_ranges
            WHERE end_ns IS NOT NULL AND NOT {_CAPTURE} AND {in_steps(steps)}
        ), work AS (
            SELECT r.id, count(*) AS launches, sum(w.end_ns - w.begin_ns) AS gpu_ns
            FROM ranges AS r JOIN capture_work AS w ON {_LAUNCHED_IN} GROUP BY r.id
        )
        SELECT run, step, name, coalesce(domain, '') AS domain, event, count(*) AS ranges,
            sum(end_ns - begin_ns) / 1e9 AS total_s, max(end_ns - begin_ns) / 1e9 AS max_s,
            coalesce(sum(launches), 0)::BIGINT AS launches, coalesce(sum(gpu_ns), 0) / 1e9 AS gpu_s
        FROM ranges LEFT JOIN work USING (id)
        GROUP BY run, step, name, coalesce(domain, ''), event
        ORDER BY run, step, name, total_s DESC, domain, event
        """
    )


def span_kernels(tables: Tables, steps: Steps = None) -> Rows:
    """Join the ranges of our domain with the events that they stand for.

    Returns:
        One row per event: run, step, name, event, request_id, turn, duration_s, launches, gpu_s.
        A range belongs to the event of its process and name that begins next to it, within 2 ms.
    """
    return tables.rows(
        f"""
        WITH ranges AS (
            SELECT *, row_number() OVER () AS id FROM capture_ranges
            WHERE domain = 'verl_profiler' AND NOT {_CAPTURE} AND end_ns IS NOT NULL
                AND {in_steps(steps)}
        ), pairs AS (
            SELECT r.*, e.request_id, e.turn, e.duration_us, e.step AS event_step
            FROM ranges AS r JOIN events AS e
                ON e.run = r.run AND e.name = r.name AND e.event = r.event
                AND e.begin_us BETWEEN r.begin_ns // 1000 - 2000 AND r.begin_ns // 1000 + 2000
            QUALIFY row_number() OVER (PARTITION BY r.id ORDER BY
                abs(e.begin_us - r.begin_ns // 1000) + abs(e.end_us - r.end_ns // 1000)) = 1
        ), work AS (
            SELECT r.id, count(*) AS launches, sum(w.end_ns - w.begin_ns) AS gpu_ns
            FROM pairs AS r JOIN capture_work AS w ON {_LAUNCHED_IN} GROUP BY r.id
        )
        SELECT run, event_step AS step, name, event, request_id, turn,
            duration_us / 1e6 AS duration_s, coalesce(launches, 0) AS launches,
            coalesce(gpu_ns, 0) / 1e9 AS gpu_s
        FROM pairs LEFT JOIN work USING (id)
        ORDER BY run, step, name, begin_ns, event
        """
    )


def top_kernels(tables: Tables, steps: Steps = None) -> Rows:
    """List what the GPUs spent their time on.

    Returns:
        The 20 longest per run, step and process: kernel, kind, launches, total_s, max_s, share (of
        all GPU work of that process in the step).
    """
    return tables.rows(
        f"""
        SELECT run, step, name, kernel, kind, count(*) AS launches,
            sum(end_ns - begin_ns) / 1e9 AS total_s, max(end_ns - begin_ns) / 1e9 AS max_s,
            total_s / nullif(sum(total_s) OVER (PARTITION BY run, step, name), 0) AS share
        FROM capture_work WHERE {in_steps(steps)}
        GROUP BY run, step, name, kernel, kind
        QUALIFY row_number() OVER (PARTITION BY run, step, name ORDER BY total_s DESC, kernel) <= 20
        ORDER BY run, step, name, total_s DESC, kernel
        """
    )


def gpu_idle(tables: Tables, steps: Steps = None) -> Rows:
    """Say how long each captured GPU had nothing to do, over the capture and during `gen`.

    Returns:
        One row per run, step, host and GPU: processes (whose work is known), captured_s, busy_s,
        idle_share, gen_s, gen_busy_s, gen_idle_share (None where the trainer's `gen` of the step
        is not known or lies outside the capture).
    """
    return tables.rows(
        f"""
        WITH work AS (
            SELECT run, step, host, coalesce(gpu, '') AS gpu, name, begin_ns, end_ns
            FROM capture_work WHERE {in_steps(steps)}
        ), windows AS (
            SELECT run, step, host, min(begin_ns) AS first_ns, max(end_ns) AS last_ns
            FROM captures WHERE file IS NOT NULL AND begin_ns IS NOT NULL GROUP BY run, step, host
        ), gens AS (
            SELECT run, step, min(begin_us) * 1000 AS gen_first, max(end_us) * 1000 AS gen_last
            FROM phases WHERE phase = 'gen' AND NOT validate GROUP BY run, step
        ), reached AS (
            SELECT *, max(end_ns) OVER (PARTITION BY run, step, host, gpu ORDER BY begin_ns, end_ns
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
            FROM work
        ), busy AS (
            SELECT run, step, host, gpu, greatest(begin_ns, coalesce(before_ns, begin_ns)) AS from_ns,
                end_ns AS to_ns
            FROM reached WHERE end_ns > coalesce(before_ns, begin_ns)
        ), users AS (
            SELECT run, step, host, gpu, string_agg(DISTINCT name, ', ' ORDER BY name) AS processes
            FROM work GROUP BY run, step, host, gpu
        ), sums AS (
            SELECT b.run, b.step, b.host, b.gpu, any_value(first_ns) AS first_ns,
                any_value(last_ns) AS last_ns,
                any_value(greatest(gen_first, first_ns)) AS gen_from,
                any_value(least(gen_last, last_ns)) AS gen_to,
                sum(greatest(least(to_ns, last_ns) - greatest(from_ns, first_ns), 0)) AS busy_ns,
                sum(greatest(least(to_ns, gen_last, last_ns)
                    - greatest(from_ns, gen_first, first_ns), 0)) AS gen_busy_ns
            FROM busy AS b JOIN windows AS w USING (run, step, host) LEFT JOIN gens USING (run, step)
            GROUP BY b.run, b.step, b.host, b.gpu
        )
        SELECT run, step, host, gpu, processes, (last_ns - first_ns) / 1e9 AS captured_s,
            busy_ns / 1e9 AS busy_s, 1 - busy_ns / nullif(last_ns - first_ns, 0) AS idle_share,
            CASE WHEN gen_to > gen_from THEN (gen_to - gen_from) / 1e9 END AS gen_s,
            CASE WHEN gen_to > gen_from THEN gen_busy_ns / 1e9 END AS gen_busy_s,
            CASE WHEN gen_to > gen_from THEN 1 - gen_busy_ns / (gen_to - gen_from) END
                AS gen_idle_share
        FROM sums JOIN users USING (run, step, host, gpu)
        ORDER BY run, step, host, gpu
        """
    )
