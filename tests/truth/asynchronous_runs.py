"""Asynchronous runs made up in whole milliseconds, whose ledger is counted along the way.

A trainer and replicas, on devices of their own or on the same ones, run a queue of samples.  The truth
is summed up here while the clock advances, and shares no code with the analyses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from truth.engine_readings import iterations
from truth.rows import event_row

__all__ = ["Call", "Plan", "Sample", "Simulation", "events_of", "iterations_of"]

MS = 1_000
EPOCH = 1_795_228_400_000_000
_ROW_MS = 100
# Rounding of tokens that take no whole number of milliseconds.
_SAME = 1e-9


def _stages(number: int) -> tuple[int, ...]:
    return 300 + 70 * (number % 5), 90, 200 + 40 * (number % 3)


@dataclass(frozen=True)
class Plan:
    """What is run; lengths are milliseconds.

    Args:
        gens: In how many mini-batches a step consumes its samples, with one `gen` for each.
        ahead: Samples that are dispatched before the first step, beyond what a step consumes.
        stages: Of sample n: generate calls (first, third, …) and tool calls in turn.
        stale: Samples that the trainer drops instead of consuming; each is replaced.
        redo: Whether a call that was aborted begins anew; otherwise it continues.
        separate: Whether the replicas, of one device each, have devices of their own.
        sync_every: Steps from one weight sync to the next.
        rollouter: Whether samples are dispatched after a weight sync, by a process of its own.
        at_once: How many of them run at once; 0 for all.
        one_step_off: Whether each step syncs and dispatches the next batch before it trains, and notes what
            it consumes after that.
        pause_ms: From when aborted calls could go on until they are sent again.
        slowdown: By how much each further call in its replica lengthens the time per token.
        bend: Above so many calls, each one lengthens it by `steeper` more.
        prefill_ms: Of each call (attempt); the replica's other calls stand still meanwhile.
    """

    steps: int = 4
    batch: int = 4
    ahead: int = 4
    replicas: int = 2
    trainer_devices: int = 2
    gens: int = 1
    train_ms: int = 900
    sync_ms: int = 120
    look_ms: int = 7
    fetch_ms: int = 2
    stages: Callable[[int], tuple[int, ...]] = _stages
    stale: frozenset[int] = frozenset()
    redo: bool = False
    separate: bool = True
    sync_every: int = 1
    slowdown: float = 0.0
    rollouter: bool = False
    at_once: int = 0
    one_step_off: bool = False
    pause_ms: int = 0
    bend: int = 0
    steeper: float = 0.0
    prefill_ms: int = 0

    def pass_ms(self, calls: int) -> float:
        """Return how long a pass takes that gives each of so many calls a token."""
        return 1 + self.slowdown * (calls - 1) + self.steeper * max(calls - self.bend, 0)


@dataclass
class Call:
    """One attempt of a generate call: when it was served, by which weights, and what it cost by step."""

    turn: int
    attempt: int
    begin: int
    version: int
    end: int | None = None
    aborted: bool = False
    tokens: int = 0
    progress: float = 0.0
    prefill: int = 0
    decodes: int | None = None
    seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class Sample:
    """One request."""

    number: int
    step: int
    begin: int
    replica: int
    lengths: tuple[int, ...]
    stage: int = 0
    done: float = 0
    attempt: int = 0
    paused: int = 0
    calls: list[Call] = field(default_factory=list)
    tools: list[tuple[int, int, int]] = field(default_factory=list)
    stage_begin: int = 0
    end: int | None = None
    fate: str = "unconsumed"
    taken: int = 0
    consumed_step: int | None = None
    trainer_version: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return 20 + 7 * (self.number % 9)

    @property
    def tokens(self) -> dict[int, int]:
        """Tokens that an abort did not discard, by the version that made them."""
        found: dict[int, int] = {}
        for call in self.calls:
            if call.tokens:
                found[call.version] = found.get(call.version, 0) + call.tokens
        return found

    @property
    def calls_engine(self) -> bool:
        return self.end is None and self.stage % 2 == 0

    @property
    def call(self) -> Call | None:
        """The attempt that is being served."""
        last = self.calls[-1] if self.calls else None
        return last if last is not None and last.end is None else None


class Simulation:
    """One run: `seconds` by (pool, step, account), `timers` of the trainer, and the samples.

    `passes` are, by replica, the stretches in which it was busy: begin, length, and of each millisecond its
    passes, the tokens that they gave, and whether it was in prefill.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pool = "rollout" if plan.separate else "shared"
        self.samples: list[Sample] = []
        # Those that no step has taken or dropped: the others do nothing any more.
        self.untaken: list[Sample] = []
        self.timers: list[tuple[str, int, int, int]] = []
        self.seconds: dict[tuple[str, int, str], float] = {}
        self.passes: dict[int, list[tuple[int, int, float, float, bool]]] = {}
        self.now = 0
        self.step = 1
        self.version = 0
        self.serves = True
        self.allowed = 0
        self._dispatch(plan.ahead)
        for self.step in range(1, plan.steps + 1):
            self._run_step()
        for sample in self.samples:
            for call in sample.calls:
                wasted = call.aborted and plan.redo
                account = "generating_aborted" if wasted else _ACCOUNTS[sample.fate]
                for step, seconds in call.seconds.items():
                    self._add(self.pool, step, account, seconds)

    @property
    def consumed(self) -> list[Sample]:
        """The samples that a step took, in the order of their dispatch."""
        return [sample for sample in self.samples if sample.fate == "consumed"]

    def taken_by_step(self) -> dict[int | None, list[Sample]]:
        """Return the consumed samples of each step."""
        found: dict[int | None, list[Sample]] = {}
        for sample in self.consumed:
            found.setdefault(sample.consumed_step, []).append(sample)
        return found

    def _run_step(self) -> None:
        begin = self.now
        if self.step == 1 or not (self.plan.rollouter or self.plan.one_step_off):
            self._dispatch(self.plan.batch)
        for _ in range(self.plan.gens):
            self._serve(True)
            sampling = self.now
            while not self._sampled():
                # The looks until something ends find nothing new.
                looks = ceil((self._unchanged_ms() or 1) / self.plan.look_ms)
                self._pass(looks * self.plan.look_ms, "waiting_for_samples")
            self._pass(self.plan.fetch_ms, "waiting_for_samples")
            self._note("gen", sampling)
            if self.plan.one_step_off:
                self._sync()
                self._dispatch(self.plan.batch)
                for sample in self.taken_by_step()[self.step]:
                    sample.taken = self.now + 1
            self._serve(self.plan.separate)
            for phase, share in (("old_log_prob", 3), ("update_actor", 6)):
                trained = self.now
                self._pass(self.plan.train_ms * share // 9 // self.plan.gens, "training")
                self._note(phase, trained)
        if not self.plan.one_step_off and self._sync() and self.plan.rollouter:
            self._dispatch(self.plan.batch * self.plan.sync_every)
        self._note("step", begin)

    def _sync(self) -> bool:
        """Sync the weights, if they are to be synced in this step; return whether they are."""
        if self.step % self.plan.sync_every:
            return False
        synced = self.now
        self._serve(False)
        self._pass(self.plan.sync_ms, "weight_sync")
        self.version = self.step
        self._note("update_weights", synced)
        return True

    def _note(self, event: str, begin: int) -> None:
        self.timers.append((event, self.step, begin, self.now))

    def _dispatch(self, count: int) -> None:
        self.allowed += count
        self._fill()

    def _fill(self) -> None:
        while self.allowed and (
            not self.plan.at_once
            or sum(sample.end is None for sample in self.untaken) < self.plan.at_once
        ):
            self.allowed -= 1
            number = len(self.samples)
            replica = number % self.plan.replicas
            lengths = self.plan.stages(number)
            self.samples.append(Sample(number, self.step, self.now, replica, lengths))
            self.untaken.append(self.samples[-1])
        self._serve(self.serves)

    def _serve(self, serves: bool) -> None:
        """Let the replicas begin or end all calls that wait for them."""
        self.serves = serves
        for sample in self.untaken:
            if not sample.calls_engine:
                continue
            if serves and sample.call is None and not sample.paused:
                sample.calls.append(Call(sample.stage // 2, sample.attempt, self.now, self.version))
            elif not serves and sample.call is not None:
                call = sample.calls[-1]
                call.end, call.aborted = self.now, True
                sample.attempt += 1
                sample.paused = self.plan.pause_ms
                if self.plan.redo:
                    sample.done = call.tokens = 0

    def _sampled(self) -> bool:
        """Look for finished samples, drop stale ones, and consume the oldest."""
        done = [sample for sample in self.untaken if sample.end is not None]
        for sample in done:
            if sample.number in self.plan.stale:
                sample.fate, sample.taken = "dropped", self.now
                self._dispatch(1)
        self._forget()
        ready = [s for s in done if s.fate == "unconsumed"][: self.plan.batch // self.plan.gens]
        if len(ready) < self.plan.batch // self.plan.gens:
            return False
        for sample in ready:
            sample.fate, sample.consumed_step, sample.taken = "consumed", self.step, self.now
            sample.trainer_version = self.version
        self._forget()
        return True

    def _forget(self) -> None:
        self.untaken = [sample for sample in self.untaken if sample.fate == "unconsumed"]

    def _add(self, pool: str, step: int, account: str, seconds: float) -> None:
        key = (pool, step, account)
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    def _pass(self, length: int, trainer: str) -> None:
        """Let so much time pass, in stretches in which no stage and no pause ends."""
        while length:
            stretch = min(length, self._unchanged_ms() or length)
            self._account(trainer, stretch)
            self._advance(stretch)
            length -= stretch

    def _find_speeds(self) -> None:
        """Find the calls of each replica, which is in prefill, how many decode, and how fast they do."""
        self.calls_of: dict[int, list[Call]] = {}
        for sample in self.untaken:
            if sample.end is None and (call := sample.call) is not None:
                self.calls_of.setdefault(sample.replica, []).append(call)
        self.prefills: dict[int, Call] = {}
        self.decoding: dict[int, int] = {}
        self.speeds: dict[int, float] = {}
        for replica, calls in self.calls_of.items():
            new = next((each for each in calls if each.prefill < self.plan.prefill_ms), None)
            if new is not None:
                self.prefills[replica] = new
            self.decoding[replica] = sum(each.prefill == self.plan.prefill_ms for each in calls)
            self.speeds[replica] = 1 / self.plan.pass_ms(len(calls)) if new is None else 0.0

    def _unchanged_ms(self) -> int | None:
        """Return how long it takes until a prefill, a stage or a pause ends; None if none does."""
        self._find_speeds()
        lengths = [self.plan.prefill_ms - call.prefill for call in self.prefills.values()]
        for sample in self.untaken:
            if self.serves and sample.paused:
                lengths.append(sample.paused)
            if speed := self._speed_of(sample):
                left = sample.lengths[sample.stage] - _SAME - sample.done
                lengths.append(max(1, ceil(left / speed)))
        return min(lengths, default=None)

    def _speed_of(self, sample: Sample) -> float:
        """Return how much of its stage a sample does in a millisecond."""
        if sample.end is not None or (sample.calls_engine and sample.call is None):
            return 0.0
        return self.speeds[sample.replica] if sample.calls_engine else 1.0

    def _account(self, trainer: str, length: int) -> None:
        """Charge the next milliseconds of every device."""
        plan = self.plan
        if plan.separate:
            self._add("trainer", self.step, trainer, length * plan.trainer_devices / 1000)
        open_ = any(sample.end is None for sample in self.untaken)
        for replica in range(plan.replicas):
            devices = 1.0 if plan.separate else plan.trainer_devices / plan.replicas
            calls = self.calls_of.get(replica, [])
            for call in calls:
                share = length * devices / len(calls) / 1000
                call.seconds[self.step] = call.seconds.get(self.step, 0.0) + share
            if calls:
                continue
            account = trainer
            if plan.separate and trainer != "weight_sync":
                account = "rollout_idle" if open_ else "staleness_limit"
            self._add(self.pool, self.step, account, length * devices / 1000)

    def _advance(self, length: int) -> None:
        for replica, decoding in self.decoding.items():
            rows = self.passes.setdefault(replica, [])
            new = self.prefills.get(replica)
            speed = self.speeds[replica]
            row = speed, speed * decoding, False
            if new is not None:
                row = 1 / self.plan.prefill_ms, 0.0, True
                new.prefill += length
                new.decodes = self.now + length
            rows.append((self.now, length, *row))
        self.now += length
        for sample in self.untaken:
            if not (speed := self._speed_of(sample)):
                continue
            done = length * speed
            sample.done += done
            call = sample.call
            if call is not None:
                call.progress += done
                call.tokens = int(call.progress + _SAME)
            if sample.done >= sample.lengths[sample.stage] - _SAME:
                self._end_stage(sample)
        self._fill()
        if self.serves:
            for sample in self.untaken:
                if sample.paused:
                    sample.paused -= length
                    self._resume(sample)

    def _resume(self, sample: Sample) -> None:
        if not sample.paused:
            turn = sample.stage // 2
            sample.calls.append(Call(turn, sample.attempt, self.now, self.version))

    def _end_stage(self, sample: Sample) -> None:
        if sample.calls_engine:
            sample.calls[-1].end = self.now
        else:
            sample.tools.append((sample.stage // 2, sample.stage_begin, self.now))
        sample.stage, sample.done, sample.attempt = sample.stage + 1, 0, 0
        sample.stage_begin = self.now
        if sample.stage == len(sample.lengths):
            sample.end = self.now
        elif sample.calls_engine and self.serves:
            sample.calls.append(Call(sample.stage // 2, 0, self.now, self.version))


_ACCOUNTS = {
    "consumed": "generating",
    "dropped": "generating_dropped",
    "unconsumed": "generating_unconsumed",
}


# Prompt tokens that are prefilled in a millisecond.
_PROMPT = 10


def iterations_of(run: Simulation) -> list[dict[str, Any]]:
    """Return what a profiler would read of the replicas' passes: rows of 100 ms, or until one idles."""
    found: list[dict[str, Any]] = []
    for replica, passes in run.passes.items():
        rows: list[list[tuple[int, float, float, bool]]] = []
        each_ms = (
            (begin + 1 + ms, *more) for begin, length, *more in passes for ms in range(length)
        )
        for each in each_ms:
            if not rows or each[0] - rows[-1][-1][0] > 1 or len(rows[-1]) == _ROW_MS:
                rows.append([])
            rows[-1].append(each)
        before = [0.0, 0.0]
        for row in rows:
            # Whole numbers, as they are recorded, whose rests go to the next row.
            whole: list[int] = []
            for place in (0, 1):
                summed = before[place] + sum(each[1 + place] for each in row)
                whole.append(round(summed))
                before[place] = summed - whole[place]
            last, busy_s = EPOCH + row[-1][0] * MS, len(row) / 1000
            made = iterations(
                f"engine_{replica}",
                last - len(row) * MS,
                last,
                iterations=whole[0],
                decode_requests=whole[1],
                prefill_tokens=_PROMPT * sum(each[3] for each in row),
                busy_s=busy_s,
                device_s=busy_s,
            )
            found.append(made)
    return found


def events_of(run: Simulation) -> list[dict[str, Any]]:
    """Return the events that verl would have left of this run."""
    events: list[dict[str, Any]] = []

    def span(name: str, event: str, step: int, begin: int, end: int | None, **more: Any) -> None:
        family = "trainer" if name.startswith("trainer") else None
        first, last = EPOCH + begin * MS, EPOCH + (begin if end is None else end) * MS
        made = event_row(name, event, first, last, step=step, family=family, **more)
        events.append(made if end is not None else made | {"duration_us": None})

    plan = run.plan
    if plan.separate:
        replicas = list(range(plan.replicas))
        pool = {"pool": "standalone", "replicas": replicas, "devices": plan.replicas}
        span("trainer_0", "replica_pool", 0, 0, None, **pool)
    if plan.at_once:
        depth = {"queue": "rollouter", "running": 1, "capacity": plan.at_once}
        span("rollouter_0", "queue_depth", 1, 0, None, **depth)
    for event, step, begin, end in run.timers:
        span("trainer_0", event, step, begin, end)
        if plan.rollouter and event == "update_weights":
            limit = {"reason": "staleness_limit"}
            if plan.at_once:
                limit["max_required_samples"] = plan.ahead + plan.batch * plan.sync_every
            span("rollouter_0", "dispatch_pause", step, begin, end, **limit)
        if event == "update_actor":
            for rank in range(plan.trainer_devices):
                span(f"actor_{rank}", event, step, begin, end)
    for sample in run.samples:
        _write_sample(run, sample, span)
    return events


def _write_sample(run: Simulation, sample: Sample, span: Callable[..., None]) -> None:
    who = {"request_id": f"q{sample.number:04d}", "session": "0"}
    uid = {"uid": f"u{sample.number:04d}"}
    step = sample.step
    for call in sample.calls:
        end = run.now if call.end is None else call.end
        ids = {
            "engine_request_id": f"{who['request_id']}-{call.turn}-{call.attempt}",
            "finish_reason": "abort" if call.aborted else "stop",
            "response_tokens": call.tokens,
        }
        versions = {"weight_version": str(call.version)}
        if run.plan.prefill_ms:
            decodes = end if call.decodes is None else call.decodes
            ids |= {
                "queue_s": 0.0,
                "prefill_s": (decodes - call.begin) / 1000,
                "decode_s": (end - decodes) / 1000,
                "prompt_tokens": _PROMPT * run.plan.prefill_ms,
            }
        span(f"engine_{sample.replica}", "engine_request", step, call.begin, end, **ids, **versions)
        if call.aborted or call.attempt:
            span(
                "worker_0", "engine_attempt", step, call.begin, end,
                **who, turn=call.turn, attempt=call.attempt, **ids, **versions,
            )  # fmt: skip
        elif call.end is not None:
            span("worker_0", "engine_call", step, call.begin, end, **who, turn=call.turn, **ids)
    for turn in sorted({call.turn for call in sample.calls if call.attempt}):
        tries = [call for call in sample.calls if call.turn == turn]
        if tries[-1].end is not None and not tries[-1].aborted:
            begin, end = tries[0].begin, tries[-1].end
            made = {"attempts": len(tries), "response_tokens": sum(call.tokens for call in tries)}
            span("worker_0", "engine_call", step, begin, end, **who, turn=turn, **made)
    for turn, begin, end in sample.tools:
        span("worker_0", "tool_call", step, begin, end, **who, turn=turn, tool="t")
    span("worker_0", "request_start", step, sample.begin, None, **who, **uid)
    if sample.end is not None:
        tokens = {"prompt_tokens": sample.prompt_tokens}
        span("worker_0", "request", step, sample.begin, sample.end, **who, **uid, **tokens)
    if sample.fate == "consumed":
        taken = {
            "session": "0",
            "consumed_step": sample.consumed_step,
            "trainer_version": sample.trainer_version,
            "min_weight_version": min(sample.tokens),
            "max_weight_version": max(sample.tokens),
        }
        span("trainer_0", "sample_consumed", step, sample.taken, None, **uid, **taken)
    elif sample.fate == "dropped":
        span("trainer_0", "sample_dropped", step, sample.taken, None, **uid, reason="stale")


def with_syncs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add a sync of the weights to each update of them; a step is a version."""
    sent = [
        {**each, "event": "weight_sync", "extra": {"weight_version": each["step"]}}
        for each in events
        if each["event"] == "update_weights"
    ]
    return [*events, *sent]
