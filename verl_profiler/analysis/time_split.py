"""The share of its whole that every event took, without what it contains.

The parts add up to the whole: each moment of a request (or of a process's work) belongs to the
innermost interval that is open then.  What is outside every request, or every piece of work, is
not counted.
"""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps, rows_of
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.tables.derivations import depth_of
from verl_profiler.reading.tables.tables import Tables

__all__ = ["exclusive_times"]

_REQUEST_EVENTS = tuple(
    name for name, event in EVENTS.items() if event.family == "rollout" and not event.instant
)
# They run inside a request when they name it.
_INSIDE_REQUEST = ("tq_put", "tq_get", "tq_meta", "tq_clear")
# So many events are swept at a time; a step with more is swept alone.
_EVENTS_AT_ONCE = 2_000_000


def exclusive_times(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    """Split the time of requests, steps and ranks into the events' own times.

    Returns:
        Table `exclusive_times`: one row per run, step, scope and event, most own time first.
    """
    rows: Rows = []
    for batch in _batches(tables, steps):
        rows += _swept(tables, _request_spans(batch, validate=validate))
        if not validate:
            rows += _swept(tables, _rank_spans(batch))
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
        "SELECT step, try_cast(sum(events) AS BIGINT) AS events FROM event_counts "
        f"WHERE step IS NOT NULL AND {in_steps(steps)} GROUP BY step ORDER BY step"
    ):
        if batches and size + row["events"] <= _EVENTS_AT_ONCE:
            batches[-1] = batches[-1][0], row["step"]
            size += row["events"]
        else:
            batches.append((row["step"], row["step"]))
            size = row["events"]
    return batches


def _request_spans(steps: Steps, *, validate: bool) -> str:
    """Return SQL for what happened in finished requests, cut off at their begins and ends."""
    listed = ", ".join(f"'{name}'" for name in (*_REQUEST_EVENTS, *_INSIDE_REQUEST))
    return f"""
        WITH chosen AS (
            SELECT *, row_number() OVER () AS part FROM (
                SELECT *, unnest(range(sampled)) AS copy FROM requests
                WHERE finished AND request_id IS NOT NULL AND {rows_of(steps, validate=validate)}
            )
        )
        SELECT c.run, c.step, 'requests' AS scope, part, event, e.duration_us,
            greatest(e.begin_us, c.begin_us) AS begin_us, least(e.end_us, c.end_us) AS end_us
        FROM chosen AS c JOIN event_fields AS e
            ON c.run = e.run AND c.step = e.step AND c.name = e.name
            AND c.validate = e.validate AND c.request_id = e.request_id
        WHERE {rows_of(steps, validate=validate, table="e")} AND e.duration_us IS NOT NULL
            AND (event IN ({listed}) OR e.family = 'user')
            AND e.begin_us < c.end_us AND e.end_us > c.begin_us
    """


def _rank_spans(steps: Steps) -> str:
    """Return SQL for the work of the trainer workers' ranks."""
    return f"""
        SELECT run, step, role AS scope, dense_rank() OVER (ORDER BY run, step, name) AS part,
            event, duration_us, begin_us, end_us
        FROM rank_spans WHERE {in_steps(steps)}
    """


def _swept(tables: Tables, spans: str) -> Rows:
    """Find the time in which each event was the innermost open one of its part.

    How many of each event are open is one number: a group of bits per event, the innermost in the
    highest.  So one running sum serves up to 126 bits' worth of events.
    """
    tables.make("requests", "rank_spans")
    tables.connection.execute(f"CREATE OR REPLACE TEMP TABLE swept_spans AS {spans}")
    totals = tables.rows(
        """
        SELECT run, step, scope, event, try_cast(sum(times) AS BIGINT) AS events,
            sum(total_us) / 1e6 AS total_s, max(times) AS most
        FROM (
            SELECT run, step, scope, part, event, count(*) AS times, sum(duration_us) AS total_us
            FROM swept_spans GROUP BY ALL
        ) GROUP BY ALL
        """
    )
    own: Rows = []
    names = sorted({row["event"] for row in totals}, key=lambda name: (depth_of(name), name))
    if names:
        bits = max(row["most"] for row in totals).bit_length()
        together = max(126 // bits, 1)
        units = [
            (number // together, 1 << bits * (number % together)) for number in range(len(names))
        ]
        cases = " ".join(
            f"WHEN '{each}' THEN {number}"
            for number, each in enumerate(name.replace("'", "''") for name in names)
        )
        sums = ", ".join(
            "sum(change * CASE number "
            + " ".join(
                f"WHEN {n} THEN {unit}" for n, (held, unit) in enumerate(units) if held == sum_
            )
            + f" ELSE 0 END::HUGEINT) OVER moments AS open_{sum_}"
            for sum_ in range(units[-1][0] + 1)
        )
        innermost = " ".join(
            f"WHEN open_{held} >= {unit} THEN {number}"
            for number, (held, unit) in reversed(list(enumerate(units)))
        )
        own = tables.rows(
            f"""
            WITH numbered AS (
                SELECT run, step, scope, part, CASE event {cases} END AS number, begin_us, end_us
                FROM swept_spans
            ), points AS (
                SELECT run, step, scope, part, number, begin_us AS at_us, 1 AS change FROM numbered
                UNION ALL SELECT run, step, scope, part, number, end_us, -1 FROM numbered
            ), swept AS (
                SELECT run, step, scope, lead(at_us) OVER moments - at_us AS length_us, {sums}
                FROM points WINDOW moments AS (PARTITION BY part ORDER BY at_us
                    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
            )
            SELECT run, step, scope, CASE {innermost} END AS number, sum(length_us) / 1e6 AS self_s
            FROM swept WHERE length_us > 0 AND CASE {innermost} END IS NOT NULL GROUP BY ALL
            """
        )
    tables.connection.execute("DROP TABLE swept_spans")
    selves = {
        (row["run"], row["step"], row["scope"], names[row["number"]]): row["self_s"] for row in own
    }
    return [
        {
            **{key: row[key] for key in ("run", "step", "scope", "event", "events", "total_s")},
            "self_s": selves.get((row["run"], row["step"], row["scope"], row["event"]), 0.0),
        }
        for row in totals
    ]


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
            WHERE within(p.begin_us, p.end_us, w.begin_us, w.end_us)
                AND {in_steps(steps, "p.step")}
            GROUP BY p.run, p.step, p.phase
            """
        )
    ]
