"""The cycle of an asynchronous run rebuilt from its events.

What the trainer does between two consumptions keeps its length; waiting for samples does not: it follows
from when samples are ready.  Calls that a weight sync or the training interrupted are joined again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from statistics import median, median_high
from typing import NamedTuple

from verl_profiler.analysis.explain.calls import (
    by_call,
    parked_us,
    peak,
    prompts_of,
    recorded,
    requests_of,
    undivided_share,
)
from verl_profiler.analysis.explain.device_time import Span, swept
from verl_profiler.analysis.explain.engine_speed import by_load, decoding
from verl_profiler.analysis.explain.iteration_times import pass_times
from verl_profiler.analysis.explain.ledger import (
    quoted,
    standalone_replicas,
    step_windows,
    trainer_devices,
    trainer_states,
)
from verl_profiler.analysis.explain.model import (
    WEIGHT_SYNC,
    Dispatch,
    Mark,
    Model,
    Operation,
    Request,
    Run,
    Take,
    Unit,
)
from verl_profiler.analysis.explain.replica_speed import replica_speeds
from verl_profiler.analysis.selection import Steps, after_warm_up, grouped
from verl_profiler.reading.tables.tables import Tables

# A replay repeats the cycle several times: of a longer run, its last steps are used.
_STEPS = 40
_CALLS = 3_000
_LEAST_STEPS = 3
_WAITING = "waiting_for_samples"


class RefusedError(ValueError):
    """The run has something that the replay does not model; the text is the reason."""


def models(
    tables: Tables, steps: Steps = None, only: Sequence[str] | None = None, without: int = 0
) -> dict[str, Model | RefusedError]:
    """Rebuild the cycle of each asynchronous run, or return why that is impossible.

    Args:
        tables: Of the runs.
        steps: First and last step; None for all.
        only: The runs; None for all.
        without: How many of the first steps are left out.
    """
    asynchronous = [row["run"] for row in tables.rows("SELECT run FROM asynchronous ORDER BY run")]
    chosen = [run for run in asynchronous if only is None or run in only]
    found: dict[str, Model | RefusedError] = {}
    if not chosen:
        return found
    windows = step_windows(tables, after_warm_up(tables, steps) or steps)
    for run in chosen:
        try:
            found[run] = _Rebuilding(tables, run, windows.get(run, [])[without:]).model()
        except RefusedError as reason:
            found[run] = reason
    return found


class _Rebuilding:
    """The parts of one run's model."""

    def __init__(self, tables: Tables, run: str, windows: Sequence[tuple[int, int, int]]) -> None:
        if len(windows) < _LEAST_STEPS:
            raise RefusedError(f"fewer than {_LEAST_STEPS} finished steps after the warm-up")
        if tables.rows("SELECT 1 FROM requests WHERE run = ? AND NOT detailed LIMIT 1", [run]):
            raise RefusedError(
                "the calls of some requests are not recorded (profiler.events.detail_share)"
            )
        self.tables = tables
        self.run = run
        own, devices = standalone_replicas(tables).get(run, (set[str](), 0.0))
        self.replica_devices = devices / len(own) if own else 0.0
        requests, self.attempts, self.tools = recorded(tables, f"run = {quoted(run)}")
        self.units = prompts_of(requests)
        self.windows = self._last(self._dispatching(windows))
        self.begin, self.end = self.windows[0][1], self.windows[-1][2]
        self.inside = [row for row in self.attempts if self.begin <= row["begin_us"] < self.end]
        names = {row["replica"] for row in self.inside}
        if not names:
            raise RefusedError("generate calls are not recorded, or not assigned to requests")
        self.separate = bool(names & own)
        self.standalone = tuple(sorted(own)) if self.separate else ()
        if self.separate and not names <= own:
            raise RefusedError("replicas on the trainer's devices generate beside standalone ones")
        limits = rollouters(tables).get(run)
        self.rollouter = limits is not None
        self.at_once = limits.at_once if limits and limits.at_once else math.inf
        self.required = limits.required if limits else 0
        if limits and not limits.pauses:
            if not limits.at_once:
                raise RefusedError(
                    "the rollouter's dispatch was never paused: its limit is not recorded"
                )
            # Nothing else has ever held it.
            self.required = len(self.units)
        self.states = trainer_states(tables, run)
        # When the wait for samples ended, by when they were noted: one_step_off_policy dispatches between both.
        self.took_us: dict[int, int] = {}

    def _dispatching(
        self, windows: Sequence[tuple[int, int, int]]
    ) -> Sequence[tuple[int, int, int]]:
        """Leave out the steps at the end of the run for which no more samples were dispatched."""
        last_us = max((unit.dispatched_us for unit in self.units.values()), default=0)
        chosen = [window for window in windows if window[1] <= last_us]
        if len(chosen) < _LEAST_STEPS:
            raise RefusedError(f"samples were dispatched in fewer than {_LEAST_STEPS} of the steps")
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

    def _serves(self, state: str, served: bool) -> bool:
        """Return whether replicas run calls in a state of the trainer, given the state before."""
        if self.separate:
            return state != WEIGHT_SYNC
        # What lies between two timers changes nothing.
        return served if state == "unattributed" else state in (_WAITING, "dispatch")

    def _stopped(self) -> list[tuple[int, int]]:
        """Return when the replicas run no calls."""
        found: list[tuple[int, int]] = []
        served = True
        for span in self.states:
            served = self._serves(span.state, served)
            if not served:
                found.append((span.begin_us, span.end_us))
        return found

    def model(self) -> Model:
        """Return the model of the run.

        Raises:
            RefusedError: If the run has something that is not modeled.
        """
        operations, lags = self._operations()
        stops = self._stopped()
        calls = by_call(self.attempts)
        groups = grouped(self.attempts, "replica")
        cells = decoding(self.tables, None).get(self.run)
        loads = by_load(cells) if cells else None
        speeds = replica_speeds([groups], pass_times(self.tables).get(self.run, {}), loads)
        most = {
            name: max(peak(rows), speeds.most_read.get(name, 0), 1) for name, rows in groups.items()
        }
        used = [
            uid
            for uid, unit in self.units.items()
            if unit.ready_us is not None
            and any(at and self.begin <= at < self.end for at in (unit.taken_us, unit.dropped_us))
        ]
        used.sort(key=lambda uid: (self.units[uid].dispatched_us, uid))
        if not used:
            raise RefusedError("no consumed sample is recorded with its request")
        typical = median(lags.values()) if lags else 0.0
        dispatched_us = {
            uid: self.units[uid].dispatched_us - lags.get(uid, typical) for uid in used
        }
        requests: dict[str | None, list[Request]] = defaultdict(list)
        for request in requests_of(
            [row for uid in used for row in self.units[uid].requests],
            calls,
            self.tools,
            lambda row: row["begin_us"] - dispatched_us[row["uid"]],
            stops=stops,
        ):
            requests[request.group].append(request)
        units = [Unit(tuple(requests[uid]), self.units[uid].dropped_us is not None) for uid in used]
        takes = [each for each in operations if isinstance(each, Take)]
        return Model(
            self.run,
            tuple(step for step, _, _ in self.windows),
            tuple(end - begin for _, begin, end in self.windows),
            tuple(operations),
            tuple(units),
            self._limit,
            at_once=self.at_once,
            speeds=speeds,
            most_running=most,
            redo=2 * sum(row["lost"] for row in self.attempts)
            > sum(row["aborted"] for row in self.attempts),
            aborts=any(row["aborted"] for row in self.attempts),
            parked_us=parked_us(calls, stops),
            asynchronous=True,
            batch=sum(take.units for take in takes) / len(self.windows),
            standalone=self.standalone,
            rollouter=self.rollouter,
            trainer_devices=trainer_devices(self.tables).get(self.run, 0.0),
            replica_devices=self.replica_devices,
            undivided_share=undivided_share(self.inside),
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
        takings = Counter(
            unit.taken_us for unit in self.units.values() if unit.taken_us is not None
        )
        if not takings:
            raise RefusedError("consumed samples are not recorded")
        before = 0
        for at, number in sorted(takings.items()):
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
            took = self.took_us[at] = min(at, spans[place].end_us)
            takes[place].append((took, number, ready_us))
        # A rollouter at its most samples at once dispatches when one has ended; a sync permits more.
        ended = set(ready) if self._limit > self.at_once else set[int]()
        triggers = sorted(
            [
                *begins,
                *ended,
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
                if trigger not in ended:
                    dispatched.add(trigger)
        if ended:
            synced = (place for place, span in enumerate(spans) if span.state == WEIGHT_SYNC)
            # After the last of the cycle comes the first.
            dispatched |= {spans[(place + 1) % len(spans)].begin_us for place in synced}
        if not dispatched:
            raise RefusedError("no sample was dispatched in the replayed steps")
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

    def _spans(self) -> list[Span]:
        """Return the trainer's states without gaps, cut where steps begin."""
        steps = [(self.begin, self.end), *(window[1:] for window in self.windows)]
        spans = [Span(begin_us, end_us, "unattributed") for begin_us, end_us in steps]
        for begin_us, end_us, state in self.states:
            spans.append(Span(max(begin_us, self.begin), min(end_us, self.end), state))
        pieces = swept(spans, lambda span: span.state == "unattributed", lambda _: object())
        return [Span(begin_us, end_us, span.state) for begin_us, end_us, span in pieces]

    @cached_property
    def _limit(self) -> int:
        """Return how many units are in flight or wait when no more are dispatched: of the median step if not recorded."""
        if self.required:
            return self.required
        changes = sorted(
            change
            for unit in self.units.values()
            for change in (
                # What a step dispatches at its begin, it may take at that moment.
                (unit.dispatched_us, 1, 1),
                *(
                    ((self.took_us.get(unit.taken_us, unit.taken_us), 2, -1),)
                    if unit.taken_us is not None
                    else ()
                ),
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


_ROLLOUTERS = """
WITH depths AS (
    SELECT run, begin_us, integer_of(rest, 'running') AS running, integer_of(rest, 'capacity') AS capacity
    FROM event_fields WHERE event = 'queue_depth' AND rest->>'$.queue' = 'rollouter' AND step > 0
), loads AS (
    SELECT run, max(capacity) AS at_once, avg((running >= capacity - 1)::INTEGER) AS at_most,
        max(begin_us) - min(begin_us) AS lasted_us
    FROM depths GROUP BY run
), pauses AS (
    SELECT run, max(integer_of(rest, 'max_required_samples')) AS required, count(*) AS pauses,
        sum(duration_us) FILTER (step > 0) AS paused_us
    FROM event_fields WHERE event = 'dispatch_pause' GROUP BY run
)
SELECT DISTINCT p.run, coalesce(at_once, 0) AS at_once, coalesce(at_most, 0) AS at_most,
    coalesce(required, 0) AS required, coalesce(pauses, 0) AS pauses,
    coalesce(paused_us / nullif(lasted_us, 0), 0) AS paused
FROM processes AS p LEFT JOIN loads USING (run) LEFT JOIN pauses USING (run) WHERE p.role = 'rollouter'
"""


class Rollouter(NamedTuple):
    """What limits a rollouter: `at_once` samples run, and `required` are in flight or wait; 0 if not recorded.

    It has been `paused` for a part of the time, by the latter, in so many `pauses`; in a part `at_most` of the moments
    that were recorded, as many samples ran as may.
    """

    at_once: int
    at_most: float
    required: int
    pauses: int
    paused: float


def rollouters(tables: Tables) -> dict[str, Rollouter]:
    """Return the rollouter of each run that has one."""
    return {row.pop("run"): Rollouter(**row) for row in tables.rows(_ROLLOUTERS)}
