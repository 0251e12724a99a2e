"""Lay a run out in tracks: node, role, process, and in each process lanes of spans and counters.

Spans of one lane are nested or apart, as every viewer requires.  A request has a lane of its own while
it lasts; what overlaps in it without being nested, such as parallel tool calls, takes another one.
Arrows lead from generate calls to the engine and back, and from the conversation to its tools,
its reward worker, and back; of asynchronous runs also from a request to the step that consumed it.

A viewer has to hold a trace in memory.  Of a run with more spans than `SPAN_BUDGET`, the longest steps are drawn,
and others spread evenly; of a step that alone has more, the slowest and the failed requests and an even
sample of the others, with their engine requests and rewards.  Counters always count everything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from verl_profiler.analysis.selection import Steps, in_steps, spread
from verl_profiler.exports.perfetto import Arrows, Event, Kind, PerfettoTrace
from verl_profiler.exports.track_queries import (
    ARROWS,
    ASYNCHRONOUS_COUNTERS,
    COUNTERS,
    DEVICES,
    ENGINE_RANKS,
    LANES,
    ORDERED,
    PROCESSES,
    RETRACTIONS,
    SPANS,
    UNFINISHED,
    device_counters,
    engine_counters,
)
from verl_profiler.reading.formats.foreign_traces import ForeignTrace
from verl_profiler.reading.tables.derivations import NESTING_US
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted

Folders = dict[tuple[str, str], int]
# Begin, end, kind, fields as a JSON object, arrows that leave and that arrive.
Span = tuple[int, int, Kind, "str | None", Arrows, Arrows]

# Of a sampled trace; each has a track.
_UNFINISHED = 8
# Rows at a time; many more no longer fit into the processor's cache.
_FETCHED = 2_000
_DAY_NS = 86_400 * 10**9
# Begin and end in microseconds, depth in the vocabulary, and what else belongs to the span.
Timed = tuple[int, int, int, Any]
# Spans of a trace.  One takes about 90 bytes, and is one of its process's lines.
SPAN_BUDGET = 500_000
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


def origin_ns(tables: Tables, steps: Steps) -> int:
    """Return the first time of the run, in nanoseconds since 1970."""
    row = tables.row(f"SELECT min(begin_us) AS first_us FROM event_fields WHERE {in_steps(steps)}")
    return max(row["first_us"] or 0, 0) * 1000


def days_apart(foreign: ForeignTrace, tables: Tables) -> int | None:
    """Return how many days lie between another profiler's spans and the run; None for less than one."""
    row = tables.row("SELECT min(begin_us) AS first_us, max(end_us) AS last_us FROM event_fields")
    spans = [span for thread in foreign.threads.values() for span in thread]
    if not spans or row["first_us"] is None:
        return None
    before_ns = row["first_us"] * 1000 - max(span.end_ns for span in spans)
    after_ns = min(span.begin_ns for span in spans) - row["last_us"] * 1000
    days = max(before_ns, after_ns) // _DAY_NS
    return days if days >= 1 else None


def write_run(
    tables: Tables, steps: Steps, trace: PerfettoTrace, selection: Selection | None = None
) -> Folders:
    """Write a run's spans, arrows and counters.

    `selection` is what of them is drawn, as `choose` decides; None for all.

    Returns:
        The folder of each process, by run and process name; that of a whole run has no name.
    """
    selection = selection or Selection(in_steps(steps))
    folders = _folders(tables, trace, selection)
    connection = tables.connection
    try:
        tables.make("events", "requests")
        connection.execute(SPANS.format(selected=selection.spans))
        connection.execute(ARROWS)
        trace.write(_placed(tables, folders, trace))
    finally:
        for table in ("spans", "arrows", "traced_requests"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
    _write_unfinished(tables, selection, folders, trace)
    _write_counters(tables, selection, folders, trace)
    return folders


class Lanes:
    """The lanes of one kind of span in one process.

    Args:
        trace: Where to write.
        folder: The process's.
        name: What all of these lanes are called.
    """

    def __init__(self, trace: PerfettoTrace, folder: int, name: str) -> None:
        self._trace = trace
        self._folder = folder
        self._name = name
        self._free: list[int] = []
        self._taken: list[tuple[int, int]] = []

    def place(self, spans: Iterable[Span]) -> Iterator[Event]:
        """Place spans that keep together, in the order of their begin; so do those of later calls."""
        # Tracks, and the ends of their open spans.
        lanes: list[tuple[int, list[int]]] = []
        last_ns = 0
        for begin_ns, end_ns, kind, fields, sources, targets in spans:
            last_ns = max(last_ns, end_ns)
            for track, ends in lanes:
                while ends and ends[-1] <= begin_ns:
                    yield track, ends.pop(), None, None, (), ()
                if not ends or end_ns <= ends[-1]:
                    break
            else:
                while not lanes and self._taken and self._taken[0][0] <= begin_ns:
                    heapq.heappush(self._free, heapq.heappop(self._taken)[1])
                if self._free:
                    track = heapq.heappop(self._free)
                else:
                    track = self._trace.track(self._name, self._folder)
                ends = list[int]()
                lanes.append((track, ends))
            yield track, begin_ns, kind, fields, sources, targets
            if not kind[2]:
                ends.append(end_ns)
        for track, ends in lanes:
            while ends:
                yield track, ends.pop(), None, None, (), ()
            heapq.heappush(self._taken, (last_ns, track))


def _folders(tables: Tables, trace: PerfettoTrace, selection: Selection) -> Folders:
    """Make a folder per node, role and process, in this order, of those that are drawn."""
    folders: Folders = {}
    above: dict[tuple[Any, ...], int] = {}
    rows = tables.rows(PROCESSES)
    about_run = " ".join(selection.sentences)
    several = len({row["run"] for row in rows}) > 1
    for row in rows:
        run, host, role = row["run"], row["host"], row["role"]
        if (run, "") not in folders:
            whole = f"{run}: whole run" if several else "whole run"
            folders[run, ""] = trace.track(whole, about=about_run)
        node = f"{run}: node {host}" if several else f"node {host}"
        if (run, host) not in above:
            above[run, host] = trace.track(node)
        if (run, host, role) not in above:
            above[run, host, role] = trace.track(role, above[run, host])
        about = ", ".join(
            f"{key} {row[key]}"
            for key in ("pid", "actor_class", "shift_us")
            if row[key] is not None
        )
        folders[run, row["name"]] = trace.track(row["name"], above[run, host, role], about=about)
    return folders


def _fetched(tables: Tables, query: str) -> Iterator[tuple[Any, ...]]:
    cursor = tables.connection.execute(query)
    while rows := cursor.fetchmany(_FETCHED):
        yield from rows


def _placed(tables: Tables, folders: Folders, trace: PerfettoTrace) -> Iterator[Event]:
    names = list(LANES)
    lanes: dict[tuple[str, str, int], Lanes] = {}
    for (run, name, lane, _), spans in groupby(_fetched(tables, ORDERED), itemgetter(0, 1, 2, 3)):
        place = lanes.get((run, name, lane))
        if place is None:
            place = lanes[run, name, lane] = Lanes(trace, folders[run, name], names[int(lane)])
        timed = ((*row[4:7], row[7:]) for row in spans)
        yield from place.place(
            (begin_us * 1000, end_us * 1000, (*kind,), extra, sources or (), targets or ())
            for begin_us, end_us, _, (*kind, extra, sources, targets) in nested(timed)
        )


def _write_unfinished(
    tables: Tables, selection: Selection, folders: Folders, trace: PerfettoTrace
) -> None:
    """Begin, and never end, a span for every request of which only the begin is known."""
    limit = f"LIMIT {_UNFINISHED}" if selection.is_sampled else ""
    for row in tables.rows(UNFINISHED.format(selected=selection.steps, limit=limit)):
        run, name = row.pop("run"), row.pop("name")
        track = trace.track("unfinished requests", folders.get((run, name), folders[run, ""]))
        begin_ns = max(row.pop("begin_us"), 0) * 1000
        fields = {key: value for key, value in row.items() if value is not None}
        about = msgspec.json.encode(fields).decode()
        name = " ".join(("request", *fields.get("request_id", "")[:8].split(), "(unfinished)"))
        trace.write([(track, begin_ns, (name, "rollout", False), about, (), ())])


def _write_counters(
    tables: Tables, selection: Selection, folders: Folders, trace: PerfettoTrace
) -> None:
    tables.make("requests", "engine_requests", "engine_calls", "memory", "lags", "asynchronous")
    more = ASYNCHRONOUS_COUNTERS if tables.rows("SELECT run FROM asynchronous") else ()
    ranks = [row["dp_rank"] for row in tables.rows(ENGINE_RANKS)]
    engines = [
        counter for rank in ranks for counter in engine_counters(rank, alone=len(ranks) == 1)
    ]
    devices = [
        counter
        for row in tables.rows(DEVICES)
        for counter in device_counters(row["host"] or "", row["device"], several=row["several"])
    ]
    for counter, unit, query in (*COUNTERS, *engines, RETRACTIONS, *devices, *more):
        statement = (
            "SELECT run, name, greatest(time_us, 0) * 1000, round(value::DOUBLE, 3) "
            f"FROM ({selection.counted(query.format(selected=selection.steps))}) "
            "ORDER BY run, name, time_us"
        )
        for process, points in groupby(_fetched(tables, statement), itemgetter(0, 1)):
            if process not in folders:
                continue
            track = trace.track(counter, folders[process], unit=unit)
            trace.count(track, ((time_ns, value) for _, _, time_ns, value in points))


def write_foreign(
    foreign: ForeignTrace, tables: Tables, folders: Folders, trace: PerfettoTrace
) -> None:
    """Write another profiler's trace beside the process with its host and pid."""
    folder = trace.track(foreign.title, _home(foreign, tables, folders))
    for thread, spans in sorted(foreign.threads.items()):
        spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
        placed = (
            (
                span.begin_ns,
                span.end_ns,
                (span.name, span.category, span.instant),
                span.fields,
                (),
                (),
            )
            for span in spans
        )
        trace.write(Lanes(trace, folder, thread).place(placed))


def _home(foreign: ForeignTrace, tables: Tables, folders: Folders) -> int:
    """Return the folder of a trace's process; 0, the top, where there is not exactly one."""
    rows = [
        row
        for row in tables.rows("SELECT run, name, host, pid FROM processes WHERE pid IS NOT NULL")
        if row["pid"] in foreign.pids and foreign.host in (None, row["host"])
    ]
    return folders.get((rows[0]["run"], rows[0]["name"]), 0) if len(rows) == 1 else 0


def nested(spans: Iterable[Timed]) -> Iterator[Timed]:
    """Give parents before children, and clip a child that sticks out by the rounding of times.

    A span is a child of one with a lower depth under the condition of the macro `within`.

    Args:
        spans: In the order of their begin.
    """
    around: list[Timed] = []
    for span in _parents_first(spans):
        begin_us, end_us, depth, about = span
        if around:
            around = [each for each in around if each[1] > begin_us]
        for _, until_us, above, _ in around:
            if above < depth and until_us < end_us and _ends_in(begin_us, end_us, until_us):
                end_us = until_us
        clipped = (begin_us, end_us, depth, about)
        around.append(clipped)
        yield clipped


def _ends_in(begin_us: int, end_us: int, until_us: int) -> bool:
    return end_us <= until_us + NESTING_US and (begin_us + end_us) // 2 <= until_us


def _parents_first(spans: Iterable[Timed]) -> Iterator[Timed]:
    # Those whose parent may still come, in the order of their begin.
    held: list[Timed] = []
    for span in spans:
        from_us, until_us, above, _ = span
        while held and held[0][0] < from_us - NESTING_US:
            yield held.pop(0)
        children = [
            each
            for each in held
            if each[2] > above
            and (each[0] + each[1]) // 2 >= from_us
            and _ends_in(each[0], each[1], until_us)
        ]
        if children:
            held = [each for each in held if each not in children]
        held.append(span)
        held += ((from_us, *each[1:]) for each in children)
    yield from held


def choose(tables: Tables, steps: Steps) -> Selection:
    """Choose what a trace of these steps shows; make `traced_requests` if it is a sample."""
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
    if events <= SPAN_BUDGET:
        return Selection(condition)
    sentences: list[str] = []
    # Those of no step are few.
    numbered = {row["step"]: row for row in totals if row["step"] is not None}
    count = max(1, int(SPAN_BUDGET * len(totals) / events))
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
    if drawn > SPAN_BUDGET:
        of_requests = sum(row["of_requests"] or 0 for row in totals)
        requests = tables.row(f"SELECT count(*) AS requests FROM requests WHERE {condition}")[
            "requests"
        ]
        room = max(0, SPAN_BUDGET - (drawn - of_requests)) * requests / max(1, of_requests)
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
    return Selection(condition, drawn > SPAN_BUDGET, bucket_us, sentences)


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
