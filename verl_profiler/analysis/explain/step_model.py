"""A step rebuilt from its events, so that it can be run again with something changed.

A request is a chain: generate calls, tool calls, and what lies between them in its worker.
A generate call waits as it was seen to wait, then decodes a fixed amount of work at a speed that
depends on how many calls the replica has at that moment; the dependence is fitted to the calls of all
steps that are rebuilt together, for each replica, and the work is what the call did at that speed.
So an unchanged replay gives the measured times, and a changed one lets the calls that are left run
faster.  How fast more calls run than were ever seen at once is a guess, and `BEYOND` has the bounds
of it.

The trainer looks for finished samples when it was seen to look, and further at the same distance.
What follows `gen` keeps its length, unless the number of tokens changes: `after_token_us`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, count, groupby, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from verl_profiler.reading.tables.derivations import GEN_TOLERANCE_US, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "BEYOND",
    "Call",
    "Request",
    "StepModel",
    "Tools",
    "Work",
    "engine_interval",
    "request_ends",
    "step_models",
]

# verl's replay buffer sleeps so long between two looks (0.9.1); used where its looks were not seen.
POLL_US = 2_000_000
# Two TransferQueue calls of the trainer with this much between them belong to two looks; a trainer
# that polls looks for the first time within this after it has begun to wait.
_APART_US = 50_000
# Waiting for a full replica, for at least this part of the engine's time, may come from a limit of
# calls at once; it is believed when a replay with the limit ends within this part of the measured
# time.
_QUEUED_SHARE = 0.05
_SLOTS_FIT = 0.05
# Events of a rank in which it may need all others.
_TOGETHER = "'train_mini_batch', 'train_batch', 'infer_batch', 'forward_backward'"
# Two moments of a replay that are no further apart are the same.
_SAME_US = 1e-3
# The speed of replicas is fitted to at least so many calls, and to loads at least so far apart; a
# replica's own speed counts as much as that of all replicas if it has so many calls.
_FITTED_CALLS = 20
_LOAD_RATIO = 1.5
_SHRUNK_CALLS = 20
# Loads are means over passes, which follow from the fit: so often are both found again.
_ROUNDS = 3
# Phases after `gen` that work on the step's tokens.  What part of their time goes with the tokens is
# taken from the steps, as far as these differ, and before seeing them from this: mean and deviation.
_OF_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
_TOKEN_PART = (0.8, 0.25)
_TOKEN_STEPS = 3

# What a token takes with n calls in a replica that never ran more than `most`, by the assumption, from
# (a, b) of the line through what was seen.  A pass over more calls takes no less time, and gives no
# fewer tokens per second: so `flat` and `saturated` are the bounds, and the line lies between them.
BEYOND: dict[str, Callable[[float, float, int, int], float]] = {
    "line": lambda a, b, n, _: a + b * n,
    "flat": lambda a, b, n, most: a + b * min(n, most),
    "saturated": lambda a, b, n, most: (a + b * min(n, most)) * max(n / most, 1),
}


class Call(NamedTuple):
    """A generate call: waiting, a time that it surely runs, its decoding, the way back; as measured.

    `queue_us` is the part of `before_us` in the engine's queue.
    """

    before_us: float
    fixed_us: float
    work: float
    after_us: float
    seen_us: float
    replica: str | None
    turn: int | None
    tokens: int | None = None
    queue_us: float = 0.0


class Tools(NamedTuple):
    """The tool calls of one turn: begin (after the first one's), length and tool of each."""

    calls: tuple[tuple[float, float, str], ...]
    turn: int | None

    @property
    def length_us(self) -> float:
        """From the first begin to the last end."""
        return max([begin + length for begin, length, _ in self.calls])

    def changed(self, length_of: Callable[[str, float], float]) -> Tools:
        """Give calls other lengths; one that began after the others had ended still does."""
        lengths = [length_of(tool, length) for _, length, tool in self.calls]
        if all(new == call[1] for new, call in zip(lengths, self.calls, strict=True)):
            return self
        calls: list[tuple[float, float, str]] = []
        seen = moved = shift = 0.0
        for (begin, length, tool), new in sorted(zip(self.calls, lengths, strict=True)):
            if begin >= seen:
                shift = seen - moved
            calls.append((begin - shift, new, tool))
            seen = max(seen, begin + length)
            moved = max(moved, calls[-1][0] + calls[-1][1])
        return self._replace(calls=tuple(calls))


class Work(NamedTuple):
    """Time between calls; `own` when the worker's event loop had to do it itself."""

    length_us: float
    own: bool


Stage = Call | Tools | Work


class Request(NamedTuple):
    """One request: its begin (after the step's), its measured length, and its stages.

    `prompt_tokens` and `response_tokens` are trained on, `generated` is what its calls generated and
    `group` the prompt that it is a sample of; all as measured.
    """

    begin_us: float
    duration_us: float
    worker: str
    turns: int
    stages: tuple[Stage, ...]
    prompt_tokens: int = 0
    response_tokens: int = 0
    generated: int = 0
    group: str | None = None

    @property
    def tokens(self) -> float:
        """Tokens that are trained on: of the response, what its stages still generate."""
        if not self.generated:
            return self.prompt_tokens + self.response_tokens
        left = sum(stage.tokens or 0 for stage in self.stages if isinstance(stage, Call))
        return self.prompt_tokens + self.response_tokens * left / self.generated


@dataclass(frozen=True)
class StepModel:
    """One step; times are microseconds after its begin.

    Args:
        duration_us: As measured.
        requests: Those that `gen` waited for.
        last_us: When the last of them ended.
        wait_end_us: When the trainer had its samples; None when no `gen` waited for requests.
        looks_us: When the trainer looked for samples; empty when it was not seen to poll.
        poll_us: Distance of further looks.
        slowness: Time per unit of work (a token, where tokens are known), with n calls in the
            replica, is a + b n: (a, b) over all replicas and steps.
        slowness_of: (a, b) of each replica, where they are known.
        slope_error: Standard error of b, in parts of b.
        load_varied: Whether there were enough calls, at loads that differ enough, to fit b.
        slots: How many calls a replica ran at most, where others waited meanwhile; None where none
            had to.
        most_running: How many calls a replica ran at most.
        weights_us: Length of the weight sync.
        uneven_us: What the phases would save if every rank took the ranks' mean.
        after_token_us: Time per token of the phases after `gen`, and its standard error; zeros where
            too few steps are known.
    """

    run: str
    step: int
    duration_us: int
    requests: tuple[Request, ...] = ()
    last_us: float = 0.0
    wait_end_us: float | None = None
    looks_us: tuple[float, ...] = ()
    poll_us: float = POLL_US
    slowness: tuple[float, float] = (1.0, 0.0)
    slowness_of: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    slope_error: float = 0.0
    load_varied: bool = False
    slots: int | None = None
    most_running: int = 0
    weights_us: float = 0.0
    uneven_us: float = 0.0
    after_token_us: tuple[float, float] = (0.0, 0.0)

    @property
    def calls(self) -> int:
        """Number of generate calls: what a replay costs."""
        return sum(isinstance(stage, Call) for r in self.requests for stage in r.stages)

    def replayed(
        self,
        requests: Sequence[Request] | None = None,
        *,
        polls: bool = True,
        slots: int | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, tuple[float, float]] | None = None,
    ) -> float:
        """Return how long the step takes.

        Args:
            requests: In place of those of the step.
            polls: Whether the trainer finds its samples at its next look only.
            slots: How many calls a replica runs at once; as measured when None.
            even: A call goes to the replica with the fewest calls, not to the one it went to.
            beyond: What more calls at once do than were seen, a key of `BEYOND`.
            speeds: In place of `slowness_of`.
        """
        last_us = self.last_end_us(requests, slots=slots, even=even, beyond=beyond, speeds=speeds)
        return self.length_us(last_us, polls=polls) + self.after_change_us(requests)[0]

    def after_change_us(self, requests: Sequence[Request] | None) -> tuple[float, float]:
        """Return how much longer the phases after `gen` take with these requests, and the error."""
        if requests is None or self.wait_end_us is None or not any(self.after_token_us):
            return 0.0, 0.0
        known = [(self._tokens_of.get(id(request)), request) for request in requests]
        more = sum(r.tokens if tokens is None else tokens for tokens, r in known) - self.tokens
        return self.after_token_us[0] * more, self.after_token_us[1] * abs(more)

    @cached_property
    def tokens(self) -> float:
        """Tokens of all requests, as measured."""
        return sum(self._tokens_of.values())

    @cached_property
    def _tokens_of(self) -> dict[int, float]:
        """Tokens of each of the requests, by its `id`."""
        return {id(request): request.tokens for request in self.requests}

    @cached_property
    def _replicas(self) -> list[str]:
        return _replicas_of(self.requests)

    def last_end_us(
        self,
        requests: Sequence[Request] | None = None,
        *,
        slots: int | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, tuple[float, float]] | None = None,
    ) -> float:
        """Return when the last request ends; `replayed` has the arguments."""
        chosen = self.requests if requests is None else requests
        if not chosen:
            return self.last_us
        most = self.most_running or len(chosen)
        known = {**self.slowness_of, **(speeds or {})}
        names = self._replicas if chosen is self.requests else _replicas_of(chosen)
        per_work = {
            name: _times(beyond, *known.get(name, self.slowness), len(chosen), most)
            for name in names
        }
        ends = None if speeds else self._alone_ends_us
        return max(request_ends(chosen, per_work, slots or self.slots, even=even, known_us=ends))

    @cached_property
    def _alone_ends_us(self) -> dict[int, float]:
        """When each of the requests ends if it shares no replica, by its `id`."""
        flat = {name: self.slowness_of.get(name, self.slowness)[0] for name in self._replicas}
        return {id(r): _ends_alone_us(r, flat) for r in self.requests}

    def length_us(self, last_us: float, *, polls: bool = True) -> float:
        """Return how long the step takes if its last request ends then."""
        if self.wait_end_us is None:
            return self.duration_us
        return self.duration_us - self.wait_end_us + self._found(last_us, polls=polls)

    def from_tokens(self) -> float | None:
        """Return how long the step takes if all tokens are the same work, without polling.

        In `replayed` each call has the work that it was seen to be; here it is predicted from its
        tokens, so the difference shows what the model of the replicas' speed is worth.
        """
        calls = [
            stage
            for request in self.requests
            for stage in request.stages
            if isinstance(stage, Call) and stage.replica is not None
        ]
        tokens = sum(call.tokens or 0 for call in calls)
        if not tokens:
            return None
        per_token = sum(call.work for call in calls if call.tokens) / tokens
        requests = [
            request._replace(
                stages=tuple(
                    stage._replace(work=stage.tokens * per_token)
                    if isinstance(stage, Call) and stage.replica is not None and stage.tokens
                    else stage
                    for stage in request.stages
                )
            )
            for request in self.requests
        ]
        return self.replayed(requests, polls=False)

    def _found(self, last_us: float, *, polls: bool) -> float:
        """Return when the trainer has its samples, if the last request ends then."""
        wait_end = self.wait_end_us or 0.0
        if not self.looks_us:
            return last_us + wait_end - self.last_us
        fetching = wait_end - self.looks_us[-1]
        if not polls:
            return last_us + fetching
        place = bisect_left(self.looks_us, last_us - 1)
        if place < len(self.looks_us):
            return self.looks_us[place] + fetching
        further = -((self.looks_us[-1] - (last_us - 1)) // self.poll_us)
        return self.looks_us[-1] + further * self.poll_us + fetching


class _Replica:
    """A replica in a replay: the calls that run share its speed, others wait in order."""

    __slots__ = (
        "at_us",
        "check_us",
        "decoding",
        "done",
        "per_work",
        "running",
        "times",
        "waiting",
    )

    def __init__(self, times: Sequence[float]) -> None:
        self.running = 0
        self.times = times
        self.per_work = times[0]
        self.waiting: deque[tuple[int, Call]] = deque()
        # By the amount of work, done per call since the beginning, at which each is finished.
        self.decoding: list[tuple[float, int, Call]] = []
        self.done = 0.0
        self.at_us = 0.0
        self.check_us = math.inf


# What happens next: a call arrives at its replica, decodes there, or a replica may be done with one.
_ARRIVES, _DECODES, _DONE = range(3)


def _replay(
    requests: Sequence[Request],
    replicas: Mapping[str, _Replica],
    slots: float,
    *,
    even: bool,
) -> list[float]:
    """Let requests run against replicas; return when each ends.

    One loop over a heap of what happens next: a report runs it a hundred thousand times.
    """
    push, pop, number = heapq.heappush, heapq.heappop, count().__next__
    heap: list[tuple[float, int, int, int, Any, Any]] = []
    upcoming = [iter(request.stages) for request in requests]
    ends_us = [0.0] * len(requests)

    def go_on(now_us: float, place: int) -> None:
        """Find out when the request needs a replica next, or ends."""
        for stage in upcoming[place]:
            if not isinstance(stage, Call):
                now_us += stage.length_us
            elif stage.replica is None:
                now_us += _alone_us(stage, {})
            else:
                replica = None if even else replicas[stage.replica]
                push(heap, (now_us + stage.before_us, number(), _ARRIVES, place, stage, replica))
                return
        ends_us[place] = now_us

    for place, request in enumerate(requests):
        go_on(request.begin_us, place)
    while heap:
        now_us, _, what, place, call, replica = pop(heap)
        if replica is None:
            replica = min(replicas.values(), key=lambda each: each.running + len(each.waiting))
        elif what == _DONE and now_us != replica.check_us:
            continue
        if replica.running:
            replica.done += (now_us - replica.at_us) / replica.per_work
        replica.at_us = now_us
        decoding = replica.decoding
        if what == _ARRIVES:
            replica.waiting.append((place, call))
        elif what == _DECODES:
            push(decoding, (replica.done + call.work, place, call))
        else:
            replica.check_us = math.inf
            if (decoding[0][0] - replica.done) * replica.per_work <= _SAME_US:
                _, place, call = pop(decoding)
                replica.running -= 1
                replica.per_work = replica.times[replica.running]
                go_on(now_us + call.after_us, place)
        while replica.waiting and replica.running < slots:
            place, call = replica.waiting.popleft()
            replica.running += 1
            replica.per_work = replica.times[replica.running]
            push(heap, (now_us + call.fixed_us, number(), _DECODES, place, call, replica))
        if decoding and what != _ARRIVES:
            # Calls that join make it later: then this look finds nothing, and the next one is set.
            left = decoding[0][0] - replica.done
            next_us = now_us + left * replica.per_work if left > 0 else now_us
            if next_us < replica.check_us:
                replica.check_us = next_us
                push(heap, (next_us, number(), _DONE, 0, None, replica))
    return ends_us


def request_ends(
    requests: Sequence[Request],
    per_work: Mapping[str, Sequence[float]],
    slots: int | None,
    *,
    even: bool = False,
    known_us: Mapping[int, float] | None = None,
) -> list[float]:
    """Replay requests and return when each ends.

    Args:
        requests: At most one generate call of each runs at a time.
        per_work: By replica, time per unit of work with so many calls in it, from none to all.
        slots: How many calls a replica runs at once; None for all.
        even: A call goes to the replica with the fewest calls.
        known_us: When some of the requests end if they share no replica, by their `id`.
    """
    ranges = [(min(times), max(times)) for times in per_work.values()]
    flat = all(low == high for low, high in ranges)
    if slots is None and flat and (not even or len(set(ranges)) <= 1):
        known = known_us or {}
        alone = {name: times[0] for name, times in per_work.items()}
        return [known[id(r)] if id(r) in known else _ends_alone_us(r, alone) for r in requests]
    replicas = {name: _Replica(times) for name, times in per_work.items()}
    return _replay(requests, replicas, slots or math.inf, even=even)


@lru_cache(256)
def _times(beyond: str, a: float, b: float, calls: int, most: int) -> list[float]:
    """Return the time per unit of work with so many calls, from none to all."""
    return [BEYOND[beyond](a, b, running, most) for running in range(calls + 1)]


def _replicas_of(requests: Sequence[Request]) -> list[str]:
    names = {stage.replica for r in requests for stage in r.stages if isinstance(stage, Call)}
    return sorted(name for name in names if name is not None)


def _ends_alone_us(request: Request, per_work: Mapping[str, float]) -> float:
    end_us = request.begin_us
    for stage in request.stages:
        end_us += _alone_us(stage, per_work)
    return end_us


def _alone_us(stage: Stage, per_work: Mapping[str, float]) -> float:
    """Return the length of a stage that does not share a replica."""
    if isinstance(stage, Call):
        work_us = stage.work if stage.replica is None else stage.work * per_work[stage.replica]
        return stage.before_us + stage.fixed_us + work_us + stage.after_us
    return stage.length_us


def engine_interval(call: Mapping[str, Any]) -> tuple[int, int]:
    """Return when the engine had a call of the table `engine_calls`, on the client's clock.

    Where the server's interval does not fit into the client's (another host's clock), it is put into
    the middle of it.
    """
    begin, length = call["engine_begin_us"], min(call["engine_duration_us"], call["duration_us"])
    if begin < call["begin_us"] or begin + length > call["end_us"]:
        begin = call["begin_us"] + (call["duration_us"] - length) // 2
    return begin, begin + length


def step_models(tables: Tables, steps: Sequence[int]) -> list[StepModel]:
    """Rebuild these steps, as far as they are finished."""
    if not steps:
        return []
    within = _among(steps)
    wholes = tables.rows(
        f"""
        WITH timed AS (
            SELECT run, step, end_us AS gen_end_us, begin_us AS gen_begin_us
            FROM gens WHERE in_step AND {within}
        ), waits AS (
            SELECT p.run, p.step, min(p.begin_us) AS wait_begin_us, max(p.end_us) AS wait_end_us
            FROM phases AS p JOIN timed AS g ON g.run = p.run AND g.step = p.step
                AND p.begin_us >= gen_begin_us AND p.end_us <= gen_end_us
            WHERE p.phase = 'sample_wait' GROUP BY p.run, p.step
        ), syncs AS (
            SELECT run, step, sum(duration_us) AS weights_us FROM phases
            WHERE phase = 'update_weights' AND parent = 'step' AND {within} GROUP BY run, step
        )
        SELECT s.run, s.step, s.begin_us, s.duration_us, g.gen_end_us, w.wait_begin_us,
            w.wait_end_us, coalesce(y.weights_us, 0) AS weights_us
        FROM steps AS s LEFT JOIN timed AS g USING (run, step) LEFT JOIN waits AS w USING (run, step)
        LEFT JOIN syncs AS y USING (run, step)
        WHERE s.finished AND s.{SYNCHRONOUS} AND {_among(steps, "s.step")} ORDER BY s.run, s.step
        """
    )
    rollouts = _rollouts(tables, steps)
    looks = _looks(tables, steps)
    uneven = _uneven(tables, steps)
    phases = _after_us(tables, steps)
    runs = dict.fromkeys(run for run, _ in rollouts)
    prepared = {key: _by_replica(rollout.calls) for key, rollout in rollouts.items()}
    speeds = {
        run: _speeds([groups for key, groups in prepared.items() if key[0] == run]) for run in runs
    }
    models: list[StepModel] = []
    for whole in wholes:
        key = whole["run"], whole["step"]
        model = StepModel(
            *key,
            whole["duration_us"],
            weights_us=whole["weights_us"],
            uneven_us=uneven.get(key, 0),
        )
        if key in rollouts:
            model = replace(model, **speeds[key[0]]._asdict())
        rolled = _with_rollout(
            model, whole, rollouts.get(key), prepared.get(key, {}), looks.get(key, [])
        )
        models.append(rolled)
    after = {
        run: _after_token_us(
            [
                (model.tokens, phases.get((run, model.step), 0.0))
                for model in models
                if model.run == run and model.requests
            ]
        )
        for run in runs
    }
    return [replace(m, after_token_us=after.get(m.run, (0.0, 0.0))) for m in models]


def _after_us(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], float]:
    """Add up the phases of each step that work on its tokens."""
    names = ", ".join(f"'{name}'" for name in _OF_TOKENS)
    rows = tables.rows(
        "SELECT run, step, sum(duration_us) AS after_us FROM phases WHERE parent = 'step' "
        f"AND NOT validate AND phase IN ({names}) AND {_among(steps)} GROUP BY run, step"
    )
    return {(row["run"], row["step"]): float(row["after_us"] or 0) for row in rows}


def _after_token_us(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the time per token of the phases after `gen`, and its standard error.

    The prior is that most of it goes with the tokens; steps that differ in tokens replace it.
    """
    if len(steps) < _TOKEN_STEPS or not all(tokens for tokens, _ in steps):
        return 0.0, 0.0
    tokens_mean, time_mean = fmean(t for t, _ in steps), fmean(time for _, time in steps)
    whole = time_mean / tokens_mean
    part, deviation = (value * whole for value in _TOKEN_PART)
    spread = sum((tokens - tokens_mean) ** 2 for tokens, _ in steps)
    if not spread or not whole:
        return part, deviation
    slope = sum((t - tokens_mean) * (time - time_mean) for t, time in steps) / spread
    rests = sum((time - time_mean - slope * (t - tokens_mean)) ** 2 for t, time in steps)
    # Rests of few steps are too small by chance: no line is known better than to 2 % of the time.
    noise = rests / (len(steps) - 2) + (0.02 * time_mean) ** 2
    known = spread / noise
    before = 1 / deviation**2
    both = (slope * known + part * before) / (known + before)
    return min(max(both, 0.0), whole), (known + before) ** -0.5


def _among(steps: Sequence[int], column: str = "step") -> str:
    return f"{column} IN ({', '.join(str(int(step)) for step in steps)})"


def _with_rollout(
    model: StepModel,
    whole: Mapping[str, Any],
    rollout: _Rollout | None,
    groups: Mapping[str, Sequence[dict[str, Any]]],
    looks: Sequence[int],
) -> StepModel:
    """Add what `gen` waited for, when it waited for requests."""
    begin, gen_end = whole["begin_us"], whole["gen_end_us"]
    if rollout is None or gen_end is None:
        return model
    seen = [row for row in rollout.requests if row["end_us"] <= gen_end + GEN_TOLERANCE_US]
    if not seen:
        return model
    last = max(row["end_us"] for row in seen)
    wait_end = max(whole["wait_end_us"] or gen_end, last)
    peak = max(map(_peak, groups.values()), default=0)
    queued = sum(_waited_us(group, peak) for group in groups.values())
    polled, poll = _polled(looks, whole["wait_begin_us"], wait_end, last)
    model = replace(
        model,
        last_us=last - begin,
        wait_end_us=wait_end - begin,
        looks_us=tuple(look - begin for look in polled),
        poll_us=poll,
        most_running=peak,
    )

    def with_requests(slots: int | None) -> StepModel:
        requests = tuple(_request(row, begin, rollout, queued=slots is None) for row in seen)
        return replace(model, requests=requests, slots=slots)

    served = sum(call["engine_duration_us"] or 0 for call in rollout.calls)
    if peak and queued > _QUEUED_SHARE * served:
        limited = with_requests(peak)
        replayed = limited.replayed(polls=False)
        if abs(replayed - with_requests(None).replayed(polls=False)) <= _SLOTS_FIT * last:
            return limited
    return with_requests(None)


class _Rollout(NamedTuple):
    """The rows of one step."""

    requests: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    calls_of: dict[tuple[str, str], list[dict[str, Any]]]
    tools_of: dict[tuple[str, str], list[dict[str, Any]]]


def _rollouts(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], _Rollout]:
    """Read requests, generate calls and tool calls, by step."""
    own = f"NOT validate AND request_id IS NOT NULL AND {_among(steps)}"
    rollouts: dict[tuple[str, int], _Rollout] = {}
    for row in tables.rows(
        "SELECT run, step, name, request_id, begin_us, end_us, duration_us, turns, reward_us, "
        "prompt_tokens, response_tokens, uid "
        f"FROM requests WHERE finished AND {own} ORDER BY run, step, begin_us, name, request_id"
    ):
        key = row["run"], row["step"]
        rollouts.setdefault(key, _Rollout([], [], {}, {})).requests.append(row)
    for query in (
        (
            "SELECT run, step, name, request_id, turn, begin_us, end_us, duration_us, engine_name, "
            "engine_begin_us, engine_duration_us, queue_us, prefill_us, decode_us, response_tokens "
            "FROM engine_calls"
        ),
        (
            "SELECT run, step, name, request_id, turn, begin_us, end_us, duration_us, tool "
            "FROM tool_calls"
        ),
    ):
        for row in tables.rows(
            f"{query} WHERE duration_us IS NOT NULL AND {own} ORDER BY run, step, begin_us, end_us"
        ):
            rollout = rollouts.get((row["run"], row["step"]))
            if rollout is None:
                continue
            generates = "engine_name" in row
            if generates:
                rollout.calls.append(row)
            of = rollout.calls_of if generates else rollout.tools_of
            of.setdefault((row["name"], row["request_id"]), []).append(row)
    return rollouts


def _looks(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    """Find when the trainer looked for samples: its first TransferQueue call after a while."""
    looks: dict[tuple[str, int], list[int]] = {}
    for row in tables.rows(
        f"""
        WITH calls AS (
            SELECT t.run, t.step, t.begin_us, p.begin_us AS wait_begin_us,
                lag(t.end_us) OVER (PARTITION BY t.run, t.step ORDER BY t.begin_us) AS before_us
            FROM transfers AS t JOIN phases AS p ON p.run = t.run AND p.step = t.step
                AND p.name = t.name AND p.phase = 'sample_wait' AND p.parent = 'gen'
                AND NOT p.validate AND t.begin_us BETWEEN p.begin_us AND p.end_us
            WHERE t.role = 'trainer' AND {_among(steps, "t.step")}
        )
        SELECT run, step, begin_us FROM calls
        WHERE before_us IS NULL OR begin_us - before_us > {_APART_US} ORDER BY run, step, begin_us
        """
    ):
        looks.setdefault((row["run"], row["step"]), []).append(row["begin_us"])
    return looks


def _polled(
    looks: Sequence[int], wait_begin: int | None, wait_end: int, last: int
) -> tuple[list[int], float]:
    """Return when the trainer looked, up to the look that found all samples, and the distance.

    Where its TransferQueue calls were not recorded, it is taken to poll as verl does, if that
    agrees with when it had its samples.
    """
    found = [look for look in looks if look < wait_end]
    apart = [after - before for before, after in pairwise(found)]
    poll = median(apart) if apart else POLL_US
    polls = found and wait_begin is not None and found[0] - wait_begin <= _APART_US
    if polls and found[-1] >= last > found[-1] - 1.5 * poll:
        return found, poll
    if looks or wait_begin is None or not 0 <= wait_end - last <= POLL_US:
        return [], poll
    return list(range(wait_end, wait_begin, -POLL_US))[::-1], poll


def _uneven(tables: Tables, steps: Sequence[int]) -> dict[tuple[str, int], float]:
    """Sum up, over a step's phases, how much longer its slowest rank took than the mean.

    A rank waits inside its batches for those that begin theirs later, if it then takes as much longer
    for them; that is not its own time.
    """
    uneven: dict[tuple[str, int], float] = {}
    for row in tables.rows(
        f"""
        WITH ranks AS (
            SELECT p.run, p.step, p.phase, p.begin_us, r.event, r.name,
                sum(r.duration_us) AS rank_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.family = 'workers' AND r.begin_us >= p.begin_us AND r.end_us <= p.end_us
            WHERE p.parent = 'step' AND {_among(steps, "p.step")} GROUP BY ALL
        ), passes AS (
            SELECT p.run, p.step, p.begin_us, r.name, r.event, r.begin_us AS pass_us, r.duration_us,
                row_number() OVER (PARTITION BY p.run, p.step, p.begin_us, r.name, r.event
                    ORDER BY r.begin_us) AS place
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.event IN ({_TOGETHER}) AND r.begin_us >= p.begin_us AND r.end_us <= p.end_us
            WHERE p.parent = 'step' AND {_among(steps, "p.step")}
        ), waits AS (
            SELECT run, step, begin_us, name, event, least(max(pass_us) OVER together - pass_us,
                duration_us - min(duration_us) OVER together) AS wait_us
            FROM passes WINDOW together AS (PARTITION BY run, step, begin_us, event, place)
        ), waited AS (
            -- Each event contains the next one, and so its waiting.
            SELECT run, step, begin_us, name, max(wait_us) AS wait_us FROM (
                SELECT run, step, begin_us, name, event, sum(wait_us) AS wait_us
                FROM waits GROUP BY ALL) GROUP BY ALL
        ), own AS (
            SELECT k.*, rank_us - coalesce(wait_us, 0) AS own_us
            FROM ranks AS k LEFT JOIN waited AS w USING (run, step, begin_us, name)
        ), events AS (
            SELECT run, step, phase, begin_us, max(rank_us) AS most_us,
                max(own_us) - avg(own_us) AS uneven_us
            FROM own GROUP BY run, step, phase, begin_us, event
        )
        SELECT run, step, max_by(uneven_us, most_us) AS uneven_us
        FROM events GROUP BY run, step, phase, begin_us ORDER BY run, step, begin_us
        """
    ):
        key = row["run"], row["step"]
        uneven[key] = uneven.get(key, 0.0) + row["uneven_us"]
    return uneven


def _by_replica(calls: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the calls that a replica ran; add `arrived_us`, `started_us`, `decoding_us`, `ended_us`."""
    replicas: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        if call["engine_duration_us"] is None:
            continue
        begin, end = engine_interval(call)
        started = min(begin + (call["queue_us"] or 0), end)
        decoding = min(started + (call["prefill_us"] or 0), end)
        call |= {"arrived_us": begin, "started_us": started, "decoding_us": decoding}
        # The server's span goes on until its event loop has noticed, when others run already.
        decoded = decoding + call["decode_us"] if call["decode_us"] else end
        call["ended_us"] = min(decoded, end)
        replicas.setdefault(call["engine_name"] or "", []).append(call)
    return replicas


class _Speeds(NamedTuple):
    """How fast replicas are: (a, b) of all, of each, and the error of b in parts of it."""

    slowness: tuple[float, float] = (1.0, 0.0)
    slowness_of: Mapping[str, tuple[float, float]] = {}
    slope_error: float = 0.0
    load_varied: bool = False


class _Seen(NamedTuple):
    """What a call shows: mean load of its passes, its tokens, its decoding time."""

    load: float
    tokens: float
    time_us: float


def _speeds(steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> _Speeds:
    """Find out how load slows replicas down, over all steps, and how much work each call was.

    Adds `work` to the calls.  A pass gives each call a token, so the load that counts for a call is
    the mean over its passes; over its time it would be higher, as passes with many calls take longer.

    Args:
        steps: The calls of each step by replica, of one run.
    """
    found = _Speeds()
    for _ in range(_ROUNDS):
        seen: dict[str, list[_Seen]] = {}
        for groups in steps:
            for replica, group in groups.items():
                a, b = found.slowness_of.get(replica, found.slowness)
                _integrate(group, _loads(a, b))
                loads = [call["work"] for call in group]
                _integrate(group, _passes(a, b))
                known = seen.setdefault(replica, [])
                known += [
                    _Seen(load / call["work"], _decoded_tokens(call), _decoded_us(call))
                    for load, call in zip(loads, group, strict=True)
                    if _decoded_us(call) > 0 and (call["response_tokens"] or 0) > 1
                ]
        found = _fitted(seen)
        if not found.slowness[1]:
            break
    for groups in steps:
        for replica, group in groups.items():
            _integrate(group, _passes(*found.slowness_of.get(replica, found.slowness)))
    return found


def _passes(a: float, b: float) -> Callable[[int], float]:
    return lambda running: 1 / (a + b * running)


def _loads(a: float, b: float) -> Callable[[int], float]:
    return lambda running: running / (a + b * running)


def _decoded_us(call: Mapping[str, Any]) -> float:
    return call["ended_us"] - call["decoding_us"]


def _decoded_tokens(call: Mapping[str, Any]) -> int:
    # The first token is prefill's, where that is known.
    return call["response_tokens"] - (call["prefill_us"] is not None)


def _fitted(seen: Mapping[str, Sequence[_Seen]]) -> _Speeds:
    """Fit time per token = a + b load to all replicas, each with a factor of its own, then to each.

    The replicas' factors and lines are shrunk towards what all of them have in common.
    """
    calls = [call for group in seen.values() for call in group]
    tokens = sum(call.tokens for call in calls)
    if not tokens:
        return _Speeds()
    mean_us = sum(call.time_us for call in calls) / len(calls)
    loads = [call.load for call in calls]
    varied = len(calls) >= _FITTED_CALLS and max(loads) >= _LOAD_RATIO * min(loads)
    factors = dict.fromkeys(seen, 1.0)
    line, error = (mean_us * len(calls) / tokens, 0.0), 0.0
    for _ in range(_ROUNDS if len(seen) > 1 else 1):
        scaled = [
            call._replace(time_us=call.time_us / factors[replica])
            for replica, group in seen.items()
            for call in group
        ]
        line, error = _line(scaled, sloped=varied)
        for replica, group in seen.items():
            expected = sum(call.tokens * (line[0] + line[1] * call.load) for call in group)
            prior = _SHRUNK_CALLS * mean_us
            factors[replica] = (sum(call.time_us for call in group) + prior) / (expected + prior)
    own = {
        replica: _own_line(group, (factors[replica] * line[0], factors[replica] * line[1]), calls)
        for replica, group in seen.items()
    }
    return _Speeds(line, own, error, varied)


def _line(calls: Sequence[_Seen], *, sloped: bool) -> tuple[tuple[float, float], float]:
    """Fit time per token = a + b load, each token once; b = 0 where load does not slow down.

    Returns:
        (a, b), neither of them negative; the standard error of b, in parts of b.
    """
    tokens = sum(call.tokens for call in calls)
    time_mean = sum(call.time_us for call in calls) / tokens
    load_mean = sum(call.tokens * call.load for call in calls) / tokens
    spread = sum(call.tokens * (call.load - load_mean) ** 2 for call in calls)
    if not sloped or not spread:
        return (time_mean, 0.0), 0.0
    b = sum((c.load - load_mean) * (c.time_us - c.tokens * time_mean) for c in calls) / spread
    if b * load_mean < 0.02 * time_mean:
        return (time_mean, 0.0), 0.0
    a = time_mean - b * load_mean
    # From the rests themselves, as long calls and loaded ones scatter otherwise.
    rests = sum(
        ((c.load - load_mean) * (c.time_us - c.tokens * (a + b * c.load))) ** 2 for c in calls
    )
    error = rests**0.5 / spread / b
    return ((a, b) if a > 0 else (0.0, time_mean / load_mean)), error


def _own_line(
    calls: Sequence[_Seen], prior: tuple[float, float], everybody: Sequence[_Seen]
) -> tuple[float, float]:
    """Fit a replica's line, with so many calls of the prior's line among its own."""
    if not prior[1]:
        return prior
    share = _SHRUNK_CALLS / len(everybody)
    made = [
        _Seen(
            call.load, call.tokens * share, call.tokens * share * (prior[0] + prior[1] * call.load)
        )
        for call in everybody
    ]
    both = [*calls, *made]
    line, _ = _line(both, sloped=True)
    return line


def _peak(calls: Iterable[Mapping[str, Any]]) -> int:
    """Return the most calls that ran at once; one that begins when another ends follows it."""
    changes = [
        change
        for call in calls
        if call["ended_us"] > call["started_us"]
        for change in ((call["started_us"], 1), (call["ended_us"], -1))
    ]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _waited_us(calls: Iterable[Mapping[str, Any]], full: int) -> float:
    """Add up how long calls waited while so many ran."""
    changes = sorted(
        change
        for call in calls
        for change in (
            (call["arrived_us"], 0, 1),
            (call["started_us"], 1, -1),
            (call["ended_us"], -1, 0),
        )
    )
    waited = running = waiting = 0
    for (now_us, begun, come), (next_us, *_) in pairwise(changes):
        running += begun
        waiting += come
        if running >= full:
            waited += waiting * (next_us - now_us)
    return waited


def _integrate(calls: Sequence[dict[str, Any]], speed: Callable[[int], float]) -> None:
    """Set each call's `work` to the integral of speed(running calls) over its decoding."""
    points = sorted(
        (call[moment], order, place)
        for place, call in enumerate(calls)
        for order, moment in enumerate(("started_us", "decoding_us", "ended_us"))
    )
    done, running, before = 0.0, 0, points[0][0] if points else 0
    for moment, order, place in points:
        if running:
            done += (moment - before) * speed(running)
        before = moment
        if order == 0:
            running += 1
        elif order == 1:
            calls[place]["work"] = done
        else:
            running -= 1
            calls[place]["work"] = done - calls[place]["work"]


def _request(row: Mapping[str, Any], begin_us: int, rollout: _Rollout, *, queued: bool) -> Request:
    """Make a request's chain; its lengths add up to the measured one.

    `queued` keeps the queues as they were seen, and does not leave them to the replicas.
    """
    key = row["name"], row["request_id"]
    tools = groupby(rollout.tools_of.get(key, ()), key=lambda call: call["turn"])
    stages: list[Stage] = []
    cursor = row["begin_us"]
    items: list[tuple[int, int, Stage | None]] = [
        (call["begin_us"], call["end_us"], _call(call, queued=queued))
        for call in rollout.calls_of.get(key, ())
    ]
    for turn, group in tools:
        calls = list(group)
        first, last = calls[0]["begin_us"], max(call["end_us"] for call in calls)
        lengths = tuple(
            (call["begin_us"] - first, call["duration_us"], call["tool"] or "tool")
            for call in calls
        )
        items.append((first, last, Tools(lengths, turn)))
    for first, last, stage in sorted(items, key=lambda item: item[:2]):
        end = min(last, row["end_us"])
        if end <= cursor:
            continue
        if first > cursor:
            stages.append(Work(first - cursor, own=True))
        # What ran beside another call, or after the request, keeps only the time that it adds.
        whole = first >= cursor and end == last
        stages.append(stage if whole and stage else Work(end - max(first, cursor), own=False))
        cursor = end
    rest = row["end_us"] - cursor
    reward = min(row["reward_us"] or 0, rest)
    stages += [Work(rest - reward, own=True), Work(reward, own=False)]
    generated = sum(stage.tokens or 0 for stage in stages if isinstance(stage, Call))
    return Request(
        row["begin_us"] - begin_us,
        row["duration_us"],
        row["name"],
        row["turns"] or 0,
        tuple(stages),
        row["prompt_tokens"] or 0,
        row["response_tokens"] or generated,
        generated,
        row["uid"],
    )


def _call(call: Mapping[str, Any], *, queued: bool) -> Call:
    if "work" not in call:
        return Call(0.0, call["duration_us"], 0.0, 0.0, call["duration_us"], None, call["turn"])
    queue_us = call["started_us"] - call["arrived_us"] if queued else 0.0
    return Call(
        call["arrived_us"] + queue_us - call["begin_us"],
        call["decoding_us"] - call["started_us"],
        call["work"],
        call["end_us"] - call["ended_us"],
        call["duration_us"],
        call["engine_name"] or "",
        call["turn"],
        call["response_tokens"],
        queue_us,
    )
