"""How fast data went into and out of TransferQueue, with the guide's classes."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.tq_selection import FAIR_MIB_S, GOOD_MIB_S, SPEED, of_function
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["tq_throughput"]


def tq_throughput(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Summarize gets and puts that say how much they moved.

    MiB are 2^20 bytes, as in the guide's lines and classes: good above 500 MiB/s, fair from 100, poor
    below.  Rates are per call: those of calls at the same time add up to more.

    Returns:
        One row per run and event (`tq_get`, `tq_put`) with caller None, and one per caller (function
        where it is known, else role), most time first: traced, calls, size_bytes, mean_bytes, total_s,
        p50_s (of the calls), mib_per_s (all bytes over all time), speed (its class), p5_mib_per_s, p50_mib_per_s,
        variation (of the rates), and the shares of the calls that are good_, fair_ and poor_share.
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
