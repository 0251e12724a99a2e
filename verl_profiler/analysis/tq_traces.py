"""Which calls handled the same data: calls joined by their trace ids."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantile
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_paths", "tq_trace_counts", "tq_traces"]

# One row per call and id: a batch of several origins carries their ids with commas, `+3` for more.
_BY_ID = """
    SELECT c.* EXCLUDE (trace_id), trim(u.id) AS trace_id
    FROM tq_calls AS c, unnest(string_split(c.trace_id, ',')) AS u(id)
    WHERE c.trace_id IS NOT NULL AND NOT starts_with(trim(u.id), '+') AND {condition}
"""


def tq_traces(tables: Tables, steps: Steps = None, *, trace_id: str | None = None) -> Rows:
    """Join calls by trace id.

    Args:
        tables: The tables.
        steps: First and last step; None for all.
        trace_id: One id, or its beginning; None for all.

    Returns:
        One row per run and trace id, longest first: calls, functions (in their order, each once),
        first_step, last_step, begin_us, spread_s (first begin to last end), total_s (in calls),
        get_s, put_s, waiting_s (spread_s in which no call handled the data), failed.
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
        One row per run and path, most ids first: path (list of functions), trace_ids, calls, p50_s and
        max_s (first begin to last end), waiting_share (of that time).
    """
    tables.make("tq_calls")
    grouped: dict[tuple[str, tuple[str, ...]], list[dict]] = {}
    for row in tq_traces(tables, steps):
        grouped.setdefault((row["run"], tuple(row["functions"])), []).append(row)
    found = []
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
        One row per run: trace_ids, of the calls that have one, each other call counting as one.
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
