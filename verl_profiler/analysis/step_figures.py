"""One number per step and figure: what two runs, or two ranges of steps, are compared by."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["PER_EVENT", "PER_STEP", "step_figures"]

# What a figure that occurs once per step is summed up by over the steps of a run, and what one
# that occurs many times is summed up by within each step.
PER_STEP = ("mean", "p50", "p90", "p95", "p99", "max")
PER_EVENT = (*PER_STEP, "total", "count")

# name, unit and value of what a step has once.
_ONCE = """
SELECT step, 'step' AS name, 's' AS unit, duration_us / 1e6 AS value FROM chosen
UNION ALL
SELECT step, phase, 's', sum(duration_us) / 1e6 FROM phases
WHERE parent = 'step' AND step IN (SELECT step FROM chosen) GROUP BY step, phase
UNION ALL
SELECT step, 'unaccounted', 's', unaccounted_us / 1e6 FROM chosen
UNION ALL
SELECT step, unnest(['tail_p80', 'tail_p95', 'rollout']), 's',
    unnest([last_us - ends[1], last_us - ends[2], last_us - first_us]) / 1e6
FROM (
    SELECT step, quantile_disc(end_us, [0.8, 0.95]) AS ends, max(end_us) AS last_us,
        min(begin_us) AS first_us
    FROM asked GROUP BY step
)
UNION ALL
SELECT step, unnest(['requests', 'turns_per_request', 'prompt_tokens', 'response_tokens']), '',
    unnest([count(*)::DOUBLE, avg(turns), sum(prompt_tokens)::DOUBLE, sum(response_tokens)::DOUBLE])
FROM asked GROUP BY step
UNION ALL
SELECT a.step, 'response_tokens_per_s', '/s', sum(a.response_tokens) * 1e6 / any_value(c.duration_us)
FROM asked AS a JOIN chosen AS c USING (step) GROUP BY a.step
"""

# name and length of what a step has many times.  An engine files its requests by the version of its
# weights, so they are taken from the calls that they belong to.
_MANY = """
SELECT step, 'request' AS name, duration_us FROM asked
UNION ALL
SELECT step, CASE WHEN event IN (SELECT phase FROM phases) THEN concat(family, ':', event)
    ELSE event END, duration_us
FROM event_fields
WHERE duration_us IS NOT NULL AND NOT validate AND event <> 'request'
    AND family NOT IN ('trainer', 'engine', 'event_loop', 'profiler')
UNION ALL
SELECT step, concat('tool_call:', tool), duration_us FROM tool_calls WHERE NOT validate
UNION ALL
SELECT step, unnest(['engine_request', 'queue', 'prefill', 'decode', 'outside']),
    unnest([engine_duration_us, queue_us, prefill_us, decode_us, outside_us])
FROM engine_calls WHERE NOT validate
"""


def step_figures(tables: Tables, steps: Steps = None) -> Rows:
    """List what each finished training step has, once or many times.

    Returns:
        One row per step and name: unit ('s', '/s' or '' for numbers).  What occurs once has `value`
        (the step, its phases, tails, tokens).  What occurs many times (requests, calls) has the
        statistics `mean`, `p50`, `p90`, `p95`, `p99`, `max`, `total` (s) and `count`, and no `value`.
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT * FROM steps WHERE finished AND step > 0 AND {in_steps(steps)}
        ), asked AS (
            SELECT * FROM requests
            WHERE finished AND NOT validate AND step IN (SELECT step FROM chosen)
        )
        SELECT step, name, unit, value, NULL AS mean, NULL AS p50, NULL AS p90, NULL AS p95,
            NULL AS p99, NULL AS max, NULL AS total, NULL AS count
        FROM ({_ONCE}) WHERE value IS NOT NULL
        UNION ALL
        SELECT step, name, 's', NULL, mean, q[1], q[2], q[3], q[4], longest, total, count
        FROM (
            SELECT step, name, avg(duration_us) / 1e6 AS mean,
                quantile_cont(duration_us / 1e6, [0.5, 0.9, 0.95, 0.99]) AS q,
                max(duration_us) / 1e6 AS longest, sum(duration_us) / 1e6 AS total,
                count(*)::DOUBLE AS count
            FROM ({_MANY})
            WHERE duration_us IS NOT NULL AND step IN (SELECT step FROM chosen)
            GROUP BY step, name
        )
        ORDER BY name, step
        """
    )
