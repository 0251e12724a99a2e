"""How long the tail of a rollout was."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

_FLIGHTS = """flights AS (
    -- At one time all rows have the count after it.
    SELECT run, step, at_us, try_cast(sum(change) OVER (PARTITION BY run, step ORDER BY at_us
        RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS BIGINT) AS in_flight
    FROM (
        SELECT run, step, begin_us AS at_us, 1 AS change FROM chosen
        UNION ALL SELECT run, step, end_us, -1 FROM chosen
    )
)"""


def _rollouts(selection: str) -> str:
    """Return the SQL of the finished requests, `chosen`, and of each step's rollout, `ends`."""
    return f"""WITH chosen AS (
        SELECT run, step, name, request_id, begin_us, end_us, duration_us FROM requests
        WHERE finished AND {selection}
    ), ends AS (
        SELECT run, step, count(*) AS requests, sum(duration_us) AS total_us,
            min(begin_us) AS first_us, max(end_us) AS last_us,
            {quantiles("end_us", 0.8, 0.95, 0.99)} AS tails
        FROM chosen GROUP BY run, step
    )"""


def rollout_tail(tables: Tables, steps: Steps = None) -> Rows:
    """Measure how much of a rollout was spent on its last requests.

    Returns:
        Table `rollout_tail`: one row per run and step.  Only finished requests.
    """
    return tables.rows(
        f"""
        {_rollouts(rows_of(steps, validate=False))}, {_FLIGHTS}, peaks AS (
            SELECT run, step, max(in_flight) AS peak FROM flights GROUP BY run, step
        ), workers AS (
            SELECT run, step, name, max(end_us) AS end_us FROM chosen GROUP BY run, step, name
        ), idle AS (
            SELECT run, step, count(*) AS workers, max(end_us) * count(*) - sum(end_us) AS idle_us
            FROM workers GROUP BY run, step
        ), lasts AS (
            SELECT run, step, request_id, name FROM chosen JOIN ends USING (run, step)
            WHERE end_us = last_us
            QUALIFY row_number() OVER (PARTITION BY run, step
                ORDER BY duration_us DESC, name, request_id) = 1
        )
        SELECT e.run, e.step, requests, first_us AS begin_us, (last_us - first_us) / 1e6 AS rollout_s,
            (last_us - tails[1]) / 1e6 AS tail80_s, (last_us - tails[2]) / 1e6 AS tail95_s,
            (last_us - tails[3]) / 1e6 AS tail99_s,
            (last_us - tails[1]) / nullif(last_us - first_us, 0) AS tail80_share,
            (last_us - tails[2]) / nullif(last_us - first_us, 0) AS tail95_share,
            (last_us - tails[3]) / nullif(last_us - first_us, 0) AS tail99_share,
            peak, 1 - total_us / nullif(peak * (last_us - first_us), 0) AS bubble_share,
            workers, idle_us / nullif(workers * (last_us - first_us), 0) AS idle_share,
            l.request_id AS last_request_id, l.name AS last_name
        FROM ends AS e JOIN peaks USING (run, step) JOIN idle USING (run, step)
        JOIN lasts AS l USING (run, step) WHERE e.{SYNCHRONOUS} ORDER BY e.run, e.step
        """
    )


def step_tail(tables: Tables, steps: Steps = None) -> Rows:
    """Measure how long the last requests kept a step waiting.

    Returns:
        Table `step_tail`: one row per run and step with finished training requests.
    """
    return tables.rows(
        f"""
        {_rollouts(rows_of(steps, validate=False))}, gen_ends AS (
            SELECT g.run, g.step, g.end_us AS gen_end_us
            FROM gens AS g JOIN processes AS o USING (run, name) WHERE o.role = 'trainer'
        )
        SELECT e.run, e.step, requests, (last_us - tails[1]) / 1e6 AS after_p80_s,
            (last_us - tails[2]) / 1e6 AS after_p95_s, (last_us - tails[3]) / 1e6 AS after_p99_s,
            (last_us - first_us) / 1e6 AS spread_s,
            CASE WHEN gen_end_us >= last_us THEN (gen_end_us - last_us) / 1e6 END AS poll_s
        FROM ends AS e LEFT JOIN gen_ends USING (run, step)
        WHERE e.{SYNCHRONOUS} ORDER BY e.run, e.step
        """
    )
