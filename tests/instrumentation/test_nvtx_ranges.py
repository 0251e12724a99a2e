"""NVTX ranges: the right kind, nested and overlapping, and no cost where no tool is attached."""

import asyncio

import pytest

from verl_profiler.instrumentation import nvtx_ranges, wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import api, observers

PLAIN = Probe("load", "workers", ("m:f",))
LOOPED = Probe("tool_call", "rollout", ("m:g",))
NOTHING = Probe(None, "rollout", ("m:h",))


@pytest.fixture(autouse=True)
def _off_again():
    yield
    nvtx_ranges.switch_off()


def test_a_process_that_no_tool_watches_has_no_observer(monkeypatch, nvtx):
    """Each call costs one comparison."""
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)

    assert not nvtx_ranges.switch_on()
    assert observers.current is None
    assert [] == nvtx.calls


def test_a_library_without_a_folder_is_the_loaders(monkeypatch):
    """ncu's is `libcuda-injection.so`, as seen on an H100: no file of that name is in the working directory."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "libc.so.6")
    assert nvtx_ranges.tool_attached()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "libno-such-injection.so")
    assert not nvtx_ranges.tool_attached()


def test_plain_calls_nest_and_coroutines_overlap(nvtx, recording):
    """Push and pop belong to a thread; start and end may cross."""
    assert nvtx_ranges.switch_on()
    assert recording is not None

    async def wait(first, second):
        first.set()
        await second.wait()

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        waiting = wrapping.wrap(LOOPED, wait)
        await asyncio.gather(waiting(a, b), waiting(b, a))

    wrapping.wrap(PLAIN, lambda: None)()
    asyncio.run(both())

    domain = "verl_profiler"
    assert [
        ("push", "load", domain, "workers", 0),
        ("pop", domain),
        ("start", "tool_call", domain, "rollout", 0),
        ("start", "tool_call", domain, "rollout", 0),
    ] == nvtx.calls[:4]
    assert {("end", 3), ("end", 4)} == set(nvtx.calls[4:])


def test_errors_and_generators_close_their_ranges(nvtx, recording):
    """Every range that was opened is closed, with the same kind."""
    assert nvtx_ranges.switch_on()
    assert recording is not None

    def fail():
        raise KeyError

    def items():
        yield 1
        yield 2

    with pytest.raises(KeyError):
        wrapping.wrap(PLAIN, fail)()
    assert [1, 2] == list(wrapping.wrap(PLAIN, items)())
    wrapping.wrap(NOTHING, lambda: None)()

    assert ["push", "pop", "start", "end"] == [call[0] for call in nvtx.calls]


def test_a_failing_nvtx_changes_nothing_for_the_host(nvtx, recording, monkeypatch):
    """Ranges are decoration."""
    assert recording is not None

    def broken(*_arguments, **_named):
        raise RuntimeError

    for name in ("start_range", "push_range", "end_range", "pop_range"):
        monkeypatch.setattr(nvtx, name, broken)
    assert nvtx_ranges.switch_on()

    assert 7 == wrapping.wrap(PLAIN, lambda: 7)()
    with api.span("x"):
        pass


def test_a_call_that_runs_when_ranges_are_switched_off_ends(nvtx, recording):
    """Its range stays open; nothing is raised, and its event is recorded."""
    assert nvtx_ranges.switch_on()
    wrapped = wrapping.wrap(PLAIN, nvtx_ranges.switch_off)
    wrapped()

    assert ["push"] == [call[0] for call in nvtx.calls]
    account = recording.account()
    assert 1 == account["events"] + account["waiting"] - account["own_events"]


def test_a_wrapper_that_travels_by_value_finds_what_stands_on_the_other_side(nvtx, recording):
    """Ray ships actor classes from the trainer; only the process where they land knows its tool."""
    cloudpickle = pytest.importorskip("cloudpickle")
    assert recording is not None
    wrapped = cloudpickle.dumps(wrapping.wrap(PLAIN, lambda: 7))

    assert nvtx_ranges.switch_on()
    assert 7 == cloudpickle.loads(wrapped)()
    assert ["push", "pop"] == [call[0] for call in nvtx.calls]
    shipped_with_ranges = cloudpickle.dumps(wrapping.wrap(PLAIN, lambda: 8))
    nvtx_ranges.switch_off()
    nvtx.calls.clear()

    assert 8 == cloudpickle.loads(shipped_with_ranges)()
    assert [] == nvtx.calls
