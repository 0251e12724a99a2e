"""Which part of a run a trace holds: everything of a small run, the telling part of a large one.

A viewer has to hold a trace in memory, and nobody scrolls through thousands of lanes.  Of a run beyond
these limits, the slowest and the failed requests of each step are drawn, and an even sample of the
others, with their engine requests and rewards, in lanes that all processes share; their number is that
of the drawn requests that are in flight at once.  Of many processes, some of each role have tracks.  If
what they do is too much as well, the longest steps are drawn, and others spread evenly.  Counters of the
whole run always count everything.  So a trace has at most about 200 tracks and 100 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_profiler.analysis.selection import Steps, in_steps
from verl_profiler.exports.process_selection import choose_processes, estimated_tracks
from verl_profiler.exports.track_queries import POOLED
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted

__all__ = ["Selection", "choose"]

# A span takes about 90 bytes, and is one of its process's lines.
_SPANS = 500_000
# Tracks of the processes, but for their requests.
_TRACKS = 90
# Requests in flight at once, of all processes; each has a lane, and so has its engine request.
_LANES = 70
# The same of a sample, whose rewards have lanes, too.
_SAMPLED_LANES = 32
# Of larger steps, so many requests are drawn, and at least so many of very long runs.
_EACH = 64
_LEAST = 8
_STEPS = 40
# Counters have at most so many values, at even distances.
_POINTS = 2_000
_MANY_PROCESSES = 64
_POINTS_OF_MANY = 200


@dataclass(frozen=True)
class Selection:
    """What is drawn.

    Args:
        steps: SQL condition on `step`.
        is_sampled: Only requests in the table `traced_requests` and processes in `traced_processes`
            are drawn.
        bucket_us: Counters have one value, the highest, for each so many microseconds.
        sentences: What was left out, and how to get it.
    """

    steps: str = "true"
    is_sampled: bool = False
    bucket_us: int | None = None
    sentences: list[str] = field(default_factory=list[str])

    @property
    def spans(self) -> str:
        """SQL condition on events."""
        conditions = [self.steps]
        if self.is_sampled:
            conditions.append(
                "(request_id IS NULL OR (run, request_id) IN "
                "(SELECT (run, request_id) FROM traced_requests)) AND (event <> 'reward_score' "
                "OR (run, extra->>'$.uid') IN (SELECT (run, uid) FROM traced_requests))"
            )
            conditions.append(
                f"({POOLED} OR (run, name) IN (SELECT (run, name) FROM traced_processes))"
            )
        return " AND ".join(conditions)

    def counted(self, query: str) -> str:
        """Return the query of a counter with the times and the detail of this selection."""
        if self.is_sampled:
            query = (
                f"SELECT * FROM ({query}) WHERE name = '' OR (run, name) IN "
                "(SELECT (run, name) FROM traced_processes)"
            )
        if self.bucket_us is None:
            return query
        return (
            f"SELECT run, name, min(time_us) AS time_us, max(value) AS value FROM ({query}) "
            f"GROUP BY run, name, time_us // {self.bucket_us}"
        )


def choose(tables: Tables, steps: Steps) -> Selection:
    """Choose what a trace of these steps shows; make `traced_requests` if it is a sample.

    Args:
        tables: The tables of the run.
        steps: First and last step; all when None.
    """
    selected = Selection(in_steps(steps))
    overlapping = selected.spans
    totals = tables.rows(
        f"""
        SELECT run, step, try_cast(sum(events) AS BIGINT) AS events,
            try_cast(sum(events) FILTER (of_requests > 0 OR family = 'reward') AS BIGINT)
                AS of_requests,
            max(end_us) - min(begin_us) AS duration_us
        FROM event_counts WHERE {overlapping} GROUP BY run, step
        """
    )
    events = sum(row["events"] for row in totals)
    busy = _in_flight(tables, overlapping)
    tracks = estimated_tracks(tables)
    if events <= _SPANS and busy <= _LANES and tracks <= 2 * _TRACKS:
        return selected
    drawn_processes, processes = choose_processes(tables, _TRACKS)
    requests = tables.row(f"SELECT count(*) AS requests FROM requests WHERE {overlapping}")[
        "requests"
    ]
    of_requests = sum(row["of_requests"] or 0 for row in totals)
    each_events = max(1.0, of_requests / max(1, requests))
    count = len(totals) or 1
    others = (events - of_requests) * min(1.0, drawn_processes / max(1, processes))
    room = (_SPANS - others) / (count * each_events)
    sentences: list[str] = []
    condition = selected.steps
    if room < _LEAST and count > 1:
        per_step = others / count + _EACH * each_events
        count = max(1, min(_STEPS, int(_SPANS / per_step)))
        # Steps of one number are few: the run was resumed.
        chosen = _spread(
            {row["step"]: row["duration_us"] or 0 for row in totals if row["step"] is not None},
            count,
        )
        condition = f"step IN ({', '.join(map(str, chosen))})"
        sentences.append(
            f"{len(chosen)} of {len(totals)} steps are drawn, the longest and others spread evenly; "
            "--steps N:M draws others."
        )
        room = _EACH
    each = max(_LEAST, min(_EACH, int(room)))
    _choose_requests(tables, f"{condition} AND {overlapping}", each)
    while each > 1 and _in_flight(tables, _TRACED) > _SAMPLED_LANES:
        each //= 2
        _choose_requests(tables, f"{condition} AND {overlapping}", each)
    drawn = tables.connection.execute("SELECT count(*) FROM traced_requests").fetchall()[0][0]
    if drawn < requests:
        sentences.append(
            f"{drawn:,} of {counted(requests, 'request')} are drawn, at most {each} per step: the "
            "slowest, those that failed, and an even sample; counters of the whole run count all."
        )
    if drawn_processes < processes:
        sentences.append(
            f"{drawn_processes:,} of {processes:,} processes are drawn: of each role the one that "
            "worked most, the one that worked least, and others between."
        )
    if sentences:
        sentences.append("--all draws everything.")
    points = _POINTS_OF_MANY if processes > _MANY_PROCESSES else _POINTS
    span = tables.row(
        f"SELECT max(end_us) - min(begin_us) AS span_us FROM event_counts WHERE {condition}"
    )
    bucket_us = max(1, math.ceil((span["span_us"] or 0) / points))
    return Selection(condition, True, bucket_us, sentences)


_TRACED = "(run, request_id) IN (SELECT (run, request_id) FROM traced_requests)"


def _in_flight(tables: Tables, selected: str) -> int:
    """Return how many requests were in flight at once, in all processes."""
    row = tables.row(
        f"""
        SELECT coalesce(max(many), 0)::BIGINT AS most FROM (
            SELECT sum(sum(change)) OVER (ORDER BY time_us ROWS UNBOUNDED PRECEDING) AS many
            FROM (
                SELECT begin_us AS time_us, 1 AS change FROM requests
                WHERE end_us IS NOT NULL AND {selected}
                UNION ALL
                SELECT end_us, -1 FROM requests WHERE end_us IS NOT NULL AND {selected}
            ) GROUP BY time_us
        )
        """
    )
    return row["most"] or 0


def _spread(lengths: dict[int, int], count: int) -> list[int]:
    """Choose the longest half, and the other half spread evenly."""
    longest = sorted(lengths, key=lambda step: -lengths[step])[: (count + 1) // 2]
    rest = sorted(set(lengths) - set(longest))
    wanted = min(count - len(longest), len(rest))
    distance = (len(rest) - 1) / max(1, wanted - 1)
    return sorted({*longest, *(rest[round(place * distance)] for place in range(wanted))})


def _choose_requests(tables: Tables, selected: str, each: int) -> None:
    """Make the table of the requests that are drawn."""
    tables.make("requests")
    tables.connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE traced_requests AS
        SELECT run, request_id, any_value(uid) AS uid FROM (
            SELECT run, request_id, uid,
                row_number() OVER (of_step ORDER BY duration_us DESC NULLS LAST, request_id) AS slow,
                row_number() OVER (of_step ORDER BY status = 'ok' OR status IS NULL, begin_us,
                    request_id) AS odd,
                status IN ('error', 'unfinished', 'cancelled') AS failed,
                row_number() OVER (of_step ORDER BY begin_us, request_id) AS place,
                count(*) OVER of_step AS many
            FROM requests WHERE request_id IS NOT NULL AND {selected}
            WINDOW of_step AS (PARTITION BY run, step, validate)
        ) WHERE slow <= {each // 2} OR (failed AND odd <= {each // 4})
            OR place * least({each // 4}, many) // many <> (place - 1) * least({each // 4}, many) // many
        GROUP BY run, request_id
        """
    )
