"""Single calls and transfers of TransferQueue, and calls that handled the same data, joined by their trace ids."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq import of_function
from verl_profiler.reading.quantiles import quantile
from verl_profiler.reading.tables.tables import Tables


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
