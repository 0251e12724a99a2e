"""The metrics of steps by which two runs, or two ranges of steps, are compared.

A step without an event has a count and a total of zero, and no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from verl_profiler.analysis.console_timers import (
    generation_times,
    logged_phases,
    logged_steps,
)
from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.explain.rules import BETWEEN
from verl_profiler.analysis.selection import Rows, Steps, estimated, in_steps, nested
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.steps import WITH_NEXT, step_gaps
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

# Statistics over steps of metrics that occur once per step, and statistics within each step of metrics
# that occur many times.
PER_STEP = ("mean", "p50", "p90", "p95", "p99", "max")
PER_EVENT = (*PER_STEP, "total", "count")
# Lengths that occur once per step and are no phase of it.
NOT_PHASES = frozenset({"step", "step_to_step", "rollout", "tail_p80", "tail_p95", "unaccounted"})
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

# Name, unit and value of metrics that occur once per step.
_ONCE = f"""
SELECT step, 'step' AS name, 's' AS unit, duration_us / 1e6 AS value FROM chosen
UNION ALL
-- What follows the last step takes as long as other gaps, where it is unknown: its length is one of the mean.
SELECT step, 'step_to_step', 's', (length_us + coalesce(gap_us, avg(gap_us) OVER (PARTITION BY run))) / 1e6
FROM (
    SELECT run, step, n.end_us - n.begin_us AS length_us,
        CASE WHEN g.step IS NULL THEN next_us ELSE g.end_us END - n.end_us AS gap_us
    FROM ({WITH_NEXT}) AS n LEFT JOIN ({step_gaps("true")}) AS g USING (run, step)
) JOIN chosen USING (run, step)
UNION ALL
SELECT c.step, n.phase, 's', coalesce(sum(p.duration_us), 0) / 1e6
FROM chosen AS c CROSS JOIN (
    SELECT DISTINCT phase FROM phases
    WHERE parent = 'step' AND step IN (SELECT step FROM chosen)
) AS n LEFT JOIN phases AS p ON p.parent = 'step' AND p.step = c.step AND p.phase = n.phase
GROUP BY c.step, n.phase
UNION ALL
SELECT c.step, concat(t.phase, '_per_1k_tokens'), 's', t.duration_us / 1e3 / t.tokens
FROM chosen AS c JOIN phase_tokens AS t USING (run, step) WHERE t.tokens > 0
UNION ALL
SELECT c.step, concat(t.phase, '_tokens'), '', t.tokens::DOUBLE
FROM chosen AS c JOIN phase_tokens AS t USING (run, step)
UNION ALL
SELECT step, 'unaccounted', 's', unaccounted_us / 1e6 FROM chosen
UNION ALL
SELECT step, unnest(['tail_p80', 'tail_p95', 'rollout']), 's',
    unnest([
        last_us - ends[1],
        last_us - ends[2],
        last_us - first_us
    ]) / 1e6
FROM (
    SELECT step, {quantiles("end_us", 0.8, 0.95)} AS ends, max(end_us) AS last_us,
        min(begin_us) AS first_us
    FROM training_requests WHERE run NOT IN (SELECT run FROM asynchronous) GROUP BY step
)
UNION ALL
SELECT c.step, unnest(['requests', 'turns_per_request', 'prompt_tokens', 'generated_tokens',
    'tool_tokens']), '',
    unnest([
        count(a.begin_us)::DOUBLE,
        avg(a.turns),
        CASE WHEN count(a.begin_us) = 0 THEN 0.0 ELSE sum(a.prompt_tokens)::DOUBLE END,
        CASE WHEN count(a.begin_us) = 0 THEN 0.0 ELSE sum(a.generated_tokens)::DOUBLE END,
        CASE WHEN count(a.begin_us) = 0 THEN 0.0 ELSE sum(a.tool_tokens)::DOUBLE END
    ])
FROM chosen AS c LEFT JOIN training_requests AS a ON a.step = c.step
WHERE EXISTS (SELECT 1 FROM training_requests) GROUP BY c.step
UNION ALL
SELECT step, 'generated_tokens_per_s', '/s', generated_tokens_per_s FROM chosen
WHERE run NOT IN (SELECT run FROM consumed)
UNION ALL
SELECT step, 'generated_tokens_per_s', '/s', sum(a.generated_tokens) * 1e6 / c.duration_us
FROM chosen AS c JOIN training_requests AS a USING (run, step)
WHERE run IN (SELECT run FROM consumed) AND c.duration_us > 0 GROUP BY step, c.duration_us
"""

# Of asynchronous runs that recorded their samples: the step that each request is counted in.
_CONSUMED = """
SELECT DISTINCT ON (r.run, r.request_id) r.run, r.request_id, s.consumed_step
FROM requests AS r JOIN samples AS s
    ON s.run = r.run AND s.uid = r.uid AND s.session IS NOT DISTINCT FROM r.session
WHERE s.fate = 'consumed' AND NOT r.validate AND r.run IN (SELECT run FROM asynchronous)
"""
_OF_CONSUMED = """
SELECT t.* REPLACE (CASE WHEN t.run NOT IN (SELECT run FROM consumed) OR t.request_id IS NULL
    THEN t.step ELSE c.consumed_step END AS step)
FROM {table} AS t LEFT JOIN consumed AS c ON c.run = t.run AND c.request_id = t.request_id
"""

# Name and duration of metrics that occur many times per step.  Engines assign requests to steps by the
# version of their weights, so engine requests are taken from the client's calls.
_MANY = """
SELECT step, 'request' AS name, duration_us, false AS sampled FROM training_requests
UNION ALL
SELECT step, CASE WHEN event IN (SELECT phase FROM phases) THEN concat(family, ':', event)
    ELSE event END, duration_us, sampled > 1
FROM {event_fields}
WHERE duration_us IS NOT NULL AND NOT validate AND event <> 'request'
    AND family NOT IN ('trainer', 'engine', 'event_loop', 'profiler')
UNION ALL
SELECT step, concat('tool_call:', tool), duration_us, sampled > 1 FROM {tool_calls} WHERE NOT validate
UNION ALL
SELECT step, unnest(['engine_request', 'queue', 'prefill', 'decode', 'outside']),
    unnest([engine_duration_us, queue_us, prefill_us, decode_us, outside_us]), sampled > 1
FROM {engine_calls} WHERE NOT validate
"""


def step_metrics(tables: Tables, steps: Steps = None) -> Rows:
    """List the metrics of each finished training step.

    Returns:
        Table `step_metrics`: one row per step and name.  In asynchronous runs a request and its
        calls count in the step that consumed its sample; there are no tails.
    """
    joined = tables.rows(f"SELECT run FROM ({_CONSUMED}) LIMIT 1")
    sources = {
        name: f"({_OF_CONSUMED.format(table=table)})" if joined else table
        for name, table in (
            *((name, estimated(name)) for name in ("event_fields", "tool_calls", "engine_calls")),
            ("requests", "requests"),
        )
    }
    many = _MANY.format(**sources)
    named = ", ".join(f"q[{place}] AS {name}" for place, name in enumerate(_QUANTILES, 1))
    return tables.rows(
        f"""
        WITH consumed AS MATERIALIZED ({_CONSUMED}), chosen AS (
            SELECT * FROM steps WHERE finished AND step > 0 AND {in_steps(steps)}
        ), training_requests AS (
            SELECT * FROM {sources["requests"]}
            WHERE finished AND NOT validate AND step IN (SELECT step FROM chosen)
        ), often AS (
            SELECT step, name, avg(duration_us) / 1e6 AS mean,
                {quantiles("duration_us / 1e6", *_QUANTILES.values())} AS q,
                max(duration_us) / 1e6 AS longest, sum(duration_us) / 1e6 AS total,
                count(*)::DOUBLE AS count, coalesce(bool_or(sampled), false) AS estimated
            FROM ({many})
            WHERE duration_us IS NOT NULL AND step IN (SELECT step FROM chosen)
            GROUP BY step, name
        )
        SELECT step, name, unit, value, NULL AS mean, NULL AS p50, NULL AS p90, NULL AS p95,
            NULL AS p99, NULL AS max, NULL AS total, NULL AS count, false AS estimated
        FROM ({_ONCE}) WHERE value IS NOT NULL
        UNION ALL
        SELECT c.step, n.name, 's', NULL, mean, {named}, longest, coalesce(total, 0),
            coalesce(count, 0), coalesce(estimated, false)
        FROM chosen AS c CROSS JOIN (SELECT DISTINCT name FROM often) AS n
            LEFT JOIN often AS o ON o.step = c.step AND o.name = n.name
        ORDER BY name, step
        """
    )


def logged_metrics(run: LoggedRun) -> Rows:
    """Return what a console log has of these metrics, as `step_metrics` returns its rows.

    Returns:
        `step`, its phases, the timers inside `gen`, `unaccounted`, `total_tokens` and `tokens_per_s_per_gpu` of each step, and
        `step_to_step` where the log shows what lies between steps; after the last one, as much as on average.
    """
    rows: Rows = []
    steps = [row for row in logged_steps(run) if row["step_s"] is not None]
    for row in steps:
        rows.append(once(row["step"], "step", "s", row["step_s"]))
        for name, unit in (("total_tokens", ""), ("tokens_per_s_per_gpu", "/s")):
            if row[name] is not None:
                rows.append(once(row["step"], name, unit, row[name]))
    phases: dict[str, dict[int, float]] = nested(logged_phases(run), "duration_s", "phase", "step")
    gaps = phases.get(BETWEEN)
    if gaps:
        usual_s = fmean(gaps.values())
        unknown = {row["step"]: usual_s for row in steps if row["step"] not in gaps}
        gaps |= unknown
        for row in steps:
            whole_s = row["step_s"] + row["outside_s"] + unknown.get(row["step"], 0.0)
            rows.append(once(row["step"], "step_to_step", "s", whole_s))
    # Of an agent loop's timers, those of its longest request.
    inside = [
        row
        for row in generation_times(run)
        if row["inside"]
        and row["duration_s"]
        and ("/" not in row["timer"] or row["timer"].endswith("/max"))
    ]
    phases |= nested(inside, "duration_s", "timer", "step")
    rows += [
        once(row["step"], name, "s", durations.get(row["step"], 0.0))
        for name, durations in phases.items()
        for row in steps
    ]
    return rows


def once(step: int, name: str, unit: str, value: float) -> dict[str, Any]:
    """Return the row of a metric that occurs once per step."""
    empty = dict.fromkeys(PER_EVENT)
    return {**empty, "step": step, "name": name, "unit": unit, "value": value, "estimated": False}


# What the names of device time begin with.
DEVICE = "device:"
STALENESS = ("versions_behind", "off_policy_share")
# Of an asynchronous run, `gen` is the trainer's wait for samples, and no step has a rollout of its own.
NOT_COMPARED = frozenset({"gen", "rollout", "tail_p80", "tail_p95"})

# Synchronous runs without a replay buffer train on what they dispatch.
_TAKEN = """
WITH taken AS (
    SELECT consumed_step AS step, count(*) AS samples FROM samples
    WHERE fate = 'consumed' GROUP BY consumed_step
    UNION ALL
    SELECT step, count(*) FROM requests WHERE finished AND NOT validate
        AND run NOT IN (SELECT run FROM samples WHERE fate = 'consumed')
    GROUP BY step
)
SELECT step, samples * 1e6 / duration_us AS value FROM steps JOIN taken USING (step)
WHERE finished AND duration_us > 0 AND step > 0 AND {chosen}
"""


def sample_metrics(tables: Tables, steps: Steps) -> Rows:
    """Return samples per second and staleness of each step of one run, as `step_metrics` returns its rows.

    Samples of a synchronous run are no version behind.
    """
    rows = [
        once(row["step"], "samples_per_s", "/s", row["value"])
        for row in tables.rows(_TAKEN.format(chosen=in_steps(steps)))
    ]
    if not tables.rows("SELECT run FROM asynchronous"):
        return rows + [once(row["step"], name, "", 0.0) for row in rows for name in STALENESS]
    for found in staleness(tables, steps):
        if found["part"] == "all":
            values = (found["behind"], found["off_policy_share"])
            rows += [
                once(found["step"], name, "", value)
                for name, value in zip(STALENESS, values, strict=True)
                if value is not None
            ]
    return rows


def device_metrics(ledgers: Sequence[Rows]) -> list[Rows]:
    """Return the device-seconds of each step by account: `device:POOL:ACCOUNT`, or summed over pools.

    Args:
        ledgers: Rows of `bubble_ledger` of each run. If their pools differ, the pools are added up.

    Returns:
        Rows as `step_metrics` returns them, for each run. What only the other one has is 0 s.
    """
    pools = [{row["pool"] for row in ledger} for ledger in ledgers]
    by_pool = all(each == pools[0] for each in pools)
    sums: list[dict[tuple[int, str], float]] = []
    for ledger in ledgers:
        sums.append({})
        for row in ledger:
            pool = f"{row['pool']}:" if by_pool else ""
            key = row["step"], f"{DEVICE}{pool}{row['account']}"
            sums[-1][key] = sums[-1].get(key, 0.0) + row["device_s"]
    names = sorted({name for each in sums for _, name in each}, key=_place)
    return [
        [
            once(step, name, "s", found.get((step, name), 0.0))
            for name in names
            for step in sorted({step for step, _ in found})
        ]
        for found in sums
    ]


def _place(name: str) -> tuple[str, int]:
    pool, _, account = name.rpartition(":")
    return pool, list(ACCOUNTS).index(account)
