"""Which part of a run a trace holds: everything of a small run, the telling part of a large one.

A viewer has to hold a trace in memory.  Of a run with more spans than `SPANS`, the longest steps are drawn,
and others spread evenly; of a step that alone has more, the slowest and the failed requests and an even
sample of the others, with their engine requests and rewards.  Counters always count everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_profiler.analysis.selection import Steps, in_steps, spread
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted

# Spans of a trace.  One takes about 90 bytes, and is one of its process's lines.
SPANS = 500_000
# Of a step that is too large, at least so many requests are drawn.
_LEAST = 8
# Counters of a run that is not drawn whole have at most so many values, at even distances.
_POINTS = 2_000
_TRACED = "(run, request_id) IN (SELECT (run, request_id) FROM traced_requests)"


@dataclass(frozen=True)
class Selection:
    """What is drawn.

    Args:
        steps: SQL condition on `step`.
        is_sampled: Of the requests, only those in the table `traced_requests` are drawn.
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
        if not self.is_sampled:
            return self.steps
        return (
            f"{self.steps} AND (request_id IS NULL OR {_TRACED}) AND (event <> 'reward_score' "
            "OR (run, extra->>'$.uid') IN (SELECT (run, uid) FROM traced_requests))"
        )

    def counted(self, query: str) -> str:
        """Return the query of a counter with the times of this selection."""
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
    condition = in_steps(steps)
    totals = tables.rows(
        f"""
        SELECT step, try_cast(sum(events) AS BIGINT) AS events,
            try_cast(sum(events) FILTER (of_requests > 0 OR family = 'reward') AS BIGINT)
                AS of_requests,
            max(end_us) - min(begin_us) AS duration_us
        FROM event_counts WHERE {condition} GROUP BY step
        """
    )
    events = sum(row["events"] for row in totals)
    if events <= SPANS:
        return Selection(condition)
    sentences: list[str] = []
    # Those of no step are few.
    numbered = {row["step"]: row for row in totals if row["step"] is not None}
    count = max(1, int(SPANS * len(totals) / events))
    if count < len(numbered):
        lengths = {step: numbered[step]["duration_us"] or 0 for step in sorted(numbered)}
        chosen = spread(lengths, count)
        condition = f"step IN ({', '.join(map(str, chosen))})"
        sentences.append(
            f"{len(chosen)} of {len(numbered)} steps are drawn, the longest and others spread evenly; "
            "--steps N:M draws others."
        )
        totals = [numbered[step] for step in chosen]
    drawn = sum(row["events"] for row in totals)
    if drawn > SPANS:
        of_requests = sum(row["of_requests"] or 0 for row in totals)
        requests = tables.row(f"SELECT count(*) AS requests FROM requests WHERE {condition}")[
            "requests"
        ]
        room = max(0, SPANS - (drawn - of_requests)) * requests / max(1, of_requests)
        each = max(_LEAST, int(room / len(totals)))
        _choose_requests(tables, condition, each)
        traced = tables.connection.execute("SELECT count(*) FROM traced_requests").fetchall()[0][0]
        sentences.append(
            f"{traced:,} of {counted(requests, 'request')} are drawn, at most {each} per step: the "
            "slowest, those that failed, and an even sample; counters count all."
        )
    sentences.append("--all draws everything.")
    span = tables.row(
        f"SELECT max(end_us) - min(begin_us) AS span_us FROM event_counts WHERE {condition}"
    )
    bucket_us = max(1, math.ceil((span["span_us"] or 0) / _POINTS))
    return Selection(condition, drawn > SPANS, bucket_us, sentences)


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
