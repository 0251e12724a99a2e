"""The single calls and transfers of TransferQueue, for those who take them elsewhere."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_selection import of_function
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_call_stages", "tq_calls", "tq_transfers"]


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
        One row per call: run, step, name, role, func, call, trace_ids (a list), status, finished,
        estimated, source, begin_us, end_us, duration_us, get_us, compute_us, put_us, rows, sampled.
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


def tq_call_stages(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """List the stages of traced calls.

    Returns:
        One row per stage interval: run, step, name, func, call, stage, begin_us, end_us.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, func, call, stage, begin_us, end_us FROM tq_stages
        WHERE begin_us IS NOT NULL AND {in_steps(steps)} AND {of_function(function)}
        ORDER BY run, begin_us, end_us, name, func, call
        """
    )


def tq_transfers(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """List gets and puts, with the request that they belong to where one is known.

    Returns:
        One row per transfer: run, step, name, role, event, func, call, trace_ids, status, begin_us,
        end_us, duration_us, size_bytes, rows, sampled, mib_per_s; request_id, sample, session, uid and
        turn (the request's last).
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
            AND {of_function(function, "t.func")}
        ORDER BY t.run, t.begin_us, t.end_us, t.name, t.event, t.call
        """
        )
    )
