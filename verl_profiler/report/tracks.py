"""Lay a run out in tracks: node, role, process, and in each process lanes of spans and counters.

Spans of one lane are nested or apart, as every viewer asks.  A request has a lane of its own while
it lasts; what overlaps in it without being nested, such as parallel tool calls, takes another one.
Arrows lead from generate calls to the engine and back, and from the conversation to its tools,
its reward worker, and back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from verl_profiler.analysis.selection import Steps, in_steps
from verl_profiler.report.perfetto import About, Arrows
from verl_profiler.report.track_queries import (
    ARROWS,
    COUNTERS,
    GROUPS,
    KINDS,
    LANES,
    ORDERED,
    PROCESSES,
    SPANS,
    UNFINISHED,
)
from verl_profiler.tables import Tables

__all__ = ["Folders", "Lanes", "Trace", "origin_ns", "write_run"]


class Trace(Protocol):
    """What writes a trace: `PerfettoTrace` or `ChromeTrace`."""

    def folder(self, name: str, parent: int = 0, *, about: str = "") -> int: ...  # noqa: D102
    def lane(self, name: str, parent: int) -> int: ...  # noqa: D102
    def counter(self, name: str, parent: int, unit: str) -> int: ...  # noqa: D102
    def begin(  # noqa: D102
        self, track: int, time_ns: int, about: About, sources: Arrows = (), targets: Arrows = ()
    ) -> None: ...
    def instant(self, track: int, time_ns: int, about: About) -> None: ...  # noqa: D102
    def end(self, track: int, time_ns: int) -> None: ...  # noqa: D102
    def count(self, track: int, time_ns: int, value: float) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


Folders = dict[tuple[str, str], int]

_decode = msgspec.json.Decoder().decode
# Rows at a time; many more no longer fit into the processor's cache.
_FETCHED = 2_000


def origin_ns(tables: Tables, steps: Steps) -> int:
    """Return the first time of the run, in nanoseconds since 1970."""
    row = tables.row(f"SELECT min(begin_us) AS first_us FROM events WHERE {in_steps(steps)}")
    return max(row["first_us"] or 0, 0) * 1000


def write_run(tables: Tables, steps: Steps, trace: Trace) -> Folders:
    """Write all of a run's spans, arrows and counters.

    Args:
        tables: The tables of the run.
        steps: First and last step to write.
        trace: Where to.

    Returns:
        The folder of each process, by run and process name; that of a whole run has no name.
    """
    selected = in_steps(steps)
    folders = _folders(tables, trace)
    connection = tables.connection
    try:
        connection.execute(SPANS.format(selected=selected))
        tables.make("requests")
        connection.execute(ARROWS)
        connection.execute(KINDS)
        connection.execute(GROUPS)
        _write_spans(tables, folders, trace)
    finally:
        for table in ("spans", "arrows", "kinds", "lane_groups"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
    _write_unfinished(tables, selected, folders, trace)
    _write_counters(tables, selected, folders, trace)
    return folders


class Lanes:
    """The lanes of one kind of span in one process.

    Args:
        trace: Where to write.
        folder: The process's.
        name: What all of these lanes are called.
    """

    def __init__(self, trace: Trace, folder: int, name: str) -> None:
        self._trace = trace
        self._folder = folder
        self._name = name
        self._free: list[int] = []
        self._taken: list[tuple[int, int]] = []
        # The lanes of the unit that is being written: track, and the ends of its open spans.
        self._unit: list[tuple[int, list[int]]] = []

    def begin_unit(self, begin_ns: int) -> None:
        """Begin with spans that keep together; units come in the order of their begin."""
        while self._taken and self._taken[0][0] <= begin_ns:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])

    def end_unit(self, end_ns: int) -> None:
        """End all spans of the unit; its lanes are free from `end_ns` on."""
        for track, ends in self._unit:
            while ends:
                self._trace.end(track, ends.pop())
            heapq.heappush(self._taken, (end_ns, track))
        self._unit.clear()

    def place(self, begin_ns: int, end_ns: int) -> int:
        """Return the track for the unit's next span, in the order of begin."""
        for track, ends in self._unit:
            self._close(track, ends, begin_ns)
            if not ends or end_ns <= ends[-1]:
                ends.append(end_ns)
                return track
        track = self._lane()
        self._unit.append((track, [end_ns]))
        return track

    def moment(self, time_ns: int) -> int:
        """Return a track on which a moment can be marked."""
        if not self._unit:
            self._unit.append((self._lane(), []))
        track, ends = self._unit[0]
        self._close(track, ends, time_ns)
        return track

    def _lane(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        return self._trace.lane(self._name, self._folder)

    def _close(self, track: int, ends: list[int], time_ns: int) -> None:
        while ends and ends[-1] <= time_ns:
            self._trace.end(track, ends.pop())


def _folders(tables: Tables, trace: Trace) -> Folders:
    """Make a folder per node, role and process, in this order."""
    folders: Folders = {}
    above: dict[tuple[Any, ...], int] = {}
    rows = tables.rows(PROCESSES)
    several = len({row["run"] for row in rows}) > 1
    for row in rows:
        run, host, role = row["run"], row["host"], row["role"]
        if (run, "") not in folders:
            folders[run, ""] = trace.folder(f"{run}: whole run" if several else "whole run")
        node = f"{run}: node {host}" if several else f"node {host}"
        if (run, host) not in above:
            above[run, host] = trace.folder(node)
        if (run, host, role) not in above:
            above[run, host, role] = trace.folder(role, above[run, host])
        about = ", ".join(
            f"{key} {row[key]}"
            for key in ("pid", "actor_class", "shift_us")
            if row[key] is not None
        )
        folders[run, row["name"]] = trace.folder(row["name"], above[run, host, role], about=about)
    return folders


def _fetched(tables: Tables, query: str) -> Iterator[tuple[Any, ...]]:
    cursor = tables.connection.execute(query)
    while rows := cursor.fetchmany(_FETCHED):
        yield from rows


def _write_spans(tables: Tables, folders: Folders, trace: Trace) -> None:
    lane_names = list(LANES)
    groups = {row["group_id"]: row for row in tables.rows("SELECT * FROM lane_groups")}
    kinds = {
        row["kind"]: (
            f"{row['event']} {row['tool']}" if row["tool"] else row["event"],
            row["family"],
            row["instant"],
        )
        for row in tables.rows("SELECT * FROM kinds")
    }
    group = unit = lanes = None
    unit_end_ns = 0
    for next_group, next_unit, kind, begin_us, end_us, extra, sources, targets in _fetched(
        tables, ORDERED
    ):
        begin_ns, end_ns = begin_us * 1000, end_us * 1000
        if lanes is None or group != next_group or unit != next_unit:
            if lanes is not None:
                lanes.end_unit(unit_end_ns)
            if lanes is None or group != next_group:
                whose = groups[next_group]
                folder = folders[whose["run"], whose["name"]]
                lanes = Lanes(trace, folder, lane_names[whose["lane"]])
            group, unit, unit_end_ns = next_group, next_unit, end_ns
            lanes.begin_unit(begin_ns)
        elif end_ns > unit_end_ns:
            unit_end_ns = end_ns
        event, family, instant = kinds[kind]
        about = (event, family, _fields(extra))
        if instant:
            trace.instant(lanes.moment(begin_ns), begin_ns, about)
        else:
            track = lanes.place(begin_ns, end_ns)
            trace.begin(track, begin_ns, about, sources or (), targets or ())
    if lanes is not None:
        lanes.end_unit(unit_end_ns)


def _fields(extra: str | None) -> dict[str, Any]:
    if extra is None:
        return {}
    try:
        fields = _decode(extra)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"extra": extra}
    return fields if isinstance(fields, dict) else {"extra": extra}


def _write_unfinished(tables: Tables, selected: str, folders: Folders, trace: Trace) -> None:
    """Begin, and never end, a span for every request of which only the begin is known."""
    for row in tables.rows(UNFINISHED.format(selected=selected)):
        track = trace.lane("unfinished requests", folders[row.pop("run"), row.pop("name")])
        begin_ns = max(row.pop("begin_us"), 0) * 1000
        fields = {key: value for key, value in row.items() if value is not None}
        trace.begin(track, begin_ns, ("request (unfinished)", "rollout", fields))


def _write_counters(tables: Tables, selected: str, folders: Folders, trace: Trace) -> None:
    tables.make("requests", "engine_requests", "engine_calls", "memory", "lags")
    for counter, unit, query in COUNTERS:
        tracks: dict[tuple[str, str], int] = {}
        asked = (
            "SELECT run, name, greatest(time_us, 0) * 1000, round(value::DOUBLE, 3) "
            f"FROM ({query.format(selected=selected)}) ORDER BY run, name, time_us"
        )
        for run, name, time_ns, value in _fetched(tables, asked):
            track = tracks.get((run, name))
            if track is None:
                track = tracks[run, name] = trace.counter(counter, folders[run, name], unit)
            trace.count(track, time_ns, value)
