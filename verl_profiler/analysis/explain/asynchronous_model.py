"""The cycle of an asynchronous run rebuilt from its events.

What the trainer does between two consumptions keeps its length; waiting for samples does not: it follows
from when samples are ready.  Calls that a weight sync or the training interrupted are joined again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median, median_high
from typing import Any

from verl_profiler.analysis.explain.asynchronous_replay import (
    Chain,
    Cycle,
    Dispatch,
    Generate,
    Mark,
    Operation,
    Run,
    Take,
    Unit,
    Work,
)
from verl_profiler.analysis.explain.device_time import Span
from verl_profiler.analysis.explain.ledger import (
    standalone_replicas,
    step_windows,
    trainer_states,
)
from verl_profiler.analysis.explain.rebuilding import engine_interval
from verl_profiler.analysis.explain.replay import BEYOND
from verl_profiler.analysis.explain.replica_speed import replica_speeds
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up
from verl_profiler.reading.tables.tables import Tables

__all__ = ["Model", "Refused", "models", "times_of"]

# A replay repeats the cycle several times: of a longer run, its last steps are used.
_STEPS = 40
_CALLS = 3_000
_LEAST_STEPS = 3
_WAITING = "waiting_for_samples"
# Consumed samples are noted up to this long after the timer of the wait.
_NOTED_US = 1_000


class Refused(ValueError):
    """The run has something that the replay does not model; the text is the reason."""


@dataclass(frozen=True)
class Model:
    """A rebuilt cycle.

    Args:
        steps: The recorded steps, in order.
        step_us: Their lengths, from begin to begin.
        batch: Units that a step consumes (mean).
        slowness: (a, b) of each replica: time per unit of work with n calls is a + b n.
        most_running: Maximum number of concurrent calls of each replica, as recorded.
        slope_error: Relative standard error of b.
        separate: Whether the replicas have devices of their own.
        rollouter: Whether a rollouter dispatches, which new weights permit to go on.
    """

    cycle: Cycle
    steps: tuple[int, ...]
    step_us: tuple[int, ...]
    batch: float
    slowness: Mapping[str, tuple[float, float]]
    most_running: Mapping[str, int]
    slope_error: float
    separate: bool
    rollouter: bool

    @property
    def mean_us(self) -> float:
        """Mean length of the recorded steps."""
        return sum(self.step_us) / len(self.step_us)


def times_of(
    slowness: Mapping[str, tuple[float, float]], most: Mapping[str, int], beyond: str
) -> dict[str, Any]:
    """Return the time per unit of work by load, for each replica; `beyond` is a key of `BEYOND`."""

    def time_us(a: float, b: float, peak: int, running: int) -> float:
        return BEYOND[beyond](a, b, running, peak)

    return {name: partial(time_us, a, b, most.get(name) or 1) for name, (a, b) in slowness.items()}


def models(tables: Tables, steps: Steps = None) -> dict[str, Model | Refused]:
    """Rebuild the cycle of each asynchronous run, or return why that is impossible."""
    asynchronous = [row["run"] for row in tables.rows("SELECT run FROM asynchronous ORDER BY run")]
    found: dict[str, Model | Refused] = {}
    if not asynchronous:
        return found
    windows = step_windows(tables, after_warm_up(tables, steps) or steps)
    for run in asynchronous:
        try:
            found[run] = _Rebuilding(tables, run, windows.get(run, [])).model()
        except Refused as reason:
            found[run] = reason
    return found


@dataclass
class _Unit:
    """A prompt: its requests and what became of it."""

    requests: Rows
    dispatched_us: int
    ready_us: int | None
    taken_us: int | None = None
    dropped_us: int | None = None


class _Rebuilding:
    """The parts of one run's model."""

    def __init__(self, tables: Tables, run: str, windows: Sequence[tuple[int, int, int]]) -> None:
        if len(windows) < _LEAST_STEPS:
            raise Refused(f"fewer than {_LEAST_STEPS} finished steps after the warm-up")
        self.tables = tables
        self.run = run
        own, _ = standalone_replicas(tables).get(run, ({}, 0.0))
        self.attempts = _of(tables, _ATTEMPTS, run)
        self.units = self._units()
        self.windows = self._last(self._dispatching(windows))
        self.begin, self.end = self.windows[0][1], self.windows[-1][2]
        names = {row["replica"] for row in self._inside(self.attempts)}
        if not names:
            raise Refused("generate calls are not recorded, or not assigned to requests")
        self.separate = bool(names & own.keys())
        if self.separate and not names <= own.keys():
            raise Refused("replicas on the trainer's devices generate beside standalone ones")
        pauses = _of(tables, _PAUSES, run)
        self.rollouter = bool(pauses)
        if self.rollouter and not any(row["pauses"] for row in pauses):
            raise Refused("the rollouter's dispatch was never paused: its limit is not recorded")
        self.states = trainer_states(tables, run)
        self.off = self._stopped()

    def _dispatching(
        self, windows: Sequence[tuple[int, int, int]]
    ) -> Sequence[tuple[int, int, int]]:
        """Leave out the steps at the end of the run for which no more samples were dispatched."""
        last_us = max((unit.dispatched_us for unit in self.units.values()), default=0)
        chosen = [window for window in windows if window[1] <= last_us]
        if len(chosen) < _LEAST_STEPS:
            raise Refused(f"samples were dispatched in fewer than {_LEAST_STEPS} of the steps")
        return chosen

    def _last(self, windows: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the last steps that have few enough calls to be replayed in seconds."""
        begins = sorted(row["begin_us"] for row in self.attempts)
        chosen = list(windows[-_STEPS:])
        while len(chosen) > _LEAST_STEPS:
            first, last = (bisect_left(begins, each) for each in (chosen[0][1], chosen[-1][2]))
            if last - first <= _CALLS:
                break
            chosen.pop(0)
        return chosen

    def _inside(self, rows: Iterable[dict[str, Any]]) -> Rows:
        return [row for row in rows if self.begin <= row["begin_us"] < self.end]

    def _serves(self, state: str, served: bool) -> bool:
        """Return whether replicas run calls in a state of the trainer, given the state before."""
        if self.separate:
            return state != "weight_sync"
        # What lies between two timers changes nothing.
        return served if state == "unattributed" else state in (_WAITING, "dispatch")

    def _stopped(self) -> list[tuple[int, int]]:
        """Return when the replicas run no calls."""
        found: list[tuple[int, int]] = []
        served = True
        for span in self.states:
            served = self._serves(span.state, served)
            if not served:
                if found and found[-1][1] == span.begin_us:
                    found[-1] = found[-1][0], span.end_us
                else:
                    found.append((span.begin_us, span.end_us))
        return found

    def _stopped_us(self, begin_us: int, end_us: int) -> int:
        """Return how long the replicas were stopped between two times."""
        total = 0
        first = max(bisect_right(self.off, (begin_us, 0)) - 1, 0)
        for begin, end in self.off[first:]:
            if begin >= end_us:
                break
            total += max(min(end, end_us) - max(begin, begin_us), 0)
        return total

    def _units(self) -> dict[str, _Unit]:
        groups: dict[str, Rows] = defaultdict(list)
        for row in _of(self.tables, _REQUESTS, self.run):
            groups[row["uid"]].append(row)
        units = {
            uid: _Unit(
                rows,
                min(min(row["begin_us"], row["dispatched_us"]) for row in rows),
                max(row["end_us"] for row in rows) if all(r["finished"] for r in rows) else None,
            )
            for uid, rows in groups.items()
        }
        for row in _of(self.tables, _FATES, self.run):
            unit = units.get(row["uid"])
            if unit is not None:
                unit.taken_us, unit.dropped_us = row["taken_us"], row["dropped_us"]
        return units

    def model(self) -> Model:
        """Return the model of the run.

        Raises:
            Refused: If the run has something that is not modeled.
        """
        operations, lags = self._operations()
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.attempts:
            groups[row["replica"]].append(row)
        speeds = replica_speeds([groups])
        slowness = {name: speeds.slowness_of.get(name, speeds.slowness) for name in groups}
        most = {name: _peak(rows) for name, rows in groups.items()}
        used = [
            uid
            for uid, unit in self.units.items()
            if unit.ready_us is not None
            and any(at and self.begin <= at < self.end for at in (unit.taken_us, unit.dropped_us))
        ]
        used.sort(key=lambda uid: (self.units[uid].dispatched_us, uid))
        if not used:
            raise Refused("no consumed sample is recorded with its request")
        typical = median(lags.values()) if lags else 0.0
        chains = self._chains()
        units = tuple(_unit(self.units[uid], lags.get(uid, typical), chains) for uid in used)
        takes = [each for each in operations if isinstance(each, Take)]
        cycle = Cycle(
            tuple(operations),
            units,
            self._limit(),
            times_of(slowness, most, "line"),
            2 * sum(row["lost"] for row in self.attempts)
            > sum(row["aborted"] for row in self.attempts),
            self._parked_us(),
        )
        return Model(
            cycle,
            tuple(step for step, _, _ in self.windows),
            tuple(end - begin for _, begin, end in self.windows),
            sum(take.units for take in takes) / len(self.windows),
            slowness,
            most,
            speeds.slope_error,
            self.separate,
            self.rollouter,
        )

    def _operations(self) -> tuple[list[Operation], dict[str, float]]:
        """Return what the trainer does in the window, and the delay of each unit's dispatch."""
        spans = self._spans()
        begins = [span.begin_us for span in spans]
        takes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        ready = sorted(
            unit.ready_us
            for unit in self.units.values()
            if unit.ready_us is not None and unit.dropped_us is None
        )
        before = 0
        for at, number in sorted(self._takings().items()):
            before += number
            ready_us = ready[before - 1] if before <= len(ready) else at
            if not self.begin <= at < self.end:
                continue
            place = bisect_right(begins, at) - 1
            waited = place
            # A wait that ended before the samples were noted is the one for them.
            while waited >= 0 and spans[waited].state != _WAITING:
                waited -= 1
            step = bisect_right([begin for _, begin, _ in self.windows], at) - 1
            if waited >= 0 and spans[waited].begin_us >= self.windows[step][1]:
                free = waited == place or not takes[waited]
                place = waited if free else place
            span = spans[place]
            takes[place].append((min(at, span.end_us), number, ready_us))
        triggers = sorted(
            [
                *begins,
                *(take[0] for group in takes.values() for take in group),
                *(u.dropped_us for u in self.units.values() if u.dropped_us is not None),
            ]
        )
        lags: dict[str, float] = {}
        dispatched: set[int] = set()
        for uid, unit in self.units.items():
            at = unit.dispatched_us
            if self.begin <= at < self.end:
                trigger = triggers[bisect_right(triggers, at) - 1]
                lags[uid] = float(at - trigger)
                dispatched.add(trigger)
        if not dispatched:
            raise Refused("no sample was dispatched in the replayed steps")
        operations: list[Operation] = []
        marks = {begin: place for place, (_, begin, _) in enumerate(self.windows)}
        served = True
        for place, span in enumerate(spans):
            if span.begin_us in marks:
                operations.append(Mark(marks[span.begin_us]))
            if span.begin_us in dispatched:
                operations.append(Dispatch())
            served = self._serves(span.state, served)
            cursor = span.begin_us
            for at, number, ready_us in takes.get(place, ()):
                if span.state != _WAITING:
                    operations.append(Run(float(at - cursor), span.state, served))
                    cursor = at
                lag = max(at - max(cursor, ready_us), 0)
                operations.append(Take(number, float(lag)))
                if at in dispatched and at != span.begin_us:
                    operations.append(Dispatch())
                cursor = at
            operations.append(Run(float(span.end_us - cursor), span.state, served))
        return operations, lags

    def _takings(self) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for unit in self.units.values():
            if unit.taken_us is not None:
                found[unit.taken_us] += 1
        if not found:
            raise Refused("consumed samples are not recorded")
        return found

    def _spans(self) -> list[Span]:
        """Return the trainer's states without gaps, cut where steps begin."""
        cuts = [begin for _, begin, _ in self.windows]
        spans: list[Span] = []
        cursor = self.begin

        def add(end: int, state: str) -> None:
            nonlocal cursor
            for cut in [each for each in cuts if cursor < each < end] + [end]:
                if cut > cursor:
                    spans.append(Span(cursor, cut, state))
                    cursor = cut

        for span in self.states:
            if span.end_us <= self.begin or span.begin_us >= self.end:
                continue
            add(min(span.begin_us, self.end), "unattributed")
            add(min(span.end_us, self.end), span.state)
        add(self.end, "unattributed")
        return spans

    def _limit(self) -> int:
        """Return how many units are in flight or wait when no more are dispatched: of the median step."""
        changes = sorted(
            change
            for unit in self.units.values()
            for change in (
                # What a step dispatches at its begin, it may take at that moment.
                (unit.dispatched_us, 1, 1),
                *(((unit.taken_us, 2, -1),) if unit.taken_us is not None else ()),
                *(((unit.dropped_us, 0, -1),) if unit.dropped_us is not None else ()),
            )
        )
        most: dict[int, int] = {}
        begins = [begin for _, begin, _ in self.windows]
        number = 0
        for at, _, change in changes:
            number += change
            if change > 0 and self.begin <= at < self.end:
                place = bisect_right(begins, at) - 1
                most[place] = max(most.get(place, 0), number)
        return max(median_high(most.values()), 1)

    def _chains(self) -> dict[tuple[str, str], Chain]:
        """Return the chain of each request, by process and request."""
        items: dict[tuple[str, str], list[tuple[int, int, Generate | Work]]] = defaultdict(list)
        turns: dict[tuple[str, str, Any], Rows] = defaultdict(list)
        for row in self.attempts:
            turns[row["name"], row["request_id"], row["turn"]].append(row)
        for (name, request, _), rows in turns.items():
            items[name, request].append(self._generate(rows))
        for row in _of(self.tables, _TOOLS, self.run):
            length = float(row["end_us"] - row["begin_us"])
            items[row["name"], row["request_id"]].append(
                (row["begin_us"], row["end_us"], Work(length, tool=True))
            )
        found: dict[tuple[str, str], Chain] = {}
        for unit in self.units.values():
            for row in unit.requests:
                if row["finished"]:
                    key = row["name"], row["request_id"]
                    found[key] = self._chain(row, sorted(items[key], key=lambda each: each[:2]))
        return found

    def _generate(self, rows: Rows) -> tuple[int, int, Generate]:
        """Join the attempts of a call; tokens of lost ones are made again."""
        work = sum(row["work"] * (1 - self._stopped_share(row)) for row in rows if not row["lost"])
        last = rows[-1]
        fixed = last["decoding_us"] - last["begin_us"] + last["end_us"] - last["ended_us"]
        stopped = self._stopped_us(last["begin_us"], last["decoding_us"])
        stage = Generate(float(max(fixed - stopped, 0)), work, last["replica"])
        return rows[0]["begin_us"], last["end_us"], stage

    def _stopped_share(self, row: Mapping[str, Any]) -> float:
        length = row["ended_us"] - row["decoding_us"]
        return self._stopped_us(row["decoding_us"], row["ended_us"]) / length if length else 0.0

    def _chain(
        self, row: Mapping[str, Any], items: Sequence[tuple[int, int, Generate | Work]]
    ) -> Chain:
        stages: list[Generate | Work] = []
        cursor = row["begin_us"]
        for begin, end, stage in items:
            if end <= cursor:
                continue
            if begin > cursor:
                stages.append(Work(float(begin - cursor), tool=False))
                stages.append(stage)
            elif begin == cursor:
                stages.append(stage)
            else:
                # Parallel calls of one request keep the time that they add.
                tool = isinstance(stage, Work) and stage.tool
                stages.append(Work(float(end - cursor), tool))
            cursor = end
        if row["end_us"] > cursor:
            stages.append(Work(float(row["end_us"] - cursor), tool=False))
        return tuple(stages)

    def _parked_us(self) -> float:
        """Return how long an interrupted call waits after the replicas run again (median)."""
        gaps = [
            max(
                after["begin_us"]
                - row["end_us"]
                - self._stopped_us(row["end_us"], after["begin_us"]),
                0,
            )
            for row, after in pairwise(self.attempts)
            if after["attempt"]
            and row["request_id"] == after["request_id"]
            and row["turn"] == after["turn"]
            and row["name"] == after["name"]
        ]
        return float(median(gaps)) if gaps else 0.0


def _unit(unit: _Unit, lag_us: float, chains: Mapping[tuple[str, str], Chain]) -> Unit:
    requests = tuple(
        (lag_us + row["begin_us"] - unit.dispatched_us, chains[row["name"], row["request_id"]])
        for row in unit.requests
    )
    return Unit(requests, unit.dropped_us is not None)


def _peak(rows: Rows) -> int:
    changes = sorted(
        change for row in rows for change in ((row["started_us"], 1), (row["ended_us"], -1))
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def _of(tables: Tables, query: str, run: str) -> Rows:
    rows = [row for row in tables.rows(query) if row["run"] == run]
    if query is _ATTEMPTS:
        for row in rows:
            begin, end = row["begin_us"], row["end_us"]
            if row["engine_duration_us"] is not None:
                begin, end = engine_interval(row)
            row["started_us"] = min(begin + (row["queue_us"] or 0), end)
            row["decoding_us"] = min(row["started_us"] + (row["prefill_us"] or 0), end)
            decoded = row["decoding_us"] + row["decode_us"] if row["decode_us"] else end
            row["ended_us"] = min(decoded, end)
    return rows


_REQUESTS = """
WITH dispatched AS (
    SELECT run, uid, min(begin_us) AS at_us FROM event_fields
    WHERE event = 'dispatch' AND uid IS NOT NULL GROUP BY run, uid
)
SELECT r.run, r.uid, r.name, r.request_id, r.begin_us, r.end_us, r.finished,
    coalesce(d.at_us, r.begin_us) AS dispatched_us
FROM requests AS r LEFT JOIN dispatched AS d USING (run, uid)
WHERE NOT r.validate AND r.uid IS NOT NULL AND r.begin_us IS NOT NULL
ORDER BY r.run, r.begin_us, r.name, r.request_id
"""
_FATES = """
SELECT run, uid, max(at_us) FILTER (fate = 'consumed') AS taken_us,
    CASE WHEN bool_or(fate = 'consumed') THEN NULL ELSE max(at_us) FILTER (fate = 'dropped') END
        AS dropped_us
FROM samples WHERE uid IS NOT NULL GROUP BY run, uid
"""
_PAUSES = """
SELECT p.run, count(e.event) AS pauses FROM processes AS p
LEFT JOIN (SELECT run, event FROM event_fields WHERE event = 'dispatch_pause') AS e USING (run)
WHERE p.role = 'rollouter' GROUP BY p.run
"""
_TOOLS = """
SELECT run, name, request_id, begin_us, end_us FROM tool_calls
WHERE duration_us IS NOT NULL AND NOT validate AND request_id IS NOT NULL
ORDER BY run, begin_us, end_us
"""
# Calls of the agent loops, an attempt for each interruption, with the interval of the engine.
_ATTEMPTS = """
WITH attempts AS MATERIALIZED (
    SELECT run, name, request_id, turn, attempt, engine_request_id, server, begin_us, end_us,
        duration_us, response_tokens, coalesce(finish_reason LIKE 'abort%', false) AS aborted,
        aborted AND coalesce(response_tokens, 0) = 0 AS lost
    FROM event_fields
    WHERE event = 'engine_attempt' AND duration_us IS NOT NULL AND NOT validate
        AND request_id IS NOT NULL
), calls AS (
    SELECT * FROM attempts
    UNION ALL
    SELECT c.run, c.name, c.request_id, c.turn, 0, c.engine_request_id, c.server, c.begin_us,
        c.end_us, c.duration_us, c.response_tokens, false, false
    FROM engine_calls AS c ANTI JOIN attempts AS a
        ON a.run = c.run AND a.request_id = c.request_id AND a.turn = c.turn
    WHERE c.duration_us IS NOT NULL AND NOT c.validate AND c.request_id IS NOT NULL
), served AS (
    SELECT DISTINCT ON (run, engine_request_id) run, engine_request_id, name AS replica,
        begin_us AS engine_begin_us, duration_us AS engine_duration_us, queue_us, prefill_us,
        decode_us
    FROM engine_requests WHERE engine_request_id IS NOT NULL AND duration_us IS NOT NULL
    ORDER BY run, engine_request_id, begin_us
)
SELECT c.* EXCLUDE (engine_request_id, server), s.* EXCLUDE (run, engine_request_id, replica),
    coalesce(s.replica, c.server, 'unknown') AS replica
FROM calls AS c LEFT JOIN served AS s USING (run, engine_request_id)
ORDER BY c.run, c.name, c.request_id, c.turn, c.attempt, c.begin_us
"""
