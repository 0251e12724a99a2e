"""What a call worked on is free when the call is over, however it ended, under every probe.

A weak reference is taken of each argument, item, result and exception, and of what the host's own
frame held.  The same functions without a probe say what the host alone would have kept.
"""

import asyncio
import contextlib
import functools
import gc
import sys
import types
import weakref

import pytest
from recording.children import until

from verl_profiler.capture.probes import PROBES as CAPTURE_PROBES
from verl_profiler.instrumentation import nvtx_ranges, wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import all_probes
from verl_profiler.recording import context, event_loop_lag
from verl_profiler.transfer_queue import calls
from verl_profiler.transfer_queue.probes import with_tracing
from verl_profiler.transfer_queue.switches import Switches

# Those of TransferQueue tracing too, but for the decorator that makes others.
PROBED = [
    *(probe for probe in with_tracing(all_probes()) if probe.result is None),
    *CAPTURE_PROBES,
]


class Anything(dict):
    """A mapping with attributes, of which a weak reference can be taken."""

    def __init__(self, **fields):
        super().__init__(fields)
        self.__dict__.update(fields)


class KVBatchMeta(Anything):
    """By its name the metadata of a batch."""


class AgentLoopWorkerTQ:
    """By its name a worker of verl's."""


class Rows(list):
    """A list of which a weak reference can be taken."""

    prompt_ids = response_ids = token_ids = ()


class Counts(dict):
    """One of everything."""

    def __getitem__(self, _key):
        return 1


class Text(str):
    """A text of which a weak reference can be taken."""

    __slots__ = ("__dict__", "__weakref__")


class Stop(Exception):
    """What the host raises."""


class Kept:
    """What the host's own frame holds while it runs."""


def suitable():
    """Return arguments that every hook can read, by name."""
    sample = Anything(prompt_ids=[1], response_ids=[2], reward_score=0.5)
    replicas = [Anything(replica_rank=0, world_size=1, rollout_mode="hybrid")]
    states = ("pending_keys", "running_keys", "finished_keys", "failure_keys")
    return {
        "self": Anything(
            global_steps=3,
            **{state: {} for state in states},
            partitions={"train": {"u_0_0": {"response_len": 2}}},
            prompt_global_steps={"train": {"u": 2}},
            replicas=replicas,
            hybrid_checkpoint_manager=Anything(replicas=replicas, actor_wg=Anything(world_size=1)),
            actor_wg=Anything(world_size=1),
            backend="naive",
            llm_server_manager=Anything(rollout_replicas=replicas),
            metadata={"length": 4},
            start_time=0.0,
            bucket=Anything(nbytes=4),
            bucket_size=4,
            rank=0,
            **dict.fromkeys(("current_param_version", "local_trigger_step"), 1),
            **dict.fromkeys(("staleness_samples", "max_required_samples", "required_samples"), 1),
            **dict.fromkeys(("max_concurrent_samples", "max_queue_size"), 1),
            **dict.fromkeys(("active_tasks", "queue"), ()),
            _request_id_to_server={},
            _full_determinism=False,
            _inflight_requests=Counts(),
            config=Anything(
                trainer=Anything(test_freq=1),
                async_training=Anything(trigger_parameter_sync_step=1),
            ),
        ),
        "sample_fields": Counts(uid="u"),
        **dict.fromkeys(("sample_index", "session_index", "global_steps"), 1),
        "runner_name": Text("solver"),
        "session_id": Text("s"),
        "rollout_sample": Anything(sample_id="s"),
        "rollout_samples": Rows(
            [Anything(sample_id="s", full_batch=Anything(non_tensor_batch={}))]
        ),
        "sample": Rows([b""]),
        "prompts": Anything(meta_info={}),
        "batch": Anything(meta_info={}),
        "partition_id": Text("train"),
        "uids": {"u"},
        "eviction_reasons": Rows([{"u"}, set(), set()]),
        "target_count": 1,
        "bucket": Anything(nbytes=4),
        "params_batch": Rows([("weight", Anything(nbytes=4))]),
        "batch_seqlens": Rows([3, 4]),
        "delta_time": 1,
        "trajectory": Anything(step=3, sample_index=1, rollout_n=0, validate=False),
        "agent_name": Text("tool_agent"),
        "request_id": Text("r"),
        "prompt_ids": Rows([1, 2]),
        "agent_data": Anything(request_id="r", assistant_turns=0),
        "tool_call": Anything(name="search"),
        "output": sample,
        "outputs": Rows([sample]),
        "data": Anything(
            _tensordict={}, batch_size=(2,), non_tensor_batch={"index": [1]}, tags=None
        ),
        "metadata": KVBatchMeta(
            partition_ids=["train"], partition_id="train", size=2, tags=[{"global_steps": 7}]
        ),
        "head": Text("before"),
        "name": Text("gen"),
        "obj": Anything(tags=["weights"]),
        "keys": Rows(["a"]),
        "device": Text("cpu"),
        "step": 3,
    }


def unsuitable():
    """Return arguments that hooks fail on."""
    return {name: Kept() for name in suitable()}


class Host:
    """Functions of each kind that watch what they are given."""

    def __init__(self, kind, *, ending):
        self.ending = ending
        self.watched = []
        self.function = getattr(self, kind)

    def watch(self, *things):
        self.watched += [(type(thing).__name__, weakref.ref(thing)) for thing in things]

    def held(self, arguments):
        kept = Kept()
        self.watch(kept, *(thing for thing in arguments.values() if not isinstance(thing, int)))
        return kept

    def end(self):
        if self.ending == "raise":
            error = Stop()
            self.watch(error)
            try:
                raise error
            finally:
                del error
        result = Anything(token_ids=[1], extra_fields={}, reward_score=1.0)
        self.watch(result)
        return result

    @contextlib.contextmanager
    def watching_errors(self):
        try:
            yield
        except asyncio.CancelledError as error:
            self.watch(error)
            raise

    async def _wait(self):
        with self.watching_errors():
            if self.ending not in ("return", "raise"):
                await asyncio.Event().wait()
            await asyncio.sleep(0)

    def coroutine(self):
        async def function(_worker, **arguments):
            kept = self.held(arguments)
            await self._wait()
            return self.end(), kept

        return function

    def decorated(self):
        function = self.coroutine()

        @functools.wraps(function)
        def handing_out(worker, **arguments):
            return function(worker, **arguments)

        return handing_out

    def items(self):
        async def function(_worker, **arguments):
            kept = self.held(arguments)
            item = Anything(meta_info={})
            self.watch(item)
            yield item
            await self._wait()
            yield self.end()
            del kept

        return function

    def generator(self):
        def function(_worker, **arguments):
            kept = self.held(arguments)
            item = Anything()
            self.watch(item)
            with self.watching_errors():
                yield item
            return self.end(), kept

        return function

    def plain(self):
        def function(_worker, **arguments):
            kept = self.held(arguments)
            if self.ending == "cancel":
                error = asyncio.CancelledError()
                self.watch(error)
                try:
                    raise error
                finally:
                    del error
            return self.end(), kept

        return function


async def exhaust(items):
    async for _ in items:
        pass


async def use_async(kind, ending, function, arguments):
    """Begin a call and end it as asked."""
    if kind == "items":
        items = function(AgentLoopWorkerTQ(), **arguments)
        del arguments
        if ending in ("dropped", "closed"):
            await items.__anext__()
            if ending == "closed":
                await items.aclose()
            del items
            for _ in range(4):
                await asyncio.sleep(0)
            return
        coroutine = exhaust(items)
        del items
    else:
        coroutine = function(AgentLoopWorkerTQ(), **arguments)
        del arguments
    if ending in ("dropped", "closed"):
        coroutine.send(None)
        if ending == "closed":
            coroutine.close()
        return
    with contextlib.suppress(Stop, asyncio.CancelledError, asyncio.TimeoutError):
        if ending == "timeout":
            await asyncio.wait_for(coroutine, 0.001)
        elif ending == "cancel":
            task = asyncio.ensure_future(coroutine)
            del coroutine
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            finally:
                del task
        else:
            await coroutine


def use_plain(kind, ending, function, arguments):
    """The same for functions and generators outside a loop."""
    with contextlib.suppress(Stop, asyncio.CancelledError):
        got = function(AgentLoopWorkerTQ(), **arguments)
        del arguments
        if kind != "generator":
            return
        next(got)
        if ending == "closed":
            got.close()
        elif ending == "cancel":
            got.throw(asyncio.CancelledError())
        elif ending != "dropped":
            with contextlib.suppress(StopIteration):
                next(got)


ENDINGS = {
    "coroutine": ("return", "raise", "cancel", "closed", "dropped", "timeout"),
    "decorated": ("return", "raise", "cancel", "closed", "dropped", "timeout"),
    "items": ("return", "raise", "cancel", "closed", "dropped", "timeout"),
    "generator": ("return", "raise", "cancel", "closed", "dropped"),
    "plain": ("return", "raise", "cancel"),
}
CASES = [(kind, ending) for kind, endings in ENDINGS.items() for ending in endings]


def run(kind, ending, wraps, make):
    """Use one host function a wrapper; return all that was watched, by the number of its wrapper."""
    hosts = []

    def host_function(wrap):
        host = Host(kind, ending=ending)
        hosts.append(host)
        return wrap(host.function())

    async def all_of_them():
        for wrap in wraps:
            await use_async(kind, ending, host_function(wrap), make())

    if kind in ("generator", "plain"):
        for wrap in wraps:
            use_plain(kind, ending, host_function(wrap), make())
    else:
        asyncio.run(all_of_them())
    return [host.watched for host in hosts]


def alive(watched):
    """Return what is still there, by number and type."""
    return sorted(
        (number, name)
        for number, things in enumerate(watched)
        for name, reference in things
        if reference() is not None
    )


@pytest.fixture
def device(monkeypatch):
    """In the place of verl's, which the memory probe asks."""
    module = types.ModuleType("verl.utils.device")
    module.get_torch_device = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "verl.utils.device", module)


@pytest.fixture
def tracing():
    """TransferQueue tracing of everything."""
    calls.start(Switches(trace=True, detail=True), "run", records=True)
    yield
    calls.stop()


@pytest.fixture
def manual_gc():
    """No collection but by the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def named(numbers):
    return [
        (f"{PROBED[number].name}: {PROBED[number].targets[0]}", what) for number, what in numbers
    ]


@pytest.mark.parametrize(
    ("hooks", "with_ranges"), [("work", False), ("work", True), ("fail", False)]
)
@pytest.mark.parametrize(("kind", "ending"), CASES)
def test_nothing_of_a_call_outlives_it(
    kind,
    ending,
    hooks,
    with_ranges,
    recording,
    tracing,
    device,
    nvtx,
    manual_gc,
    capsys,
    monkeypatch,
):
    """Without a garbage collection, which the host's own code needs neither."""
    # The frame of a stalled loop that the watchdog takes a sample of is freed by the collector.
    until(lambda: recording.identity is not None)
    monkeypatch.setattr(event_loop_lag, "COMPUTING_ROLES", (recording.identity.role,))
    if with_ranges:
        assert nvtx_ranges.switch_on()
    make = suitable if hooks == "work" else unsuitable
    bare = alive(run(kind, ending, [lambda function: function], make))
    wraps = [functools.partial(wrapping.wrap, probe) for probe in PROBED]
    watched = run(kind, ending, wraps, make)
    nvtx_ranges.switch_off()

    assert all(len(things) > 10 for things in watched)
    if hooks == "fail":
        assert {"request", "engine_request", "metrics"} <= set(status.errors)
    elif kind != "plain" or ending != "cancel":
        assert {} == dict(status.errors), capsys.readouterr().err
    assert [] == bare
    assert [] == named(alive(watched))
    assert context.current_request.get() is None
    assert context.current_engine_call.get() is None


class Owner:
    """A host's object that holds what it runs, or what it raised."""

    async def coroutine(self):
        await asyncio.sleep(0)

    async def items(self):
        yield 1

    def generator(self):
        yield 1

    def plain(self):
        try:
            raise Stop
        except Stop as error:
            self.kept = error
            raise


@pytest.mark.parametrize("kind", ["coroutine", "items", "generator", "plain"])
def test_an_object_that_holds_its_own_call_is_collected(kind, recording, manual_gc):
    """The wrapper's frame is part of the circle; bare, the collector frees it."""
    method = wrapping.wrap(Probe("event", "rollout", ("x:y",)), getattr(Owner, kind))

    def begin():
        owner = Owner()
        if kind == "plain":
            with contextlib.suppress(Stop):
                method(owner)
        else:
            owner.kept = method(owner)
            if kind == "generator":
                next(owner.kept)
            else:
                first = owner.kept if kind == "coroutine" else owner.kept.__anext__()
                with contextlib.suppress(StopIteration):
                    first.send(None)
        return weakref.ref(owner)

    owner = begin()
    gc.collect()

    assert owner() is None


def test_a_task_that_outlives_a_request_keeps_no_answer_of_it(recording):
    """SGLang starts such tasks with its first request, and they copy its context."""
    generate = probe_of("engine_request")
    answers = probe_of("generate_request")
    ended = asyncio.Event()
    watched, left = [], []

    async def items():
        answer = Anything(meta_info={"cached_tokens": 1})
        watched.append(weakref.ref(answer))
        yield answer

    async def serve(**_):
        left.append(asyncio.create_task(ended.wait()))
        return len(await wrapping.wrap(answers, items)().__anext__())

    async def use():
        await wrapping.wrap(generate, serve)(request_id="r", prompt_ids=[1])
        await asyncio.sleep(0.01)
        gc.collect()
        free = watched[0]() is None
        ended.set()
        await left[0]
        return free

    assert asyncio.run(use())


def probe_of(name):
    (probe,) = [probe for probe in PROBED if probe.name == name]
    return probe
