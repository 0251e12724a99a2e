"""What trainer, queue and replicas of an asynchronous run do at the same time."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["PARTS", "pools_over_time"]

# Into how many equal spans of time a run is cut.
PARTS = 160
_SYNCS = 200


def pools_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Describe each part of the time between the first step's start and the last one's end.

    Only of asynchronous runs. Of the trainer, its longest phase in that part; of the queue between
    them, the mean number of prompts that are ready; of each pool of replicas, the mean number of
    generate calls by the version of the weights that answered them; and the weight syncs.

    Returns:
        Table `pools_over_time`: one row per run, lane, part of the time and version.
    """
    if not tables.rows("SELECT 1 FROM asynchronous LIMIT 1"):
        return []
    return tables.rows(_ROWS.replace("{chosen}", in_steps(steps)))


def _cut(columns: str, source: str) -> str:
    """Return the SQL of rows with `begin_us` and `end_us`, cut at the borders of the parts."""
    return f"""
        SELECT run, part, {columns}, least(end_us, first_us + (part + 1) * width_us)
            - greatest(begin_us, first_us + part * width_us) AS inside_us
        FROM (
            SELECT x.*, w.first_us, w.width_us, unnest(range(
                greatest(0, ((begin_us - first_us) // width_us)::BIGINT),
                least({PARTS}, ((end_us - first_us) // width_us)::BIGINT + 1))) AS part
            FROM ({source}) AS x JOIN whole AS w ON w.run = x.run
                AND x.begin_us < w.last_us AND x.end_us > w.first_us
        )"""


_PHASES = """
    SELECT run, phase, begin_us, end_us FROM phases
    WHERE end_us > begin_us AND (parent = 'step' OR (parent IS NULL AND phase <> 'step'))"""
_QUEUES = """
    SELECT run, ready, at_us AS begin_us, coalesce(lead(at_us) OVER (
        PARTITION BY run, queue ORDER BY at_us), (SELECT max(last_us) FROM whole)) AS end_us
    FROM (
        SELECT run, rest->>'queue' AS queue, end_us AS at_us, integer_of(rest, 'ready') AS ready
        FROM event_fields WHERE event = 'queue_depth'
    ) WHERE ready IS NOT NULL"""
_CALLS = """
    SELECT e.run, coalesce(p.pool, 'rollout') AS pool, begin_us, end_us,
        try_cast(weight_version AS BIGINT) AS version
    FROM engine_requests AS e LEFT JOIN pools AS p ON p.run = e.run AND p.replica = e.replica
    WHERE end_us > begin_us"""

_ROWS = f"""
WITH whole AS (
    SELECT run, min(begin_us) AS first_us, max(end_us) AS last_us,
        greatest(max(end_us) - min(begin_us), {PARTS}) / {PARTS} AS width_us
    FROM steps WHERE finished AND step > 0 AND {{chosen}} AND run IN (SELECT run FROM asynchronous)
    GROUP BY run
), pools AS (
    SELECT run, any_value(pool) AS pool, replica FROM (
        SELECT run, rest->>'pool' AS pool, unnest(try_cast(rest->'replicas' AS INTEGER[])) AS replica
        FROM event_fields WHERE event = 'replica_pool'
    ) GROUP BY run, replica
), phase_times AS (
    SELECT run, part, phase, sum(inside_us) AS inside_us FROM ({_cut("phase", _PHASES)})
    GROUP BY run, part, phase
), found AS (
    SELECT run, part, 'trainer' AS lane, arg_max(phase, (inside_us, phase)) AS phase,
        NULL::BIGINT AS version, NULL::DOUBLE AS mean FROM phase_times GROUP BY run, part
    UNION ALL
    SELECT run, part, 'queue', NULL, NULL, sum(ready * inside_us) / nullif(sum(inside_us), 0)
    FROM ({_cut("ready", _QUEUES)}) GROUP BY run, part
    UNION ALL
    SELECT q.run, part, pool, NULL, version, sum(inside_us) / any_value(w.width_us)
    FROM ({_cut("pool, version", _CALLS)}) AS q JOIN whole AS w ON w.run = q.run
    GROUP BY q.run, part, pool, version
), syncs AS (
    SELECT e.run, coalesce(rest->>'pool', 'rollout') AS pool, e.begin_us, e.end_us, first_us,
        try_cast(weight_version AS BIGINT) AS version, count(*) OVER (PARTITION BY e.run) AS many
    FROM event_fields AS e JOIN whole AS w ON w.run = e.run
        AND e.begin_us < w.last_us AND e.end_us > w.first_us
    WHERE event = 'weight_sync'
)
SELECT run, lane, phase, version AS weight_version, mean,
    part * width_us / 1e6 AS begin_s, (part + 1) * width_us / 1e6 AS end_s
FROM found JOIN whole USING (run) WHERE phase IS NOT NULL OR mean > 0
UNION ALL
SELECT run, pool, 'weight_sync', version, NULL, (begin_us - first_us) / 1e6,
    (end_us - first_us) / 1e6
FROM syncs WHERE many <= {_SYNCS}
ORDER BY ALL
"""
