"""Placing probes: on which object, when, and what happens if the target has moved."""

import asyncio
import functools
import inspect
import sys
import types

import pytest
from reading_back import lines_of

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.status import status
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity


class Stop(Exception):
    """What a hook raises."""


SOURCE = """
import asyncio
import functools
import inspect

def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    inner.marker = 1
    return inner

def handed_out(function):
    # As torch.no_grad does.
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def for_whom_it_may(function):
    # As verl's auto_await does: a coroutine gets the coroutine, anyone else the result.
    @functools.wraps(function)
    def inner(*args, **kwargs):
        coroutine = function(*args, **kwargs)
        if inspect.currentframe().f_back.f_code.co_flags & inspect.CO_COROUTINE:
            return coroutine
        return asyncio.run(coroutine)
    return inner

class Base:
    def inherited(self, x):
        return x

class Host(Base):
    def __init__(self, result=None):
        self.result, self.got = result, []

    def plain(self, x, *, y=2):
        if x == "raise":
            raise self.error
        return self.result

    async def coroutine(self, x):
        if x == "raise":
            raise self.error
        return self.result

    def generator(self, x):
        sent = yield x
        return sent

    async def items(self, x):
        for n in range(x):
            got = yield n
            self.got.append(got)

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of(cls, x):
        return cls, x

    @decorated
    def marked(self, x):
        return x

    @handed_out
    async def given(self, x):
        await asyncio.sleep(0.01)
        return await self.coroutine(x)

    @for_whom_it_may
    async def either(self, x):
        await asyncio.sleep(0.01)
        return await self.coroutine(x)

def function(x):
    return x
"""


@pytest.fixture
def host(monkeypatch):
    """A module `probed_host`, as if it had been imported."""
    module = types.ModuleType("probed_host")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "probed_host", module)
    yield module
    placing.uninstall()


def probe(path, event="seen", **hooks):
    return Probe(event, "rollout", (f"probed_host:{path}",), **hooks)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("method", ["plain", "coroutine", "generator", "items", "static", "given"])
def test_a_trace_encloses_what_is_measured(host, worker_config, method, recorded):
    """In one wrapper, and without a recorder too."""
    if recorded:
        recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    order = []

    def trace(args, kwargs):
        order.append("begin")
        return lambda result, error: order.append("end")

    hooks = {
        "enter": lambda call: order.append("enter"),
        "leave": lambda call, result: order.append("leave"),
    }
    original = getattr(host.Host, method)
    placing.install([probe(f"Host.{method}", trace=trace, **hooks)])
    one = host.Host(1)

    async def use():
        got = getattr(one, method)(1)
        if inspect.isasyncgen(got):
            return [item async for item in got]
        return list(got) if inspect.isgenerator(got) else got if got == 1 else await got

    asyncio.run(use())
    recorder.stop()

    assert original is getattr(host.Host, method).__wrapped__
    assert (["begin", "enter", "leave", "end"] if recorded else ["begin", "end"]) == order


def test_a_trace_that_fails_costs_itself_only(host, recording):
    """At its begin or at its end; the call is measured all the same."""
    measured = []

    def begin(args, kwargs):
        raise Stop

    def end(result, error):
        raise Stop

    for trace in (begin, lambda args, kwargs: end):
        leave = lambda call, result: measured.append(result)
        placing.install([probe("Host.plain", trace=trace, leave=leave)])
        one = host.Host(5)
        assert 5 == one.plain(1)
        assert {"seen": 1} == dict(status.errors)
        placing.uninstall()

    assert [5, 5] == measured


def test_methods_of_actor_classes_that_are_made_already_travel_by_name(host, worker_config):
    """Else Ray takes the original along, by value, and nothing is recorded where it lands."""
    cloudpickle = pytest.importorskip("cloudpickle")
    by_name = cloudpickle.dumps(host.Host.coroutine)
    made = host.Host.coroutine
    tracing = probe("Host.coroutine", trace=lambda args, kwargs: None)
    placing.install([tracing], only_exported_of="loaded")

    assert by_name == cloudpickle.dumps(made)
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    placing.install([tracing])
    recorder.stop()

    assert hasattr(cloudpickle.loads(by_name), "__wrapped__")


def foreign(function):
    """As another plugin wraps a method."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("method", ["plain", "static", "of"])
def test_a_foreign_wrapper_on_top_is_no_reason_to_count_twice(
    host, recording, worker_config, method
):
    """It goes on calling ours, which cannot be taken from under it; later it may put ours back."""
    before = vars(host.Host)[method]
    kind = type(before) if method != "plain" else lambda function: function
    probes = [probe(f"Host.{method}")]
    placing.install(probes)
    ours = vars(host.Host)[method]
    setattr(host.Host, method, kind(foreign(foreign(getattr(ours, "__func__", ours)))))
    placing.uninstall()
    placing.install(probes)
    assert {"seen": [f"probed_host:Host.{method}"]} == status.installed
    one = host.Host(1)
    getattr(one, method)(1)
    setattr(host.Host, method, ours)
    getattr(one, method)(1)
    placing.uninstall()
    recorder.stop()

    assert 2 == len(lines_of(worker_config.directory))
    assert before is vars(host.Host)[method]


@pytest.mark.parametrize("method", ["plain", "coroutine"])
def test_results_and_exceptions_are_the_same_objects(host, recording, worker_config, method):
    """Never a copy or a proxy; the host's error handling sees what it always saw."""
    placing.install([probe(f"Host.{method}")])
    one = host.Host(object())
    got = getattr(one, method)(1)
    assert one.result is (asyncio.run(got) if inspect.iscoroutine(got) else got)

    errors = [KeyError("k"), asyncio.CancelledError()]
    for one.error in errors:
        with pytest.raises(type(one.error)) as caught:
            asyncio.run(getattr(one, method)("raise"))
        assert one.error is caught.value
    recorder.stop()

    assert [
        {"status": "error", "error": "KeyError"},
        {"status": "cancelled", "error": "CancelledError"},
    ] == [
        {key: line["extra"][key] for key in ("status", "error") if key in line["extra"]}
        for line in lines_of(worker_config.directory)[1:]
    ]


@pytest.mark.parametrize("method", ["given", "either"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_decorated_coroutine_function_is_recorded_until_its_end(
    host, recording, worker_config, method, raises
):
    """verl's vLLM adapter has `torch.no_grad` before `update_weights`; what it hands out is awaited."""
    placing.install([probe(f"Host.{method}")])
    one = host.Host(object())
    one.error = KeyError("k")

    async def use():
        return await getattr(one, method)("raise" if raises else 1)

    try:
        got = asyncio.run(use())
    except KeyError as error:
        got = error
    recorder.stop()
    (line,) = lines_of(worker_config.directory)

    assert (one.error if raises else one.result) is got
    assert line["duration_sec"] >= 0.01
    assert ("error" if raises else None) == line.get("extra", {}).get("status")


def test_a_decorator_that_looks_at_its_caller_sees_whom_it_saw(host, recording, worker_config):
    """verl's checkpoint engine is called from coroutines and from plain code."""
    placing.install([probe("Host.either")])
    one = host.Host(object())

    assert one.result is one.either(1)
    recorder.stop()
    assert lines_of(worker_config.directory)[0]["duration_sec"] >= 0.01


def test_a_coroutine_that_is_closed_is_recorded_as_unfinished(host, recording, worker_config):
    """Nothing is left open."""

    class Never:
        def __await__(self):
            yield

    async def endless(self, x):
        await Never()

    host.Host.coroutine = endless
    placing.install([probe("Host.coroutine")])
    coroutine = host.Host().coroutine(1)
    coroutine.send(None)
    coroutine.close()
    recorder.stop()

    assert "unfinished" == lines_of(worker_config.directory)[0]["extra"]["status"]


def test_a_generator_passes_values_both_ways(host, recording, worker_config):
    """verl's timers are generators behind `contextmanager`."""
    placing.install([probe("Host.generator")])
    generator = host.Host().generator("x")

    assert "x" == next(generator)
    with pytest.raises(StopIteration) as stopped:
        generator.send("back")
    recorder.stop()

    assert "back" == stopped.value.value
    assert 1 == len(lines_of(worker_config.directory))


def test_an_async_generator_passes_items_sends_and_throws(host, recording, worker_config):
    """Every item also reaches the probe."""
    seen = []
    placing.install([probe("Host.items", item=lambda call, item: seen.append(item))])
    one = host.Host()

    async def use():
        items = one.items(3)
        first = await items.__anext__()
        second = await items.asend("a")
        with pytest.raises(KeyError):
            await items.athrow(KeyError("k"))
        return first, second

    assert (0, 1) == asyncio.run(use())
    recorder.stop()

    assert [0, 1] == seen
    assert ["a"] == one.got
    assert "KeyError" == lines_of(worker_config.directory)[0]["extra"]["error"]


def test_a_probe_that_fails_costs_itself_only(host, recording, worker_config, capsys):
    """Counted, printed once, and the host goes on."""

    def broken(call, *result):
        raise RuntimeError("ours")

    placing.install([probe("Host.plain", leave=broken), probe("function", "f", enter=broken)])
    one = host.Host(3)

    assert [3, 3, 3] == [one.plain(1) for _ in range(3)]
    assert 4 == host.function(4)
    assert {"seen": 3, "f": 1} == dict(status.errors)
    assert 2 == capsys.readouterr().err.count("probe-failed")


def test_a_target_that_moved_costs_one_line_and_that_probe_only(host, recording, capsys):
    """Training is not affected, and the header says what is missing."""
    placing.install([probe("Host.gone", "gone"), probe("Host.plain")])

    assert {"gone": "probed_host has no Host.gone"} == status.missed
    assert ["seen"] == list(status.installed)
    line = capsys.readouterr().err
    assert 1 == line.count("\n")
    assert "Training is not affected" in line


def test_a_parameter_that_is_gone_is_named(host, recording, capsys):
    """The time is still measured."""
    placing.install([probe("Host.plain", reads=("x", "priority"))])

    assert "no longer takes priority" in capsys.readouterr().err
    assert ["seen"] == list(status.installed)


@pytest.mark.parametrize("ended", [False, True])
def test_a_module_that_comes_later_is_probed_when_it_comes(recording, tmp_path, monkeypatch, ended):
    """By-name imports of it already get the wrapper; not after the end, also of probes that need no recorder."""
    (tmp_path / "later_host.py").write_text("def work():\n    return 1\n")
    (tmp_path / "later_user.py").write_text("from later_host import work\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trace = None
    if ended:
        recorder.stop()
        trace = lambda args, kwargs: None
    placing.install([Probe("work", "rollout", ("later_host:work",), trace=trace)])
    if ended:
        placing.uninstall()
    import later_user

    assert ended != hasattr(later_user.work, "__wrapped__")
    placing.uninstall()
    del sys.modules["later_user"], sys.modules["later_host"]


def test_without_a_recorder_nothing_is_wrapped(host):
    """Off means the original function object."""
    before = host.Host.plain
    placing.install([probe("Host.plain")])

    assert before is host.Host.plain


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("method", ["plain", "coroutine", "generator"])
def test_a_call_that_a_probe_does_not_apply_to_is_not_measured(
    host, recording, worker_config, method, traced
):
    """Its hooks are not run either; that of a trace is."""
    applies, seen, traces = [], [], []
    hooks = {"applies": lambda: bool(applies), "enter": seen.append}
    if traced:
        hooks["trace"] = lambda args, kwargs: traces.append(args)
    placing.install([probe(f"Host.{method}", **hooks)])
    one = host.Host("r")
    for _ in range(2):
        result = getattr(one, method)(1)
        assert "r" == asyncio.run(result) if method == "coroutine" else list(result)
        applies.append(True)
    recorder.stop()

    assert 1 == len(seen) == len(lines_of(worker_config.directory))
    assert 2 * traced == len(traces)


@pytest.mark.parametrize("method", ["plain", "coroutine", "generator", "items"])
def test_hooks_are_accounted_and_the_host_is_not(recording, worker_config, monkeypatch, method):
    """Each hook takes 1 s and the host 1000 s, by a clock that they move."""
    clock = [10**9]
    monkeypatch.setattr(wrapping, "now", lambda: clock[0])
    monkeypatch.setattr(recorder, "now", lambda: clock[0])

    def hook(*_):
        clock[0] += 10**9

    def plain():
        clock[0] += 10**12

    async def coroutine():
        clock[0] += 10**12

    def generator():
        clock[0] += 10**12
        yield 1
        clock[0] += 10**12

    async def items():
        clock[0] += 10**12
        yield 1
        clock[0] += 10**12

    async def through():
        return [item async for item in wrapped()]

    functions = {"coroutine": coroutine, "generator": generator, "items": items}
    function = functions.get(method, plain)
    item = hook if method == "items" else None
    probe = Probe("event", "rollout", ("x:y",), enter=hook, leave=hook, item=item)
    wrapped = wrapping.wrap(probe, function)
    if method == "items":
        asyncio.run(through())
    elif method == "coroutine":
        asyncio.run(wrapped())
    else:
        list(wrapped() or ())

    recorder.stop()

    (line,) = lines_of(worker_config.directory)
    assert (2 + (item is not None)) * 10**9 == recording.wrapper_ns
    host_s = 1000 * (1 + (method in ("generator", "items")))
    assert host_s + (item is not None) == line["duration_sec"]
