"""How long functions that TransferQueue feeds took, and how much of it was get and put."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_selection import of_function
from verl_profiler.analysis.tq_wall import tq_wall
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_functions"]


def tq_functions(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Summarize traced calls by function.

    Where only every N-th call was traced, each counts N times in `calls` and in everything that is
    a sum or share; quantiles are those of the traced calls.

    Returns:
        One row per run and function, most time first: traced, calls, failed, unfinished, processes,
        sampled (the largest N), estimated (calls whose stages are computed, not recorded), waits (it
        waits for others, which count its time), rows;
        total_s, mean_s, p50_s, p95_s, max_s; for each stage of get, compute and put `<stage>_calls`,
        `_s`, `_mean_s`, `_p50_s`, `_p95_s`, `_max_s`, `_share` (of total_s) and `_variation` (the
        standard deviation over the mean); overhead_share (get and put); what `tq_wall` says:
        busy_s, tq_busy_s, tq_alone_s, wall_share, alone_share, concurrency.
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
