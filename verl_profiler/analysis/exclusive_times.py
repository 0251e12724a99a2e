"""Time of every event without what it contains, so that the parts add up to the whole.

Each moment of a request (or of a process's work) belongs to the innermost interval that is open
then.  What lies outside every request, or every piece of work, is not counted.
"""

from __future__ import annotations

from verl_profiler.analysis.rows_of import rows_of
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events import EVENTS
from verl_profiler.tables import Tables

__all__ = ["exclusive_times"]

_REQUEST_EVENTS = tuple(
    name for name, event in EVENTS.items() if event.family == "rollout" and not event.instant
)
# They run inside a request when they name it.
_INSIDE_REQUEST = ("tq_put", "tq_get", "tq_meta", "tq_clear")
_ANYWHERE = (*_INSIDE_REQUEST, "load", "offload", "memory_release", "memory_resume")
# So many events are swept at a time; a step with more is swept alone.
_EVENTS_AT_ONCE = 2_000_000


def _depth(name: str) -> int:
    """Return how many events contain this one; what may be inside any other comes last."""
    event = EVENTS.get(name)
    if event is None or name in _ANYWHERE:
        return 1000
    return 0 if event.parent is None else 1 + _depth(event.parent)


def _sweep(chosen: str, key: str, names: list[str]) -> str:
    """Return SQL for the time in which each name was the innermost open one, by `key`.

    Args:
        chosen: A query for the key's columns, event, begin_us and end_us.
        key: The columns of what is swept apart.
        names: Every name that occurs, outermost first.
    """
    opened = ", ".join(
        f"sum(CASE WHEN number = {number} THEN change ELSE 0 END) OVER moments AS open_{number}"
        for number in range(len(names))
    )
    numbers = " ".join(
        f"WHEN '{name}' THEN {number}"
        for number, name in enumerate(each.replace("'", "''") for each in names)
    )
    innermost = " ".join(
        f"WHEN open_{number} > 0 THEN {number}" for number in reversed(range(len(names)))
    )
    return f"""
    WITH chosen AS (
        SELECT {key}, CASE event {numbers} END AS number, begin_us, end_us FROM ({chosen})
    ), points AS (
        SELECT {key}, number, begin_us AS at_us, 1 AS change FROM chosen
        UNION ALL SELECT {key}, number, end_us, -1 FROM chosen
    ), swept AS (
        SELECT {key}, lead(at_us) OVER moments - at_us AS length_us, {opened}
        FROM points WINDOW moments AS (PARTITION BY {key} ORDER BY at_us, change, number
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
    )
    SELECT {key}, CASE {innermost} END AS number, sum(length_us)::BIGINT AS self_us
    FROM swept WHERE length_us > 0 AND CASE {innermost} END IS NOT NULL GROUP BY ALL
    """


def exclusive_times(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Split the time of requests, steps and ranks into the events' own times.

    Returns:
        One row per run, step, scope and event, most own time first.  scope is `requests` (all
        finished requests together; their own times add up to the sum of their durations), `step`
        (the trainer's timers; they add up to the step) or the role of trainer workers (all ranks
        together; they add up to the time in which anything was recorded).  events, total_s (with
        what the events contain), self_s (without), share (of the scope's self_s).  Calls that a
        request makes at the same time count once in self_s, and each in total_s.
    """
    rows: Rows = []
    for first, last in _batches(tables, steps):
        rows += _requests(tables, (first, last), validate=validate)
        if not validate:
            rows += _ranks(tables, (first, last))
    if not validate:
        rows += _steps(tables, steps)
    wholes: dict[tuple[str, int, str], float] = {}
    for row in rows:
        key = row["run"], row["step"], row["scope"]
        wholes[key] = wholes.get(key, 0) + row["self_s"]
    for row in rows:
        whole = wholes[row["run"], row["step"], row["scope"]]
        row["share"] = row["self_s"] / whole if whole else None
    order = {"step": 0, "requests": 1}
    rows.sort(
        key=lambda row: (
            row["run"],
            row["step"],
            order.get(row["scope"], 2),
            row["scope"],
            -row["self_s"],
            row["event"],
        )
    )
    return rows


def _batches(tables: Tables, steps: Steps) -> list[tuple[int, int]]:
    """Cut the steps into ranges of at most so many events."""
    batches: list[tuple[int, int]] = []
    size = 0
    for row in tables.rows(
        "SELECT step, count(*) AS events FROM events "
        f"WHERE step IS NOT NULL AND {in_steps(steps)} GROUP BY step ORDER BY step"
    ):
        if batches and size + row["events"] <= _EVENTS_AT_ONCE:
            batches[-1] = batches[-1][0], row["step"]
            size += row["events"]
        else:
            batches.append((row["step"], row["step"]))
            size = row["events"]
    return batches


def _requests(tables: Tables, steps: Steps, *, validate: bool) -> Rows:
    listed = ", ".join(f"'{name}'" for name in (*_REQUEST_EVENTS, *_INSIDE_REQUEST))
    tables.make("requests")
    spans = f"""
        SELECT e.run, e.step, e.name, e.request_id, e.event, greatest(e.begin_us, r.begin_us) AS begin_us,
            least(e.end_us, r.end_us) AS end_us, e.duration_us
        FROM events AS e JOIN requests AS r
            ON r.run = e.run AND r.step = e.step AND r.name = e.name
            AND r.validate = e.validate AND r.request_id = e.request_id
        WHERE r.finished AND {rows_of(steps, validate=validate, table="r")}
            AND {rows_of(steps, validate=validate, table="e")}
            AND e.duration_us IS NOT NULL AND e.request_id IS NOT NULL
            AND (e.event IN ({listed}) OR e.family = 'user')
            AND e.begin_us < r.end_us AND e.end_us > r.begin_us
    """
    totals = tables.rows(
        f"SELECT run, step, event, count(*) AS events, sum(duration_us) / 1e6 AS total_s "
        f"FROM ({spans}) GROUP BY ALL"
    )
    names = sorted({row["event"] for row in totals}, key=lambda name: (_depth(name), name))
    if "request" not in names:
        return []
    own = tables.rows(
        "SELECT run, step, number, sum(self_us) / 1e6 AS self_s FROM ("
        f"{_sweep(spans, 'run, step, name, request_id', names)}) GROUP BY ALL"
    )
    return _joined(totals, own, names, "requests")


def _ranks(tables: Tables, steps: Steps) -> Rows:
    tables.make("rank_spans")
    spans = f"""
        SELECT run, step, role, name, event, begin_us, end_us, duration_us FROM rank_spans
        WHERE {in_steps(steps)}
    """
    totals = tables.rows(
        f"SELECT run, step, role, event, count(*) AS events, sum(duration_us) / 1e6 AS total_s "
        f"FROM ({spans}) GROUP BY ALL"
    )
    names = sorted({row["event"] for row in totals}, key=lambda name: (_depth(name), name))
    if not names:
        return []
    own = tables.rows(
        "SELECT run, step, role, number, sum(self_us) / 1e6 AS self_s FROM ("
        f"{_sweep(spans, 'run, step, role, name', names)}) GROUP BY ALL"
    )
    result: Rows = []
    for role in sorted({row["role"] for row in totals}):
        result += _joined(
            [row for row in totals if row["role"] == role],
            [row for row in own if row["role"] == role],
            names,
            role,
        )
    return result


def _steps(tables: Tables, steps: Steps) -> Rows:
    return [
        {**row, "scope": "step"}
        for row in tables.rows(
            f"""
            WITH wholes AS (
                SELECT run, step, min(begin_us) AS begin_us, max(end_us) AS end_us
                FROM phases WHERE phase = 'step' GROUP BY run, step
            )
            SELECT p.run, p.step, p.phase AS event, count(*) AS events,
                sum(p.duration_us) / 1e6 AS total_s, sum(p.self_us) / 1e6 AS self_s
            FROM phases AS p JOIN wholes AS w ON w.run = p.run AND w.step = p.step
            WHERE p.begin_us >= w.begin_us AND p.end_us <= w.end_us AND {in_steps(steps, "p.step")}
            GROUP BY p.run, p.step, p.phase
            """
        )
    ]


def _joined(totals: Rows, own: Rows, names: list[str], scope: str) -> Rows:
    selves = {(row["run"], row["step"], names[row["number"]]): row["self_s"] for row in own}
    return [
        {
            "run": row["run"],
            "step": row["step"],
            "event": row["event"],
            "events": row["events"],
            "total_s": row["total_s"],
            "self_s": selves.get((row["run"], row["step"], row["event"]), 0.0),
            "scope": scope,
        }
        for row in totals
    ]
