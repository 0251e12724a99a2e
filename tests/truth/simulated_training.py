"""A simulation of verl training that can have a fault; shares no code with the package.

Discrete events: requests on agent-loop workers, replicas whose speed falls with the number of running
calls, a KV cache, reward workers, 16 ranks in collectives, weight sync, and what lies between steps.  An
asynchronous trainer takes the prompts that have finished; the replicas have devices of their own, and pause
while they get weights.  The truth is the same run without the fault.  `write` leaves event files as
docs/events.md describes them.
"""

import heapq
import json
import math
import random
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

EPOCH = datetime(2026, 11, 25, 9, 46, 40, tzinfo=UTC)
ONES = (1.0, 1.0, 1.0, 1.0)
# Number of the host that other processes keep busy.
BUSY = 2
# Events of a rank in the trainer's phases, and seconds per token.
PHASES = {
    "old_log_prob": ("compute_log_prob", "infer_batch", 0.00025),
    "ref": ("compute_ref_log_prob", "infer_batch", 0.00022),
    "update_actor": ("update_actor", "train_batch", 0.001),
}


@dataclass(frozen=True)
class Plan:
    """A run; the defaults have no fault.  Times are in seconds."""

    steps: int = 8
    seed: int = 0
    prompts: int = 16
    samples: int = 4
    workers: int = 8
    ranks: int = 16
    # Prompts of an asynchronous run that are in flight beyond those of a step; None if synchronous.
    ahead: int | None = None
    shuffle: bool = True
    between: float = 0.02
    # Rollout.
    turns: tuple[float, ...] = (0.15, 0.35, 0.5)
    many_turns: tuple[int, int] | None = None
    spread: float = 0.25
    long_prompts: tuple[tuple[int, float], ...] = ()
    # So many prompts of each step, drawn by chance, have so many times the tokens.
    hard_prompts: tuple[int, float] = (0, 1.0)
    # So many are themselves so many times as long.
    long_inputs: tuple[int, float] = (0, 1.0)
    long_tail: tuple[int, float] = (0, 1.0)
    lognormal: tuple[float, int] | None = None
    build: float = 0.004
    tool: float = 0.8
    tool_spread: float = 0.4
    tool_grows: float = 0.0
    slow_tool: float = 0.0
    slow_tool_share: float = 0.15
    slow_tool_worker: int | None = None
    slow_url: float = 0.0
    tools_at_once: int = 10**9
    in_turn: bool = False
    tool_since: tuple[int, float] = (0, 0.0)
    loops: tuple[float, int] = (0.0, 0)
    failing: tuple[float, float] = (0.0, 0.0)
    block: float = 0.0
    pauses: tuple[float, float] = (0.0, 0.0)
    search: float = 0.0
    blocking: bool = False
    busy_host: float = 1.0
    host_tools: float = 0.0
    host_puts: float = 0.0
    late_worker: float = 0.0
    one_at_a_time: bool = False
    reward: float = 0.02
    reward_workers: int = 4
    reward_timeouts: tuple[float, float] = (0.0, 0.0)
    put: float = 0.01
    put_worker: int | None = None
    # Engines: seconds per token with one call, and for each further one.
    token: float = 0.011
    per_call: float = 0.0006
    speeds: tuple[float, ...] = ONES
    route: tuple[float, ...] | None = None
    slots: int = 256
    slots_of: tuple[int, ...] | None = None
    speeds_in: tuple[int, ...] | None = None
    halt: tuple[int, float] = (0, 0.0)
    capacity: tuple[int, ...] = (10**9,) * 4
    first_prefill: float = 0.0
    prefill_token: float = 1e-4
    # Nothing decodes meanwhile; and each token takes longer by each one that the running calls hold.
    prefill_stops: bool = False
    per_held: float = 0.0
    cache_lost: int = 0
    timed: bool = True
    # The trainer.
    fifth_prompts: float = 1.0
    prepare: float = 0.2
    slow_batch: tuple[int, float] = (1, 0.0)
    prepare_since: tuple[int, float] = (0, 0.0)
    adv: float = 0.3
    driver_reward: float = 0.0
    handover: float = 0.0
    ref_ranks: int = 0
    late_rank: float = 0.0
    transfer: float = 0.1
    slow_loader: float = 0.0
    testing_inside: float = 0.0
    moving: float = 0.0
    uneven: float = 0.0
    slow_rank: float = 1.0
    collective: bool = True
    # A rank is slow in the update only, and the others wait for it in the optimizer step, not in each layer.
    own_passes: bool = False
    optimizer: float = 0.0
    sync: float = 1.5
    sync_grows: float = 0.0
    slow_receiver: float = 0.0
    late_host: float = 0.0
    dump: float = 0.0
    checkpoint: float = 0.0
    testing: float = 0.0
    tested: float = 0.0
    # Over time: growth per step, and factors of chosen steps.
    token_grows: float = 0.0
    speed_grows: float = 0.0
    update_grows: float = 0.0
    stall: tuple[int, float] = (0, 0.0)
    changes_at: tuple[int, float] = (0, 1.0)
    longer_since: tuple[int, float] = (0, 1.0)
    third_gap: float = 0.0
    slow_first: float = 0.0


class Kernel:
    """Runs generators: each yields seconds to sleep, or a `Gate` to pass."""

    def __init__(self):
        self.now, self._heap, self._number = 0.0, [], count()

    def wake(self, what, after=0.0):
        heapq.heappush(self._heap, (self.now + after, next(self._number), what))

    def run(self):
        while self._heap:
            self.now, _, what = heapq.heappop(self._heap)
            if callable(what):
                what()
                continue
            try:
                wanted = next(what)
            except StopIteration:
                continue
            if isinstance(wanted, Gate):
                wanted.join(what)
            else:
                self.wake(what, wanted)


class Gate:
    """Opens once for all who wait."""

    def __init__(self, kernel):
        self._kernel, self._waiting, self._open = kernel, [], False

    def join(self, what):
        if self._open:
            self._kernel.wake(what)
        else:
            self._waiting.append(what)

    def open(self):
        self._open = True
        for what in self._waiting:
            self._kernel.wake(what)


class Drawn(int):
    """The step whose requests these are drawn for, and the one that dispatched them."""

    def __new__(cls, step, label):
        made = super().__new__(cls, step)
        made.label = label
        return made


class Batch:
    """Requests that are waited for together, and the tokens of those that have ended."""

    def __init__(self, left, opens):
        self.left, self.opens, self.tokens, self.versions = left, opens, [], {}

    def end(self, tokens):
        self.tokens.append(tokens)
        self.left -= 1
        if not self.left:
            self.opens()


class Permits:
    """A number of permits, handed out in order."""

    def __init__(self, kernel, free):
        self._kernel, self._free, self._waiting = kernel, free, deque()

    def acquire(self):
        gate = Gate(self._kernel)
        if self._free:
            self._free -= 1
            gate.open()
        else:
            self._waiting.append(gate)
        return gate

    def release(self):
        if self._waiting:
            self._waiting.popleft().open()
        else:
            self._free += 1


class Call:
    def __init__(self, kernel, prompt, cached, tokens, prefill):
        self.gate, self.prompt, self.tokens, self.prefill = Gate(kernel), prompt, tokens, prefill
        self.begin, self.cached, self.left, self.retractions = kernel.now, cached, tokens, 0
        self.admitted = self.first = None

    @property
    def held(self):
        return self.prompt + self.tokens - self.left


class Replica:
    """An engine: decodes all running calls at one speed, within its slots and its KV cache."""

    def __init__(self, kernel, plan, place):
        self.kernel, self.plan, self.place = kernel, plan, place
        self.running, self.waiting, self.at, self.version, self.open = [], deque(), 0.0, 0, 0
        self.factor, self.slowed, self.paused = 1.0, True, None
        self.slots = plan.slots_of[place] if plan.slots_of else plan.slots

    def submit(self, call):
        self._advance()
        self.waiting.append(call)
        self._change()

    def _per_token(self, calls):
        plan = self.plan
        own = plan.speeds[self.place] if self.slowed else 1.0
        own *= 1 + (plan.busy_host - 1) / 2 if self.place == BUSY else 1.0
        held = plan.per_held * sum(call.held for call in self.running) if plan.per_held else 0.0
        return (plan.token + plan.per_call * calls + held) * own * self.factor

    def _decoding(self):
        if self.plan.prefill_stops and any(call.ready > self.at + 1e-9 for call in self.running):
            return []
        return [call for call in self.running if call.ready <= self.at + 1e-9]

    def pause(self):
        self._advance()
        self.paused = self.kernel.now
        self.version += 1

    def resume(self):
        for call in self.running:
            if call.ready > self.paused:
                call.ready += self.kernel.now - self.paused
        self.at, self.paused = self.kernel.now, None
        self._change()

    def _advance(self):
        calls = self._decoding() if self.paused is None else ()
        if calls:
            done = (self.kernel.now - self.at) / self._per_token(len(calls))
            for call in calls:
                call.left = max(call.left - done, 0.0)
        self.at = self.kernel.now

    def _change(self):
        if self.paused is not None:
            return
        for call in [call for call in self._decoding() if call.left < 1e-6]:
            self.running.remove(call)
            call.end = self.at
            call.gate.open()
        capacity = self.plan.capacity[self.place]
        while len(self.running) > 1 and sum(each.held for each in self.running) > capacity + 1e-3:
            call = self.running.pop()
            call.retractions += 1
            self.waiting.appendleft(call)
        while self.waiting and len(self.running) < self.slots:
            call = self.waiting[0]
            if self.running and sum(each.held for each in [*self.running, call]) > 0.97 * capacity:
                break
            self.waiting.popleft()
            unknown = call.held - (0 if call.retractions else call.cached)
            prefill = call.prefill + self.plan.prefill_token * unknown
            call.ready = self.at + prefill
            if call.admitted is None:
                call.admitted, call.first = self.at, call.ready
            self.running.append(call)
        calls = self._decoding()
        token = self._per_token(len(calls))
        times = [call.ready - self.at for call in self.running if call.ready > self.at + 1e-9]
        times += [call.left * token for call in calls]
        if len(self.running) > 1 and calls:
            room = capacity - sum(each.held for each in self.running)
            times.append(max(room + 1e-2, 1e-2) / len(calls) * token)
        self.version += 1
        if times:
            self.kernel.wake(lambda version=self.version: self._wakes(version), min(times))

    def _wakes(self, version):
        if version == self.version:
            self._advance()
            self._change()


class Loop:
    """A worker's event loop, which blocking code holds, and its one thread for tokenizing."""

    def __init__(self, kernel):
        self.kernel, self.free, self.thread = kernel, 0.0, 0.0

    def turn(self):
        while self.free > self.kernel.now + 1e-9:
            yield self.free - self.kernel.now


class Training:
    """Runs a plan.  `events` has (process, step, event, begin, end or None, extra); `steps` begins."""

    def __init__(self, plan):
        self.plan, self.kernel, self.events, self.begins, self.ends = plan, Kernel(), [], [], []
        self.replicas = [Replica(self.kernel, plan, place) for place in range(4)]
        self.loops = [Loop(self.kernel) for _ in range(plan.workers)]
        self.rewarders = Permits(self.kernel, plan.reward_workers)
        self.single = Permits(self.kernel, 1)
        self.tools = Permits(self.kernel, plan.tools_at_once)
        self.factor, self.weights = 1.0, 0
        self.kernel.wake(self._trainer())
        self.kernel.run()

    @property
    def step_s(self):
        """Mean time from the start of a step to the start of the next, without the first step."""
        begins = [*self.begins, self.ends[-1]]
        return (begins[-1] - begins[1]) / (len(begins) - 2)

    def _random(self, *what):
        return random.Random(repr((self.plan.seed, *what)))

    def _event(self, process, step, event, begin, end=None, **extra):
        self.events.append((process, getattr(step, "label", step), event, begin, end, extra))

    # The rollout.

    def _trajectory(self, step, prompt, sample):
        """Draw what one request demands: tokens and tool times by turn."""
        plan, of = self.plan, self._random("request", step, prompt, sample)
        group = self._random("prompt", step if plan.shuffle else 0, prompt).lognormvariate(0, 0.12)
        draw, turns = of.random(), 1
        while turns < len(plan.turns) and draw > sum(plan.turns[:turns]):
            turns += 1
        if plan.many_turns and prompt == plan.many_turns[0]:
            turns = plan.many_turns[1]
        if self._random("loops", step, prompt, sample).random() < plan.loops[0]:
            turns = plan.loops[1]
        factor = group * dict(plan.long_prompts).get(prompt, 1.0)
        hard, longer = plan.hard_prompts
        factor *= (
            longer
            if prompt in self._random("hard", step).sample(range(plan.prompts), hard)
            else 1.0
        )
        factor *= 1 + plan.token_grows * (step - 1)
        since, change = plan.longer_since
        factor *= change if since and step >= since else 1.0
        number, longer = plan.long_tail if step % 2 or not plan.in_turn else (0, 1.0)
        places = self._random("tail", step).sample(range(plan.prompts * plan.samples), number)
        factor *= longer if prompt * plan.samples + sample in places else 1.0
        tokens, tools = [], []
        for turn in range(turns):
            each = 420 * factor * of.lognormvariate(0, plan.spread)
            tool, picks = of.lognormvariate(math.log(plan.tool), plan.tool_spread), of.random()
            tool *= 1 + plan.tool_grows * (step - 1)
            if turn == 0 and plan.lognormal:
                own = self._random("length", step, prompt, sample).lognormvariate(
                    0, plan.lognormal[0]
                )
                each = min(420 * factor * own, plan.lognormal[1])
            tokens.append(max(int(each), 20))
            if turn < turns - 1:
                tools.append((tool, picks, of.random()))
        longer = plan.fifth_prompts if step % 5 == 0 else 1.0
        many, times = plan.long_inputs
        if prompt in self._random("inputs", step).sample(range(plan.prompts), many):
            longer *= times
        return int(of.uniform(450, 800) * longer), tokens, tools

    def _dispatch(self, step, batch_of, places=None):
        """Start all requests of a step, or of prompts of it; it is cut into one part for each worker."""
        plan = self.plan
        prompts = list(range(plan.prompts))
        if plan.shuffle:
            self._random("shuffle", step).shuffle(prompts)
        whole = plan.prompts * plan.samples
        for place in range(plan.prompts) if places is None else places:
            batch = batch_of(prompts[place])
            for sample in range(plan.samples):
                number = place * plan.samples + sample
                worker = number * plan.workers // whole
                self.kernel.wake(self._request(step, prompts[place], sample, worker, number, batch))

    def _replica(self, number):
        if self.plan.route:
            draw = self._random("route", number).random()
            place = next(k for k in range(4) if draw < sum(self.plan.route[: k + 1]) + 1e-9)
            return self.replicas[place]
        return min(self.replicas, key=lambda each: (each.open, each.place))

    def _request(self, step, prompt, sample, worker, number, batch):
        plan, kernel, name, loop = self.plan, self.kernel, f"worker_{worker}", self.loops[worker]
        prompt_tokens, tokens, tools = self._trajectory(step, prompt, sample)
        sample_of = prompt if not plan.shuffle else step * plan.prompts + prompt
        ids = {"sample": sample_of, "session": sample}
        own = {"request_id": f"r{step:02d}{prompt:03d}{sample:02d}"}
        uid = f"u{step:02d}{prompt:03d}"
        if plan.one_at_a_time:
            yield self.single.acquire()
        if worker == 3:
            yield plan.late_worker
        begin = kernel.now
        self._event(name, step, "request_start", begin, None, **ids, uid=uid)
        built = self._random("build", step, number).uniform(0.7, 1.3) * plan.build
        built *= self._busy(worker)
        loop.thread = max(loop.thread, kernel.now) + built
        yield loop.thread - kernel.now
        yield from loop.turn()
        self._event(
            name, step, "prompt_build", begin, kernel.now, **own, **ids, tokens=prompt_tokens
        )
        context, cached, replica, generated, answered = prompt_tokens, 200, None, 0, 0
        for turn, wanted in enumerate(tokens):
            at, of = kernel.now, own | {"turn": turn}
            yield 0.003
            replica = replica or self._replica((step, number))
            replica.open += 1
            address = f"10.0.0.{replica.place}:3000"
            self._event(name, step, "server_acquire", at, kernel.now, **of, server=address)
            lazy = plan.first_prefill if turn == 0 else 0.0
            cached = 0 if plan.cache_lost and turn and step >= plan.cache_lost else cached
            yield 0.002
            call = Call(kernel, context, cached, wanted, lazy)
            batch.versions.setdefault(sample, []).append(self.weights)
            replica.submit(call)
            yield call.gate
            batch.versions[sample].append(self.weights)
            replica.open -= 1
            engine_id = f"e{step:02d}{number:03d}{turn}"
            self._served(step, replica, call, engine_id, context, cached)
            yield 0.002
            yield from loop.turn()
            extra = {"prompt_tokens": context, "response_tokens": wanted, "finish_reason": "stop"}
            self._event(
                name,
                step,
                "engine_call",
                at,
                kernel.now,
                **of,
                engine_request_id=engine_id,
                **extra,
            )
            generated += wanted
            share, pause = plan.pauses
            if self._random("pause", step, number, turn).random() < share:
                since = kernel.now
                loop.free = since + pause
                yield pause
                self._event(name, step, "event_loop_lag", since, kernel.now, loop="main")
            if plan.block and worker == 2:
                since = kernel.now
                loop.free = since + plan.block
                yield plan.block
                about = {
                    "loop": "main",
                    "during": "tool_parsing",
                    "function": "my_parser.py:parse:31",
                }
                self._event(name, step, "event_loop_lag", since, kernel.now, **about, **own)
                self._event(name, step, "tool_parsing", since, kernel.now, **of, tool_calls=1)
            if turn < len(tools):
                used = yield from self._tool(step, worker, of, name, tools[turn], loop)
                answered += used
                cached, context = context + wanted, context + wanted + used
                self._event(name, step, "turn", at, kernel.now, **of, tool_calls=1)
            else:
                self._event(name, step, "turn", at, kernel.now, **of)
        self._event(name, step, "agent_loop", begin, kernel.now, **own, **ids)
        yield from self._score(step, number, name, own, ids, uid, loop)
        extra = {"turns": len(tokens), "agent": "tool_agent", "prompt_tokens": prompt_tokens}
        sums = {"response_tokens": generated + answered, "generated_tokens": generated}
        extra |= sums | {"tool_tokens": answered, "reward": 1.0, "uid": uid}
        self._event(name, step, "request", begin, kernel.now, **own, **ids, **extra)
        if plan.one_at_a_time:
            self.single.release()
        batch.end(prompt_tokens + generated + answered)

    def _served(self, step, replica, call, engine_id, context, cached):
        extra = {"engine_request_id": engine_id, "prompt_tokens": context}
        extra |= {
            "response_tokens": call.tokens,
            "weight_version": step - 1 if self.plan.ahead is None else self.weights,
            "cached_tokens": cached,
        }
        if self.plan.timed:
            extra |= {
                "queue_s": call.admitted - call.begin,
                "prefill_s": call.first - call.admitted,
            }
            extra["decode_s"] = call.end - call.first
        if call.retractions:
            extra["retractions"] = call.retractions
        extra["e2e_s"] = call.end - call.begin
        self._event(
            f"engine_{replica.place}", step, "engine_request", call.begin, call.end, **extra
        )

    def _busy(self, worker):
        return self.plan.busy_host if worker % 4 == BUSY else 1.0

    def _tool(self, step, worker, of, name, drawn, loop):
        plan, kernel = self.plan, self.kernel
        took, picks, fails = drawn
        begin, tool = kernel.now, "search" if picks < 0.5 else "code"
        only = plan.slow_tool_worker
        slow = plan.slow_tool and not (plan.in_turn and step % 2)
        if slow and (picks < plan.slow_tool_share if only is None else worker == only):
            tool, took = "browse", took + plan.slow_tool
        if plan.slow_url:
            tool = f"url_{int(picks * 12):02d}"
            took += plan.slow_url if tool == "url_07" else 0.0
        took += plan.search if tool == "search" else 0.0
        took *= self._busy(worker)
        took += plan.host_tools if worker % 4 == BUSY else 0.0
        since, slower = plan.tool_since
        took += (
            slower if tool == "code" and since and getattr(step, "label", step) >= since else 0.0
        )
        share, timeout = plan.failing
        if fails < share:
            yield timeout
            yield from loop.turn()
            bad = {"tool": tool, "status": "error", "error": "TimeoutError"}
            self._event(name, step, "tool_call", begin, kernel.now, **of, **bad)
        since = kernel.now
        if plan.blocking and tool == "search":
            loop.free = since + took
            yield took
            about = {"loop": "main", "during": "my_tools:search", "function": "my_tools:search"}
            about |= {"request_id": of["request_id"], "tool": tool}
            self._event(name, step, "event_loop_lag", since, kernel.now, **about)
        else:
            yield self.tools.acquire()
            yield took
            self.tools.release()
        yield from loop.turn()
        self._event(name, step, "tool_call", since, kernel.now, **of, tool=tool)
        self._event(name, step, "tool_execution", begin, kernel.now, **of, tool_calls=1)
        return 120

    def _score(self, step, number, name, own, ids, uid, loop):
        kernel, begin = self.kernel, self.kernel.now
        rewarder = f"reward_{number % 4}"
        yield self.rewarders.acquire()
        since = kernel.now
        of, (share, timeout) = self._random("reward", step, number), self.plan.reward_timeouts
        yield self.plan.reward * of.uniform(0.8, 1.2) + (timeout if of.random() < share else 0.0)
        self.rewarders.release()
        extra = {"wait_s": since - begin, "compute_s": kernel.now - since, "score": 1.0, "uid": uid}
        self._event(rewarder, step, "reward_score", begin, kernel.now, **ids, **extra)
        yield from loop.turn()
        self._event(name, step, "reward", begin, kernel.now, **own, **ids, score=1.0)
        put = kernel.now
        only = self.plan.put_worker
        put_s = self.plan.put if only is None or name == f"worker_{only}" else Plan.put
        yield put_s + (self.plan.host_puts if int(name[len("worker_") :]) % 4 == BUSY else 0.0)
        yield from loop.turn()
        self._event(name, step, "tq_put", put, kernel.now, **own, **ids, size_bytes=80000, rows=1)
        self._event(name, step, "postprocess", begin, kernel.now, **own, **ids)

    # The trainer.

    def _trainer(self):
        plan, kernel = self.plan, self.kernel
        self.ready, self.dispatched = deque(), 0
        if plan.ahead is not None:
            pool = {"pool": "standalone", "replicas": [0, 1, 2, 3], "devices": 16}
            self._event("trainer_0", 1, "replica_pool", 0.0, None, **pool)
        for step in range(1, plan.steps + 1):
            begin = kernel.now
            self.begins.append(begin)
            since, change = plan.changes_at
            factor = 1 + plan.speed_grows * (step - 1)
            factor *= change if since and step >= since else 1.0
            for replica in self.replicas:
                replica.factor = factor
                replica.slowed = plan.speeds_in is None or step in plan.speeds_in
            every, slower = plan.slow_batch
            since, longer = plan.prepare_since
            longer = longer if since and step >= since else 0.0
            yield plan.prepare + longer + (slower if step % every == 0 else 0.0)
            self._event("trainer_0", step, "prepare_step", begin, kernel.now)
            at = kernel.now
            yield from self._rollout(step) if plan.ahead is None else self._samples(step)
            self._event("trainer_0", step, "gen", at, kernel.now)
            if plan.driver_reward:
                since = kernel.now
                yield plan.driver_reward
                self._event("trainer_0", step, "reward", since, kernel.now)
            for phase in ("old_log_prob", "ref", "adv", "update_actor", "update_weights"):
                yield from self._phase(step, phase, factor)
            if plan.checkpoint and step % 2 == 0:
                since = kernel.now
                yield plan.checkpoint
                self._event("trainer_0", step, "save_checkpoint", since, kernel.now)
            if plan.testing_inside:
                since = kernel.now
                yield plan.testing_inside
                self._event("trainer_0", step, "testing", since, kernel.now)
            self._event("trainer_0", step, "step", begin, kernel.now)
            if plan.testing and step % 2 == 0:
                since = kernel.now
                yield plan.testing
                self._event("trainer_0", step, "testing", since, kernel.now)
            if plan.tested and step % 2 == 0:
                yield from self._validation(step)
            if plan.dump:
                since = kernel.now
                yield plan.dump
                self._event("trainer_0", step, "dump_rollout_generations", since, kernel.now)
            yield plan.between + (plan.third_gap if step % 3 == 0 else 0.0)
            self.ends.append(kernel.now)

    def _rollout(self, step):
        """Run a step's requests, and wait for all of them."""
        plan, kernel, finished = self.plan, self.kernel, Gate(self.kernel)
        about = {"prompts": plan.prompts, "reason": "step"}
        self._event("trainer_0", step, "dispatch", kernel.now, None, **about)
        at = kernel.now
        batch = Batch(plan.prompts * plan.samples, finished.open)
        self._dispatch(step, lambda _: batch)
        halted, halt_s = plan.halt
        if step == halted:
            kernel.wake(self.replicas[1].pause, 5.0)
            kernel.wake(self.replicas[1].resume, 5.0 + halt_s)
        yield finished
        # The replay buffer is polled.
        yield 0.5 - (kernel.now - at) % 0.5
        self.tokens = batch.tokens
        self._event("trainer_0", step, "sample_wait", at, kernel.now, samples=len(self.tokens))
        asleep = kernel.now
        yield 0.3
        self._event("trainer_0", step, "sleep_replicas", asleep, kernel.now, replicas=[0, 1, 2, 3])

    def _waited(self, step):
        """Return what makes the batch of a prompt, which is ready when its requests have ended."""

        def batch_of(prompt):
            uid = f"u{step:02d}{prompt:03d}"
            batch = Batch(self.plan.samples, lambda: self.ready.append((step, uid, batch)))
            return batch

        return batch_of

    def _samples(self, step):
        """Dispatch up to the limit, and take the prompts that have finished first."""
        plan, kernel = self.plan, self.kernel
        at = kernel.now
        while self.dispatched < step * plan.prompts + plan.ahead:
            number, place = divmod(self.dispatched, plan.prompts)
            drawn = Drawn(number + 1, step)
            self._dispatch(drawn, self._waited(drawn), [place])
            self.dispatched += 1
        while len(self.ready) < plan.prompts:
            yield 0.01
        yield 0.05
        self.tokens = []
        for _ in range(plan.prompts):
            drawn, uid, batch = self.ready.popleft()
            self.tokens += batch.tokens
            for session, versions in sorted(batch.versions.items()):
                taken = {"uid": uid, "session": session, "consumed_step": step}
                taken |= {"trainer_version": self.weights}
                taken |= {f"{of.__name__}_weight_version": of(versions) for of in (min, max)}
                self._event("trainer_0", drawn, "sample_consumed", kernel.now, None, **taken)
        self._event("trainer_0", step, "sample_wait", at, kernel.now, samples=len(self.tokens))

    def _validation(self, step):
        """Run a short request on each worker; the tool of one of them is slow."""
        since = self.kernel.now
        longest = 2.0 + self.plan.tested
        for worker in range(self.plan.workers):
            name, own = f"worker_{worker}", {"request_id": f"v{step:02d}{worker:03d}"}
            own |= {"validate": True, "sample": 1000 + worker, "session": 0}
            end = since + (longest if worker == 1 else 2.0)
            self._event(name, step, "request_start", since, None, **own)
            at = {**own, "turn": 0}
            self._event(name, step, "engine_call", since, since + 1.0, **at, response_tokens=80)
            self._event(name, step, "tool_call", since + 1.0, end, **at, tool="grade")
            self._event(name, step, "agent_loop", since, end, **own)
            self._event(name, step, "request", since, end, **own, turns=1, agent="tool_agent")
        yield longest
        self._event("trainer_0", step, "testing", since, self.kernel.now)

    def _phase(self, step, phase, factor):
        plan, kernel, begin = self.plan, self.kernel, self.kernel.now
        of = self._random(phase, step)
        if phase == "adv":
            yield plan.adv
        elif phase == "update_weights" and plan.ahead is None:
            yield self._sync(step, begin, of)
        elif phase == "update_weights":
            for replica in self.replicas:
                replica.pause()
            yield self._sync(step, begin, of)
            self.weights = step
            about = {"weight_version": step, "pool": "standalone"}
            self._event("trainer_0", step, "weight_sync", begin, kernel.now, **about)
            for replica in self.replicas:
                replica.resume()
        else:
            yield self._compute(step, phase, begin, of)
        self._event("trainer_0", step, phase, begin, kernel.now)

    def _compute(self, step, phase, begin, of):
        """Write what the ranks do in a phase, and return how long it takes."""
        plan = self.plan
        event, batch, token = PHASES[phase]
        apart = phase == "ref" and plan.ref_ranks
        ranks = plan.ref_ranks if apart else plan.ranks
        equal = sum(self.tokens) / ranks
        weights = [of.uniform(0.985, 1.015) for _ in range(ranks)]
        longer = self._random("uneven", step).randrange(ranks)
        tokens = [int(equal * each) for each in weights]
        tokens[longer] = int(tokens[longer] * (1 + plan.uneven))
        growth = 1.0
        if phase == "update_actor":
            growth += plan.update_grows * (step - 1)
        own = [each * token * growth * of.uniform(0.995, 1.005) for each in tokens]
        slow = min(5, ranks - 1)
        if phase == "update_actor" or not plan.own_passes:
            own[slow] *= plan.slow_rank
        own[self._random("late", phase, step).randrange(ranks)] += plan.late_rank
        stall, stalled = plan.stall
        if phase == "update_actor" and step == stall:
            own = [each + stalled for each in own]
        optimizer = plan.optimizer if phase == "update_actor" else 0.0
        own = [each + optimizer for each in own]
        if step == 1 and phase == "update_actor":
            own = [each + plan.slow_first for each in own]
        load, at = plan.moving, begin + 0.1 + plan.handover
        late = [plan.transfer + each for each in own]
        late[slow] += plan.slow_loader
        longest = max(late)
        for rank in range(ranks):
            name = f"{'ref' if apart else 'actor'}_{rank}"
            fetch = plan.transfer + (plan.slow_loader if rank == slow else 0.0)
            # In collectives, all ranks end with the last one.
            took = longest - fetch if plan.collective else own[rank]
            end = at + fetch + load + took + of.uniform(0, 0.004)
            self._event(name, step, "tq_get", at, at + fetch, size_bytes=400000, rows=4)
            if load:
                self._event(name, step, "load", at + fetch, at + fetch + load, model=True)
            about = {"tokens": tokens[rank], "sequences": 4}
            forward = phase != "update_actor"
            passed = end - took + own[rank] if plan.own_passes else end
            self._event(
                name,
                step,
                "forward_backward",
                end - took,
                passed - 0.06 - optimizer,
                forward_only=forward,
            )
            self._event(name, step, batch, end - took, end, **about)
            if not forward:
                self._event(name, step, "optimizer_step", passed - 0.05 - optimizer, end - 0.001)
                self._event(name, step, "train_mini_batch", end - took, end)
            if load:
                self._event(name, step, "offload", end, end + 0.6 * load, model=True)
            self._event(name, step, event, at, end + 0.6 * load + 0.005)
        return 0.2 + 1.6 * load + longest + plan.handover

    def _sync(self, step, begin, of):
        took = []
        for rank in range(self.plan.ranks):
            growth = 1 + self.plan.sync_grows * (step - 1)
            each = self.plan.sync * growth * of.uniform(0.96, 1.04)
            each += self.plan.late_host * of.uniform(0.94, 1.0) if rank // 4 == 2 else 0.0
            took.append(each)
            extra = {"weight_version": step}
            name = f"actor_{rank}"
            self._event(
                name, step, "weight_transfer", begin + 0.05, begin + each, **extra, tensors=300
            )
            self._event(name, step, "update_weights", begin + 0.04, begin + each + 0.02, **extra)
        if self.plan.slow_receiver:
            for place in range(4):
                each = max(took[: self.plan.ranks]) + (
                    self.plan.slow_receiver if place == 3 else 0.1
                )
                took.append(each)
                about = {"weight_version": step, "size_bytes": 10**9}
                name = f"engine_{place}"
                self._event(name, step, "weight_receive", begin + 0.05, begin + each, **about)
        return max(took) + 0.1


def _stamp(at):
    return (EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds")


def write(training, folder):
    """Write the event files of a training."""
    folder, plan = Path(folder), training.plan
    clock = {"boot_id": "planted", "wall_ns": int(EPOCH.timestamp()) * 10**9, "monotonic_ns": 0}
    clock |= {"uncertainty_ns": 90, "shared": True}
    versions = {"verl_profiler": "0.1.0", "verl": "0.9.1", "ray": "2.60.0", "python": "3.11.7"}
    asked = {"n_gpus_per_node": 4, "nnodes": 4, "rollout": "sglang", "use_v1": True}
    asked |= {
        "trainer_mode": "sync" if plan.ahead is None else "separate_async",
        "agent_workers": plan.workers,
        "rollout_n": plan.samples,
    }
    run = {
        "format": 1,
        "experiment": folder.name,
        "launched": _stamp(0),
        "host": "node-0",
        "pid": 1,
    }
    run |= {"command": ["python", "-m", "verl.trainer.main_ppo"], "cwd": "/", "settings": {}}
    lines = {}
    for process, step, event, begin, end, extra in training.events:
        # Whole microseconds: the end, and how long before it the interval began.
        until = round((begin if end is None else end) * 1e6)
        line = {"timestamp": _stamp(until), "event": event}
        if end is not None:
            line["duration_sec"] = (until - round(begin * 1e6)) / 1e6
        line |= {"extra": extra, "workid": int(process.rsplit("_", 1)[1]), "step": step}
        lines.setdefault((step, process), []).append((until, json.dumps(line)))
    (folder / "processes").mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps(run | {"versions": versions, "training": asked, "clock": clock})
    )
    engines = {f"engine_{place}" for place in range(4)}
    for number, process in enumerate(sorted({process for _, process in lines} | engines)):
        role, rank = process.rsplit("_", 1)
        place = int(rank) // 4 if role == "actor" else int(rank) % 4
        about = {"role": {"worker": "agent_loop"}.get(role, role), "rank": int(rank)}
        host = "node-0" if role == "trainer" else f"node-{place}"
        about |= {"name": process, "host": host, "pid": 100 + number, "replica": None}
        if role == "engine":
            about |= {"replica": int(rank), "address": f"10.0.0.{rank}:3000"}
        header = {"format": 1, **about, "ip": "10.0.0.1", "ppid": 1, "versions": versions}
        header |= {"clock": clock, "steps": list(range(1, plan.steps + 1)), "started": _stamp(0)}
        until = _stamp(round(training.ends[-1] * 1e6))
        header |= {"updated": until, "ended": until, "end_reason": "exit"}
        (folder / "processes" / f"{process}.json").write_text(json.dumps(header))
    for (step, process), own in lines.items():
        (folder / f"step_{step}").mkdir(exist_ok=True)
        text = "".join(f"{line}\n" for _, line in sorted(own))
        (folder / f"step_{step}" / f"{process}.jsonl").write_text(text)
    return folder
