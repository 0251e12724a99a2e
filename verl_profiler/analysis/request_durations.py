"""How the durations of requests are distributed: the curve and its percentiles."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.tables.tables import Tables

__all__ = ["PERCENTILES", "request_duration_cdf", "request_percentiles"]

PERCENTILES = (50.0, 80.0, 90.0, 95.0, 99.0, 99.9)

# Beyond this many requests the curve has a point per this part of them, and every one of the last.
_POINTS = 1000
_LAST = 100


def request_duration_cdf(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Return the curve of request durations, for each step and for all of them.

    Returns:
        One row per run, step (None for all steps together) and point, shortest first: requests
        (how many the curve is of), share (of the requests that took `duration_s` or less),
        duration_s.  Every point is a request.  Up to 1,000 requests have a point each; of more
        requests, each thousandth part has one, and so have the 100 slowest.  Only finished ones.
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT run, step, duration_us FROM requests
            WHERE finished AND {rows_of(steps, worker=worker, validate=validate)}
        ), grouped AS (
            SELECT run, step, duration_us FROM chosen
            UNION ALL SELECT run, NULL, duration_us FROM chosen
        ), placed AS (
            SELECT *, row_number() OVER (PARTITION BY run, step ORDER BY duration_us) AS place,
                count(*) OVER (PARTITION BY run, step) AS requests
            FROM grouped
        )
        SELECT run, step, requests, place / requests AS share, duration_us / 1e6 AS duration_s
        FROM placed
        WHERE requests <= {_POINTS} OR place > requests - {_LAST}
            OR place * {_POINTS} // requests > (place - 1) * {_POINTS} // requests
        ORDER BY run, step NULLS FIRST, place
        """
    )


def request_percentiles(
    tables: Tables,
    steps: Steps = None,
    percentiles: Sequence[float] = PERCENTILES,
    *,
    worker: int | None = None,
    validate: bool = False,
) -> Rows:
    """Return percentiles of request durations, for each step and for all of them.

    Returns:
        One row per run, step (None for all steps together) and percentile: requests (finished
        ones), unfinished, mean_s, percentile, duration_s (interpolated between the two nearest
        requests, as numpy does).
    """
    levels = ", ".join(repr(float(each) / 100) for each in percentiles)
    names = ", ".join(repr(float(each)) for each in percentiles)
    if not percentiles:
        return []
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT run, step, finished, duration_us FROM requests
            WHERE {rows_of(steps, worker=worker, validate=validate)}
        ), grouped AS (
            SELECT * FROM chosen UNION ALL SELECT * REPLACE (NULL AS step) FROM chosen
        ), summed AS (
            SELECT run, step, count(*) FILTER (finished) AS requests,
                count(*) FILTER (NOT finished) AS unfinished, avg(duration_us) AS mean_us,
                quantile_cont(duration_us, [{levels}]) AS quantiles
            FROM grouped GROUP BY run, step
        )
        SELECT run, step, requests, unfinished, mean_us / 1e6 AS mean_s,
            unnest([{names}]::DOUBLE[]) AS percentile, unnest(quantiles) / 1e6 AS duration_s
        FROM summed WHERE requests > 0
        ORDER BY run, step NULLS FIRST, percentile
        """
    )
