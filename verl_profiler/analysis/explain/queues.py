"""How long the queue between rollout and trainer was empty or full."""

from __future__ import annotations

from collections.abc import Iterator

from verl_profiler.analysis.explain.device_time import Group, Span, integrate
from verl_profiler.analysis.explain.ledger import step_windows
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["queue_times"]


def queue_times(tables: Tables, steps: Steps = None) -> Rows:
    """Return how long no prompt was ready for the trainer, and how long its queue had no room.

    A message queue notes its depth at each change. A replay buffer does so only when the trainer polls,
    and has no capacity: its prompts are ready from the end of their last request until a step takes or
    drops them.

    Returns:
        One row per asynchronous run and step: queue (`message_queue` or `replay_buffer`), capacity
        (prompts; None without one), empty_s, full_s, step_s (until the next step begins).
    """
    depths: dict[str, Rows] = {}
    for row in tables.rows(_DEPTHS):
        depths.setdefault(row["run"], []).append(row)
    rows: Rows = []
    for run, windows in step_windows(tables, steps).items():
        if run not in depths:
            continue
        # It is empty before its first change.
        nothing = {
            "at_us": min(windows[0][1], depths[run][0]["at_us"]),
            "ready": 0,
            "capacity": None,
        }
        spans = list(_spans([nothing, *depths[run]], windows[-1][2]))
        found = integrate([window[1:] for window in windows], [Group(1.0, spans)])
        rows += [
            {
                "run": run,
                "step": step,
                "queue": depths[run][0]["queue"],
                "capacity": depths[run][0]["capacity"],
                "empty_s": states.get("empty", 0.0),
                "full_s": states.get("full", 0.0),
                "step_s": (end - begin) / 1e6,
            }
            for (step, begin, end), states in zip(windows, found, strict=True)
        ]
    return rows


def _spans(depths: Rows, last_us: int) -> Iterator[Span]:
    for row, following in zip(depths, [*depths[1:], {"at_us": last_us}], strict=True):
        capacity = row["capacity"]
        if row["ready"] <= 0:
            yield Span(row["at_us"], following["at_us"], "empty")
        elif capacity is not None and row["ready"] >= capacity:
            yield Span(row["at_us"], following["at_us"], "full")


# In order; of runs with a message queue, its own notes.
_DEPTHS = """
WITH noted AS (
    SELECT run, end_us AS at_us, begin_us AS place, integer_of(rest, 'ready') AS ready,
        integer_of(rest, 'capacity') AS capacity
    FROM event_fields WHERE event = 'queue_depth' AND rest->>'$.queue' = 'message_queue'
), lasting AS (
    SELECT r.run, r.uid, max(r.end_us) AS ready_us, any_value(g.at_us) AS gone_us
    FROM requests AS r
    LEFT JOIN (SELECT run, uid, min(at_us) AS at_us FROM samples GROUP BY run, uid) AS g
        USING (run, uid)
    WHERE NOT r.validate AND r.uid IS NOT NULL AND run IN (SELECT run FROM samples)
    GROUP BY r.run, r.uid HAVING bool_and(r.finished)
), changes AS (
    SELECT run, ready_us AS at_us, 1 AS change FROM lasting
    WHERE gone_us IS NULL OR ready_us <= gone_us
    UNION ALL
    SELECT run, gone_us, -1 FROM lasting WHERE ready_us <= gone_us
)
SELECT run, 'message_queue' AS queue, at_us, arg_max(ready, place) AS ready, max(capacity) AS capacity
FROM noted WHERE run IN (SELECT run FROM asynchronous) AND ready IS NOT NULL GROUP BY run, at_us
UNION ALL
SELECT run, 'replay_buffer', at_us,
    sum(sum(change)) OVER (PARTITION BY run ORDER BY at_us ROWS UNBOUNDED PRECEDING), NULL
FROM changes WHERE run IN (SELECT run FROM asynchronous) AND run NOT IN (SELECT run FROM noted)
GROUP BY run, at_us
ORDER BY run, at_us
"""
