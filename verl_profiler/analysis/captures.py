"""nsys captures: ranges and the GPU work that they launched, kernels, and GPU idle time.

The tables hold only captured processes and steps.  A GPU that another process used meanwhile
appears idle, unless that process was captured too.
"""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

# The range that starts and ends a capture.
_CAPTURE = "(event = 'capture' AND coalesce(domain, '') = 'verl_profiler')"
# Adds `launches` and `gpu_ns` to the ranges of a CTE `selected`.  A plain call's range gets what its
# thread launched, a coroutine's range what its process launched.  Running sums and two lookups per
# range: comparing every range with every launch would take hours.
_LAUNCHED = """
    launched AS (
        SELECT run, file, pid, -1 AS place, launch_ns, end_ns - begin_ns AS work_ns
        FROM capture_work WHERE launch_ns IS NOT NULL
        UNION ALL
        SELECT run, file, pid, tid, launch_ns, end_ns - begin_ns
        FROM capture_work WHERE launch_ns IS NOT NULL
    ), sums AS (
        SELECT run, file, pid, place, launch_ns, count(*) OVER so_far AS launches,
            sum(work_ns) OVER so_far AS gpu_ns
        FROM launched
        WINDOW so_far AS (PARTITION BY run, file, pid, place ORDER BY launch_ns)
    ), placed AS (
        SELECT *, CASE kind WHEN 'push' THEN tid ELSE -1 END AS place FROM selected
    ), measured AS (
        SELECT r.*, (coalesce(e.launches, 0) - coalesce(b.launches, 0))::BIGINT AS launches,
            coalesce(e.gpu_ns, 0) - coalesce(b.gpu_ns, 0) AS gpu_ns
        FROM placed AS r
        ASOF LEFT JOIN sums AS e ON r.run = e.run AND r.file = e.file AND r.pid = e.pid
            AND r.place = e.place AND r.end_ns >= e.launch_ns
        ASOF LEFT JOIN sums AS b ON r.run = b.run AND r.file = b.file AND r.pid = b.pid
            AND r.place = b.place AND r.begin_ns > b.launch_ns
    )
"""


def captures(tables: Tables, steps: Steps = None) -> Rows:
    """List the captured processes, and what their files hold.

    Returns:
        Table `captures`: one row per capture, by step and process.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, host, task, tool, file, size_bytes, problem,
            (end_ns - begin_ns) / 1e9 AS duration_s
        FROM captures WHERE {in_steps(steps)} ORDER BY run, step, name, number
        """
    )


def range_times(tables: Tables, steps: Steps = None) -> Rows:
    """Sum the NVTX ranges of each captured process, with the GPU work launched inside them.

    Returns:
        Table `range_times`: one row per run, step, process, domain and event, most time first.
        Ranges of coroutines overlap, so their times and work are not additive.
    """
    return tables.rows(
        f"""
        WITH selected AS (
            SELECT * FROM capture_ranges
            WHERE end_ns IS NOT NULL AND NOT {_CAPTURE} AND {in_steps(steps)}
        ), {_LAUNCHED}
        SELECT run, step, name, coalesce(domain, '') AS domain, event, count(*) AS ranges,
            sum(end_ns - begin_ns) / 1e9 AS total_s, max(end_ns - begin_ns) / 1e9 AS max_s,
            try_cast(sum(launches) AS BIGINT) AS launches, sum(gpu_ns) / 1e9 AS gpu_s
        FROM measured
        GROUP BY run, step, name, coalesce(domain, ''), event
        ORDER BY run, step, name, total_s DESC, domain, event
        """
    )


def top_kernels(tables: Tables, steps: Steps = None) -> Rows:
    """List the kernels with the most GPU time.

    Returns:
        Table `top_kernels`: the 20 kernels with the most time per run, step and process, most
        time first.
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
    """Measure how long each captured GPU was idle, over the capture and during `gen`.

    Returns:
        Table `gpu_idle`: one row per run, step, host and GPU.
    """
    return tables.rows(
        f"""
        WITH work AS (
            SELECT run, step, host, coalesce(gpu, '') AS gpu, name, begin_ns, end_ns
            FROM capture_work WHERE {in_steps(steps)}
        ), windows AS (
            SELECT run, step, host, min(begin_ns) AS first_ns, max(end_ns) AS last_ns
            FROM captures WHERE file IS NOT NULL AND begin_ns IS NOT NULL GROUP BY run, step, host
        ), generating AS (
            SELECT w.run, w.step, w.host, greatest(p.begin_us * 1000, first_ns) AS from_ns,
                least(p.end_us * 1000, last_ns) AS to_ns
            FROM windows AS w JOIN gens AS g USING (run, step) JOIN phases AS p
                ON p.run = g.run AND p.step = g.step AND p.name IS NOT DISTINCT FROM g.name AND p.phase = 'gen'
                AND NOT p.validate AND (p.parent IS NULL OR p.parent = 'step')
            WHERE p.end_us * 1000 > first_ns AND p.begin_us * 1000 < last_ns
        ), gen_times AS (
            SELECT run, step, host, sum(to_ns - from_ns) AS gen_ns
            FROM generating GROUP BY run, step, host
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
                sum(greatest(least(to_ns, last_ns) - greatest(from_ns, first_ns), 0)) AS busy_ns
            FROM busy AS b JOIN windows AS w USING (run, step, host)
            GROUP BY b.run, b.step, b.host, b.gpu
        ), gen_sums AS (
            SELECT b.run, b.step, b.host, b.gpu, sum(greatest(
                least(b.to_ns, g.to_ns) - greatest(b.from_ns, g.from_ns), 0)) AS gen_busy_ns
            FROM busy AS b JOIN generating AS g USING (run, step, host)
            GROUP BY b.run, b.step, b.host, b.gpu
        )
        SELECT run, step, host, gpu, processes, (last_ns - first_ns) / 1e9 AS captured_s,
            busy_ns / 1e9 AS busy_s, 1 - busy_ns / nullif(last_ns - first_ns, 0) AS idle_share,
            gen_ns / 1e9 AS gen_s, gen_busy_ns / 1e9 AS gen_busy_s,
            1 - gen_busy_ns / nullif(gen_ns, 0) AS gen_idle_share
        FROM sums JOIN users USING (run, step, host, gpu)
        LEFT JOIN gen_times USING (run, step, host)
        LEFT JOIN gen_sums USING (run, step, host, gpu)
        ORDER BY run, step, host, gpu
        """
    )
