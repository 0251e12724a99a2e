"""How long functions that TransferQueue feeds took, how much of it was get and put, and how fast data moved.

Calls that handled the same data are joined by their trace ids.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantile, quantiles
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.reading.tables.tables import Tables

# The guide's classes, in MiB/s.
GOOD_MIB_S = 500
FAIR_MIB_S = 100

# SQL: the class of the column `mib_per_s`.
SPEED = (
    f"CASE WHEN mib_per_s > {GOOD_MIB_S} THEN 'good' WHEN mib_per_s >= {FAIR_MIB_S} THEN 'fair' "
    "WHEN mib_per_s IS NOT NULL THEN 'poor' END"
)


def of_function(function: str | None) -> str:
    """Return the SQL condition for the calls of one function; None for all."""
    if function is None:
        return "true"
    quoted = function.replace("'", "''")
    return f"func = '{quoted}'"


def tq_functions(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Summarize traced calls by function.

    Returns:
        Table `tq_functions`: one row per run and function, most time first, with the columns of
        `tq_wall`.
    """
    stages = ",\n".join(_stage(stage) for stage in TQ_STAGES)
    shown = ", ".join(
        f"""{stage}_calls, {stage}_us / 1e6 AS {stage}_s, {stage}_mean_us / 1e6 AS {stage}_mean_s,
            {stage}_q[1] / 1e6 AS {stage}_p50_s, {stage}_q[2] / 1e6 AS {stage}_p95_s,
            {stage}_max_us / 1e6 AS {stage}_max_s,
            {stage}_of_whole_us / nullif(total_us, 0) AS {stage}_share, {stage}_variation"""
        for stage in TQ_STAGES
    )
    rows = tables.rows(
        f"""
        WITH calls AS (
            SELECT *, coalesce(sampled, 1)::HUGEINT AS weight FROM tq_calls
            WHERE {in_steps(steps)} AND {of_function(function)}
        ), summed AS (
            SELECT run, func, count(*) AS traced, try_cast(sum(weight) AS BIGINT) AS calls,
                try_cast(coalesce(sum(weight) FILTER (status IS NOT NULL), 0) AS BIGINT) AS failed,
                try_cast(coalesce(sum(weight) FILTER (NOT finished), 0) AS BIGINT) AS unfinished,
                count(DISTINCT name) AS processes, max(weight) AS sampled,
                count(*) FILTER (estimated) AS estimated,
                coalesce(bool_or(waits), false) AS waits, try_cast(sum("rows" * weight) AS BIGINT) AS "rows",
                sum(duration_us * weight) AS total_us,
                sum(duration_us * weight) / sum(weight) FILTER (duration_us IS NOT NULL) AS mean_us,
                {quantiles("duration_us", 0.5, 0.95)} AS q, max(duration_us) AS max_us,
                {stages}
            FROM calls GROUP BY run, func
        )
        SELECT run, func, traced, calls, failed, unfinished, processes, sampled, estimated, waits, "rows",
            total_us / 1e6 AS total_s, mean_us / 1e6 AS mean_s, q[1] / 1e6 AS p50_s,
            q[2] / 1e6 AS p95_s, max_us / 1e6 AS max_s, {shown},
            (coalesce(get_of_whole_us, 0) + coalesce(put_of_whole_us, 0)) / nullif(total_us, 0)
                AS overhead_share
        FROM summed
        ORDER BY run, total_us DESC NULLS LAST, coalesce(get_us, 0) + coalesce(put_us, 0) DESC, func
        """
    )
    if not rows:
        return []
    wall = {(row["run"], row["func"]): row for row in tq_wall(tables, steps, function=function)}
    return [{**wall[row["run"], row["func"]], **row} for row in rows]


def _stage(stage: str) -> str:
    length = f"{stage}_us"
    return f"""
        try_cast(coalesce(sum(weight) FILTER ({length} IS NOT NULL), 0) AS BIGINT) AS {stage}_calls,
        sum({length} * weight) AS {length},
        sum({length} * weight) FILTER (duration_us IS NOT NULL) AS {stage}_of_whole_us,
        sum({length} * weight) / sum(weight) FILTER ({length} IS NOT NULL) AS {stage}_mean_us,
        {quantiles(length, 0.5, 0.95)} AS {stage}_q, max({length}) AS {stage}_max_us,
        stddev_pop({length}) / nullif(avg({length}), 0) AS {stage}_variation"""


def tq_wall(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Lay the calls of each process on one line of time.

    Sums of durations count calls that run at the same time several times; here a moment counts once
    in a process.

    Returns:
        Table `tq_wall`: one row per run and function, and one per run for all functions
        together.  Processes are summed.
    """
    return tables.rows(
        f"""
        WITH calls AS (
            SELECT * FROM tq_calls WHERE {in_steps(steps)} AND {of_function(function)}
        ), groups AS (
            SELECT run, func, sum(duration_us) AS total_us,
                bool_and(coalesce(sampled, 1) = 1 AND NOT coalesce(estimated, false)
                    AND (duration_us IS NULL OR begin_us IS NOT NULL)) AS known
            FROM calls GROUP BY run, func
            UNION ALL
            SELECT run, NULL, sum(duration_us), bool_and(coalesce(sampled, 1) = 1
                AND NOT coalesce(estimated, false) AND (duration_us IS NULL OR begin_us IS NOT NULL))
            FROM calls WHERE NOT coalesce(waits, false) GROUP BY run
        ), spans AS (
            SELECT run, func, name, call, 'call' AS what, begin_us, end_us FROM calls
            WHERE duration_us IS NOT NULL
            UNION ALL
            SELECT run, func, name, call, stage, begin_us, end_us FROM tq_stages
            WHERE {in_steps(steps)} AND {of_function(function)}
        ), wider AS (
            SELECT run, func, name, what, begin_us, end_us FROM spans
            UNION ALL
            SELECT run, NULL, name, what, begin_us, end_us FROM spans
            WHERE (run, func) NOT IN (SELECT (run, func) FROM calls WHERE waits)
        ), kinds AS (
            SELECT run, func, name, begin_us, end_us, 'busy' AS kind FROM wider WHERE what = 'call'
            UNION ALL SELECT run, func, name, begin_us, end_us, 'tq' FROM wider
                WHERE what IN ('get', 'put')
            UNION ALL SELECT run, func, name, begin_us, end_us, 'compute' FROM wider
                WHERE what = 'compute'
            UNION ALL SELECT run, func, name, begin_us, end_us, 'either' FROM wider
                WHERE what <> 'call'
        ), covered AS (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY run, func, name, kind ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM kinds
        ), lengths AS (
            SELECT run, func, kind,
                sum(greatest(end_us - greatest(begin_us, covered_us), 0)) AS length_us
            FROM covered GROUP BY run, func, kind
        ), laid AS (
            SELECT g.run, g.func, g.known, g.total_us,
                sum(length_us) FILTER (kind = 'busy') AS busy_us,
                coalesce(sum(length_us) FILTER (kind = 'tq'), 0) AS tq_us,
                coalesce(sum(length_us) FILTER (kind = 'either'), 0)
                    - coalesce(sum(length_us) FILTER (kind = 'compute'), 0) AS alone_us
            FROM groups AS g
            LEFT JOIN lengths AS l ON l.run = g.run AND l.func IS NOT DISTINCT FROM g.func
            GROUP BY g.run, g.func, g.known, g.total_us
        )
        SELECT run, func,
            CASE WHEN known THEN busy_us / 1e6 END AS busy_s,
            CASE WHEN known THEN tq_us / 1e6 END AS tq_busy_s,
            CASE WHEN known THEN alone_us / 1e6 END AS tq_alone_s,
            CASE WHEN known THEN tq_us / nullif(busy_us, 0) END AS wall_share,
            CASE WHEN known THEN alone_us / nullif(busy_us, 0) END AS alone_share,
            CASE WHEN known THEN total_us / nullif(busy_us, 0) END AS concurrency
        FROM laid ORDER BY run, func NULLS FIRST
        """
    )


def tq_throughput(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Summarize gets and puts that say how much they moved.

    MiB are 2^20 bytes, as in the guide's lines and classes.  Rates are per call: those of calls at
    the same time add up to more.

    Returns:
        Table `tq_throughput`: one row per run and event, and one per caller, most time first.
    """
    return tables.rows(
        f"""
        WITH moved AS (
            SELECT run, event, coalesce(func, role, name) AS caller, size_bytes, duration_us,
                coalesce(sampled, 1)::HUGEINT AS weight,
                size_bytes / {1 << 20} / nullif(duration_us / 1e6, 0) AS mib_per_s
            FROM transfers
            WHERE event IN ('tq_get', 'tq_put') AND size_bytes > 0 AND duration_us IS NOT NULL
                AND {in_steps(steps)} AND {of_function(function)}
        ), summed AS (
            SELECT run, event, caller, grouping(caller) = 1 AS whole,
                count(*) AS traced, try_cast(sum(weight) AS BIGINT) AS calls,
                try_cast(sum(size_bytes * weight) AS BIGINT) AS size_bytes,
                sum(size_bytes * weight) / sum(weight) AS mean_bytes,
                sum(duration_us * weight) / 1e6 AS total_s,
                sum(size_bytes * weight) / {1 << 20}
                    / nullif(sum(duration_us * weight) / 1e6, 0) AS mib_per_s,
                {quantiles("mib_per_s", 0.05, 0.5)} AS q,
                {quantiles("duration_us", 0.5)}[1] / 1e6 AS p50_s,
                stddev_pop(mib_per_s) / nullif(avg(mib_per_s), 0) AS variation,
                sum(weight) FILTER (mib_per_s > {GOOD_MIB_S}) / sum(weight) AS good,
                sum(weight) FILTER (mib_per_s < {FAIR_MIB_S}) / sum(weight) AS poor
            FROM moved GROUP BY GROUPING SETS ((run, event), (run, event, caller))
        )
        SELECT run, event, caller, traced, calls, size_bytes, mean_bytes, total_s, p50_s, mib_per_s,
            {SPEED} AS speed, q[1] AS p5_mib_per_s, q[2] AS p50_mib_per_s, variation,
            coalesce(good, 0) AS good_share, 1 - coalesce(good, 0) - coalesce(poor, 0) AS fair_share,
            coalesce(poor, 0) AS poor_share
        FROM summed ORDER BY run, event, NOT whole, total_s DESC, caller
        """
    )


_SUMS = f"""
    SELECT *, mib / nullif(moving_s, 0) AS mib_per_s FROM (
        SELECT run, place,
            try_cast(coalesce(sum(weight) FILTER (whole), 0) AS BIGINT) AS calls,
            sum(duration_us * weight) FILTER (whole) / 1e6 AS total_s,
            sum(get_us * weight) FILTER (whole) / 1e6 AS get_s,
            sum(compute_us * weight) FILTER (whole) / 1e6 AS compute_s,
            sum(put_us * weight) FILTER (whole) / 1e6 AS put_s,
            coalesce(sum((coalesce(get_us, 0) + coalesce(put_us, 0)) * weight) FILTER (whole AND
                duration_us IS NOT NULL), 0)
                / nullif(sum(duration_us * weight) FILTER (whole), 0) AS overhead_share,
            try_cast(coalesce(sum(weight) FILTER (NOT whole), 0) AS BIGINT) AS transfers,
            try_cast(sum(size_bytes * weight) AS BIGINT) AS size_bytes,
            sum(size_bytes * weight) / {1 << 20} AS mib,
            sum(duration_us * weight) FILTER (size_bytes IS NOT NULL) / 1e6 AS moving_s,
            {{rates}}
        FROM both_kinds GROUP BY run, place
    )
"""
_RATE = """
    sum(size_bytes * weight) FILTER (event = 'tq_{op}') / 1048576
        / nullif(sum(duration_us * weight) FILTER (event = 'tq_{op}' AND size_bytes IS NOT NULL)
            / 1e6, 0) AS {op}_mib_per_s"""
_RATES = ",".join(_RATE.format(op=op) for op in ("get", "put"))


def _both(steps: Steps, function: str | None) -> str:
    condition = f"{in_steps(steps)} AND {of_function(function)}"
    return f"""
        SELECT run, step, begin_us, duration_us, get_us, compute_us, put_us, NULL AS size_bytes,
            NULL AS event, coalesce(sampled, 1)::HUGEINT AS weight, true AS whole
        FROM tq_calls WHERE NOT coalesce(waits, false) AND {condition}
        UNION ALL
        SELECT run, step, begin_us, duration_us, NULL, NULL, NULL, size_bytes, event,
            coalesce(sampled, 1), false
        FROM transfers WHERE event IN ('tq_get', 'tq_put') AND {condition}
    """


def tq_steps(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Sum up traced calls, gets and puts by step.

    Returns:
        Table `tq_steps`: one row per run and step, that of no known step last.
    """
    return tables.rows(
        f"""
        WITH both_kinds AS (SELECT *, step AS place FROM ({_both(steps, function)})),
        summed AS ({_SUMS.format(rates=_RATES)})
        SELECT run, place AS step, calls, total_s, get_s, compute_s, put_s, overhead_share, transfers,
            size_bytes, mib_per_s, {SPEED} AS speed, get_mib_per_s, put_mib_per_s
        FROM summed ORDER BY run, step NULLS LAST
        """
    )


def tq_over_time(
    tables: Tables, steps: Steps = None, *, function: str | None = None, parts: int = 60
) -> Rows:
    """Cut the run into so many equal parts of time, and sum up the calls that begin in each; empty ones are left out.

    Returns:
        Table `tq_over_time`: one row per run and part, with the columns of `tq_steps`.
    """
    return tables.rows(
        f"""
        WITH timed AS (SELECT * FROM ({_both(steps, function)}) WHERE begin_us IS NOT NULL),
        extents AS (
            SELECT run, min(begin_us) AS first_us,
                greatest(max(begin_us) - min(begin_us), 1) / {int(parts)} AS width_us
            FROM timed GROUP BY run
        ), both_kinds AS (
            SELECT t.*, least(floor((begin_us - first_us) / width_us), {int(parts) - 1})::INTEGER
                AS place
            FROM timed AS t JOIN extents USING (run)
        ), summed AS ({_SUMS.format(rates=_RATES)})
        SELECT s.run, place AS part, place * width_us / 1e6 AS begin_s,
            (place + 1) * width_us / 1e6 AS end_s, calls, total_s, get_s, compute_s, put_s,
            overhead_share, transfers, size_bytes, mib_per_s, {SPEED} AS speed, get_mib_per_s,
            put_mib_per_s
        FROM summed AS s JOIN extents USING (run) ORDER BY s.run, part
        """
    )


def tq_load(functions: Rows) -> dict[str, Any]:
    """Return calls, traced, total_s, tq_s (get and put) and share (of them) of rows of `tq_functions`."""
    total_s = sum(row["total_s"] or 0 for row in functions)
    tq_s = sum((row["overhead_share"] or 0) * (row["total_s"] or 0) for row in functions)
    calls, traced = (sum(row[key] for row in functions) for key in ("calls", "traced"))
    share = tq_s / total_s if total_s else None
    return {"calls": calls, "traced": traced, "total_s": total_s, "tq_s": tq_s, "share": share}


def _with_ids(rows: Rows) -> Rows:
    for row in rows:
        named = (row.pop("trace_id") or "").split(",")
        row["trace_ids"] = [
            name.strip() for name in named if name.strip() and not name.strip().startswith("+")
        ]
    return rows


def tq_calls(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """List traced calls in the order of their begins.

    Returns:
        Table `tq_calls`: one row per call.
    """
    return _with_ids(
        tables.rows(
            f"""
        SELECT run, step, name, role, func, call, trace_id, status, finished, estimated, source,
            begin_us, end_us, duration_us, get_us, compute_us, put_us, "rows",
            coalesce(sampled, 1) AS sampled
        FROM tq_calls WHERE {in_steps(steps)} AND {of_function(function)}
        ORDER BY run, begin_us, end_us, name, func, call
        """
        )
    )


def tq_call_stages(tables: Tables, steps: Steps = None) -> Rows:
    """List the stages of traced calls.

    Returns:
        Table `tq_call_stages`: one row per stage interval, in order.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, func, call, stage, begin_us, end_us FROM tq_stages
        WHERE begin_us IS NOT NULL AND {in_steps(steps)}
        ORDER BY run, begin_us, end_us, name, func, call
        """
    )


def tq_transfers(tables: Tables, steps: Steps = None) -> Rows:
    """List gets and puts, with the request that they belong to where one is known.

    Returns:
        Table `tq_transfers`: one row per transfer, in order.
    """
    return _with_ids(
        tables.rows(
            f"""
        SELECT t.run, t.step, t.name, t.role, t.event, t.func, t.call, t.trace_id, t.status,
            t.begin_us, t.end_us, t.duration_us, t.size_bytes, t."rows",
            coalesce(t.sampled, 1) AS sampled,
            t.size_bytes / {1 << 20} / nullif(t.duration_us / 1e6, 0) AS mib_per_s,
            t.request_id, r.sample, r.session, r.uid, r.turns - 1 AS turn
        FROM transfers AS t
        LEFT JOIN requests AS r ON r.run = t.run AND r.step = t.step AND r.name = t.name
            AND r.request_id = t.request_id
        WHERE t.event IN ('tq_get', 'tq_put') AND {in_steps(steps, "t.step")}
        ORDER BY t.run, t.begin_us, t.end_us, t.name, t.event, t.call
        """
        )
    )


# One row per call and id: a batch of several origins carries their ids with commas, `+3` for more.
_BY_ID = """
    SELECT c.* EXCLUDE (trace_id), trim(u.id) AS trace_id
    FROM tq_calls AS c, unnest(string_split(c.trace_id, ',')) AS u(id)
    WHERE c.trace_id IS NOT NULL AND NOT starts_with(trim(u.id), '+') AND {condition}
"""


def tq_traces(tables: Tables, steps: Steps = None, *, trace_id: str | None = None) -> Rows:
    """Join calls by trace id.

    `trace_id` is one id, or its beginning; None for all.

    Returns:
        Table `tq_traces`: one row per run and trace id, longest first.
    """
    narrowed = "true" if trace_id is None else "starts_with(trace_id, $id)"
    return tables.rows(
        f"""
        WITH calls AS (SELECT * FROM ({_BY_ID.format(condition=in_steps(steps))}) WHERE {narrowed}),
        covered AS (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY run, trace_id ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us,
                row_number() OVER (PARTITION BY run, trace_id, func ORDER BY begin_us, end_us) AS nth
            FROM calls
        )
        SELECT run, trace_id, count(*) AS calls,
            list(func ORDER BY begin_us, end_us, func) FILTER (nth = 1) AS functions,
            min(step) AS first_step, max(step) AS last_step, min(begin_us) AS begin_us,
            (max(end_us) - min(begin_us)) / 1e6 AS spread_s, sum(duration_us) / 1e6 AS total_s,
            sum(get_us) / 1e6 AS get_s, sum(put_us) / 1e6 AS put_s,
            (max(end_us) - min(begin_us)
                - sum(greatest(end_us - greatest(begin_us, covered_us), 0))) / 1e6 AS waiting_s,
            count(*) FILTER (status IS NOT NULL) AS failed
        FROM covered GROUP BY run, trace_id
        ORDER BY run, spread_s DESC NULLS LAST, begin_us, trace_id
        """,
        None if trace_id is None else {"id": trace_id},
    )


def tq_paths(tables: Tables, steps: Steps = None) -> Rows:
    """Count trace ids by the functions that handled them, in order.

    Returns:
        Table `tq_paths`: one row per run and path, most ids first.
    """
    tables.make("tq_calls")
    grouped: dict[tuple[str, tuple[str, ...]], Rows] = {}
    for row in tq_traces(tables, steps):
        grouped.setdefault((row["run"], tuple(row["functions"])), []).append(row)
    found: Rows = []
    for (run, path), rows in grouped.items():
        spreads = sorted(row["spread_s"] for row in rows if row["spread_s"] is not None)
        whole = sum(spreads)
        found.append(
            {
                "run": run,
                "path": list(path),
                "trace_ids": len(rows),
                "calls": sum(row["calls"] for row in rows),
                "p50_s": quantile(spreads, 0.5),
                "max_s": spreads[-1] if spreads else None,
                "waiting_share": sum(row["waiting_s"] or 0 for row in rows) / whole
                if whole
                else None,
            }
        )
    return sorted(found, key=lambda row: (row["run"], -row["trace_ids"], row["path"]))


def tq_trace_counts(tables: Tables, steps: Steps = None) -> Rows:
    """Count what the guide's report calls traces.

    Returns:
        Table `tq_trace_counts`: one row per run.
    """
    return tables.rows(
        f"""
        WITH ids AS ({_BY_ID.format(condition=in_steps(steps))})
        SELECT run, count(DISTINCT trace_id) + count(*) FILTER (trace_id IS NULL) AS trace_ids FROM (
            SELECT run, trace_id FROM ids
            UNION ALL SELECT run, NULL FROM tq_calls WHERE trace_id IS NULL AND {in_steps(steps)}
        ) GROUP BY run ORDER BY run
        """
    )
