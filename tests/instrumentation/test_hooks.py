"""What hooks set is taken back however the call ends; what they raise stays theirs."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import types
from contextvars import copy_context

import pytest
from reading_back import lines_of

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import all_probes
from verl_profiler.probes.values import LONGEST
from verl_profiler.recording import context, recorder, requests
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall, Request
from verl_profiler.recording.identity import Identity

REQUEST = {
    "trajectory": {"step": 3, "sample_index": 1, "rollout_n": 0, "validate": False},
    "agent_name": "loop",
}
CALL = {"request_id": "r", "prompt_ids": [1, 2]}


def probe_of(name):
    return next(probe for probe in all_probes() if probe.name == name)


def wrapped(name, function):
    return wrapping.wrap(probe_of(name), function)


class Trainer:
    """In the place of verl's."""

    global_steps = 7


class Never:
    """An awaitable that waits for nobody."""

    def __await__(self):
        yield


async def nothing(**_):
    """What the host awaits."""
    await asyncio.sleep(0)


def fails(*_arguments):
    raise RuntimeError("ours")


def lines(worker_config, event):
    recorder.stop()
    return [line for line in lines_of(worker_config.directory) if line["event"] == event]


@pytest.mark.parametrize("probe", ["request", "engine_request"])
@pytest.mark.parametrize("failing", ["enter", "leave", "stopped"])
def test_the_context_is_the_hosts_again(probe, failing, recording, monkeypatch):
    """Also where our own code fails on the way, or the recorder stops during the call."""
    if failing == "enter":
        monkeypatch.setattr(recorder.Recorder, "add_cpu", fails)
        monkeypatch.setattr(wrapping, "SAMPLED", 1)
    elif failing == "leave":
        monkeypatch.setattr(requests, "close_turn", fails)
        monkeypatch.setattr("verl_profiler.probes.engine.times_of", fails)

    async def use(**_):
        seen.append((context.current_request.get(), context.current_engine_call.get()))
        engine_call = context.current_engine_call.get()
        if engine_call is not None:
            engine_call.answer = {}
        if failing == "stopped":
            recorder.stop()

    async def call():
        await wrapped(probe, use)(**REQUEST, **CALL)
        return context.current_request.get(), context.current_engine_call.get()

    seen = []
    assert (None, None) == asyncio.run(call())
    if failing == "enter":
        assert [(None, None)] == seen
    else:
        assert [(None, None)] != seen
    assert (failing != "stopped") == bool(status.errors)


def test_an_engine_call_whose_begin_fails_leaves_the_turns_as_they_are(recording, worker_config):
    """The next call that works begins a turn of its own; a count of open calls would be off."""

    async def loop(**_):
        generate = wrapped("engine_call", nothing)
        await generate(**CALL)
        await generate(request_id="r", prompt_ids=None)
        await generate(**CALL)
        await generate(**CALL)

    asyncio.run(wrapped("request", loop)(**REQUEST))

    assert {"engine_call": 1} == dict(status.errors)
    assert [0, 1, 2] == [line["extra"]["turn"] for line in lines(worker_config, "turn")]


def test_a_call_that_is_collected_in_another_request_leaves_that_one_alone(recording):
    """The garbage collector closes a dropped coroutine wherever the thread is."""

    async def endless(**_):
        await Never()

    run = wrapped("request", endless)(**REQUEST)
    copy_context().run(run.send, None)

    async def other(**_):
        nonlocal run
        mine = context.current_request.get()
        del run
        gc.collect()
        return mine is not None and context.current_request.get() is mine

    assert asyncio.run(wrapped("request", other)(**REQUEST))


def test_a_call_that_ends_in_a_copy_of_its_context_ends_there(recording):
    """The event loop closes a dropped generator in a task of its own."""
    begun = copy_context()

    async def endless(**_):
        await Never()

    run = wrapped("request", endless)(**REQUEST)
    begun.run(run.send, None)
    ended = begun.run(copy_context)
    ended.run(run.close)

    assert ended.run(context.current_request.get) is None


def test_an_engine_call_in_a_context_that_an_earlier_one_left_is_recorded(recording, worker_config):
    """A task that was started within a request serves others later; the request in it is over."""

    async def use():
        background = []

        async def first(**_):
            background.append(copy_context())

        await wrapped("engine_request", first)(**CALL)
        second = background[0].run(
            asyncio.ensure_future, wrapped("engine_request", nothing)(**CALL)
        )
        await second

    asyncio.run(use())

    assert 2 == len(lines(worker_config, "engine_request"))


def test_the_event_loop_closes_a_probed_generator_once(recording, caplog):
    """At its end the loop closes all that is open; what the wrapper holds is closed by the wrapper."""
    kept, closed, problems = [], [], []

    async def items():
        try:
            yield 1
        finally:
            await asyncio.sleep(0.01)
            closed.append(True)

    probed = wrapping.wrap(Probe("event", "rollout", ("x:y",)), items)

    async def serve():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, what: problems.append(what["message"])
        )
        for _ in range(20):
            kept.append(probed())
            await kept[-1].__anext__()

    asyncio.run(serve())

    assert [] == problems
    assert 20 == len(closed)


def test_nested_probed_generators_are_closed_by_the_one_that_is_dropped(recording, worker_config):
    """From the outside in, as without probes; each is recorded once."""
    closed = []
    probe = Probe("event", "rollout", ("x:y",))

    async def inner():
        try:
            yield 1
            yield 2
        finally:
            closed.append("inner")

    async def outer():
        try:
            async for item in wrapping.wrap(probe, inner)():
                yield item
        finally:
            closed.append("outer")

    async def use():
        async for _ in wrapping.wrap(probe, outer)():
            break
        for _ in range(6):
            await asyncio.sleep(0)

    asyncio.run(use())

    assert ["outer", "inner"] == closed
    assert ["unfinished"] * 2 == [line["extra"]["status"] for line in lines(worker_config, "event")]


@pytest.mark.parametrize("where", ["enter", "leave", "item"])
def test_what_a_hook_meets_in_the_hosts_values_stays_there(where, recording):
    """A `__str__` or `__len__` of the host's may raise anything."""

    def cancelled(*_):
        raise asyncio.CancelledError

    async def items():
        yield 1

    async def use():
        return [item async for item in wrapping.wrap(probe, items)()]

    probe = Probe("event", "rollout", ("x:y",), **{where: cancelled})

    assert [1] == asyncio.run(use())
    assert {"event": 1} == dict(status.errors)


def test_what_a_signal_handler_raises_goes_to_the_host(recording):
    """Ray ends a worker with SystemExit from a handler, wherever the thread is."""

    def end(*_):
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):
            pass

    def handler(*_):
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(SystemExit):
            wrapping.wrap(Probe("event", "rollout", ("x:y",), leave=end), lambda: 1)()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_failure_that_cannot_be_printed_is_counted(recording, monkeypatch):
    """At the recursion limit printing fails as well."""
    monkeypatch.setattr("traceback.format_exception", fails)
    probe = Probe("event", "rollout", ("x:y",), enter=fails)

    assert 1 == wrapping.wrap(probe, lambda: 1)()
    assert {"event": 1} == dict(status.errors)


def test_a_host_at_the_recursion_limit_gets_its_own_error_or_none(recording):
    """Wherever in our code the limit is met."""
    probe = probe_of("tool_call")

    def deeper(depth):
        if depth:
            return deeper(depth - 1)
        return wrapping.wrap(probe, lambda tool_call: tool_call)("t")

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    try:
        for depth in range(120, 230):
            with contextlib.suppress(RecursionError):
                deeper(depth)
    finally:
        sys.setrecursionlimit(limit)

    assert context.current_request.get() is None


def test_a_forked_child_leaves_the_parents_requests_and_trainer_to_the_parent(
    worker_config, monkeypatch
):
    """What is open ends well there, once; the child works in the step that it was forked in."""
    forgotten = []
    monkeypatch.setattr(recorder, "_before_stop", [])
    monkeypatch.setattr(recorder, "_after_fork", [*recorder._after_fork])
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    recorder.before_stop(requests.finish_open_requests)
    recorder.before_stop(lambda: recorder.record("last", 0, 1))
    recorder.after_fork(lambda: forgotten.append(True))
    trainer = Trainer()
    context.process.hold_trainer(trainer)
    context.process.validate = True

    async def fork(**_):
        child = os.fork()
        if child == 0:
            process = context.process
            try:
                recorder.record("child", None, now())
                recorder.stop()
                left = (process.is_trainer, process.validate, process.current_step(), forgotten)
            finally:
                os._exit(0 if left == (False, False, 7, [True]) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert 0 == asyncio.run(wrapped("request", fork)(**REQUEST))
    recorder.stop()
    # The loop stands still while it waits for the child.
    found = [x for x in lines_of(worker_config.directory) if x["event"] != "event_loop_lag"]

    assert ["child", "last", "request", "request_start"] == sorted(line["event"] for line in found)
    assert {"child": 7, "last": 7}.items() <= {
        line["event"]: line["step"] for line in found
    }.items()
    assert [None] == [line["extra"].get("status") for line in found if line["event"] == "request"]
    assert [] == forgotten


class Loud(str):
    """A text of a class of the host's."""

    __slots__ = ()

    def __str__(self):
        return "loud"


def strange():
    """Return arguments as a model, a tool or a user's code may make them."""
    huge = "x" * 10**6
    sample = types.SimpleNamespace(prompt_ids=[1], response_ids=[2], reward_score=0.5)
    return {
        "self": types.SimpleNamespace(global_steps=3),
        "trajectory": {"step": 3, "sample_index": huge, "rollout_n": Loud("1"), "validate": 1},
        "agent_name": object(),
        "request_id": huge,
        "prompt_ids": [1, 2],
        "agent_data": types.SimpleNamespace(request_id=object(), assistant_turns=0),
        "tool_call": types.SimpleNamespace(name=huge),
        "output": sample,
        "outputs": [sample],
        "data": type(
            "Data",
            (dict,),
            {"_tensordict": {}, "batch_size": (2,), "non_tensor_batch": {"index": [huge]}},
        )({"loss": 0.5, "text": Loud("y"), huge: 1, "big": 2**70}),
        "metadata": types.SimpleNamespace(partition_ids=[huge], size=2),
        "partition_id": huge,
        "head": huge,
        "name": huge,
        "obj": types.SimpleNamespace(tags=[huge, object()]),
        "tags": [huge, object()],
        "keys": ["a"],
        "device": huge,
        "step": 3,
        "global_steps": 4,
    }


def odd(value, path=""):
    """Return where a value is something else than short plain JSON."""
    if type(value) is dict:
        found = [odd(key, path) + odd(each, f"{path}.{key[:20]}") for key, each in value.items()]
        return [place for places in found for place in places]
    if type(value) is list:
        return [place for each in value for place in odd(each, f"{path}[]")]
    if type(value) in (bool, float, type(None)):
        return []
    if type(value) is str:
        return [] if len(value) <= LONGEST else [f"{path}: {len(value)} characters"]
    if type(value) is int:
        return [] if abs(value) < 2**63 else [f"{path}: {value.bit_length()} bits"]
    return [f"{path}: {type(value).__name__}"]


def test_fields_are_plain_and_short_whatever_the_host_hands_over(recording, monkeypatch):
    """A field holds no object of the host's, which it could keep alive, and no text of any length."""
    module = types.ModuleType("verl.utils.device")
    module.get_torch_device = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "verl.utils.device", module)
    made, trainer = [], Trainer()
    monkeypatch.setattr(recorder.Recorder, "append", lambda _, item: made.append(item))
    recording.queue.clear()
    huge = "x" * 10**6
    sample = types.SimpleNamespace(token_ids=[1], extra_fields={"global_steps": object()})
    sample.stop_reason = huge
    wrong = []
    for probe in all_probes():
        made.clear()
        for result in (sample, (huge, [1]), huge, {"reward_score": 1.0}, None):
            outer = Request(3)
            outer.turn = 0
            context.current_request.set(outer)
            call = EngineCall() if probe.name == "_vllm_request_id" else None
            context.current_engine_call.set(call)
            wrapping.wrap(probe, lambda result=result, **_: result)(**strange())
            made.append((None, None, 0, outer.full_identity(), outer.step))
            context.current_request.set(None)
            context.process.hold_trainer(trainer)
            wrapping.wrap(probe, lambda result=result, **_: result)(**strange())
        context.process.reset()
        wrong += [
            (probe.targets[0], place)
            for event, _, _, extra, step in made
            for place in odd([event, extra, step])
        ]

    assert [] == wrong


@pytest.mark.parametrize(
    ("masks", "generated", "tool"),
    [
        ([[1, 1, 0, 0, 0, 1]], 3, 3),
        ([[1, 1, 0, 0, 0, 1], [1] * 6], 9, 3),
        ([[0] * 6], 0, 6),
        ([None], None, None),
        ([[1, 1]], None, None),
    ],
)
def test_tokens_of_the_model_and_of_tools_are_told_apart(recording, masks, generated, tool):
    """By verl's mask; without one, or with one of another length, nothing is said."""
    made = [
        types.SimpleNamespace(prompt_ids=[7, 8], response_ids=[1, 2, 3, 4, 5, 6], **more)
        for more in ({} if mask is None else {"response_mask": mask} for mask in masks)
    ]
    request = Request(3)
    context.current_request.set(request)
    probe = next(
        each for each in all_probes() if each.targets[0].endswith("_agent_loop_postprocess")
    )
    wrapping.wrap(probe, lambda output: None)(output=made if len(made) > 1 else made[0])
    context.current_request.set(None)

    assert {} == dict(status.errors)
    assert (2, 6 * len(masks), generated, tool) == (
        request.prompt_tokens,
        request.response_tokens,
        request.generated_tokens,
        request.tool_tokens,
    )
