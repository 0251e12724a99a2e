"""The heartbeat in the host's event loops: it keeps nothing, and every loop has one."""

import asyncio
import gc
import os
import time
import weakref
from contextvars import ContextVar

import pytest
from reading_back import lines_of

from verl_profiler import instrument, loop_lag, recorder
from verl_profiler.probes import Probe
from verl_profiler.recorder import Identity

PROBE = Probe("event", "rollout", ("x:y",))
_current_batch: ContextVar[object] = ContextVar("current_batch")


class Batch:
    """What a request of the host's has in its context."""


@pytest.fixture
def quick(monkeypatch):
    """Beats every 10 ms."""
    monkeypatch.setattr(loop_lag, "_PERIOD_S", 0.01)


async def _call():
    """What the host awaits."""


probed = instrument.wrap(PROBE, _call)


def lags(carried):
    return [line for line in lines_of(carried.directory) if line["event"] == "event_loop_lag"]


def beats(monkeypatch):
    """Return a list that grows with each beat."""
    seen = []
    beat = loop_lag._Heartbeat._beat

    def counted(self):
        seen.append(True)
        beat(self)

    monkeypatch.setattr(loop_lag._Heartbeat, "_beat", counted)
    return seen


def test_the_first_requests_context_is_free_when_it_is_over(recording, quick):
    """A timer keeps the context that it was set in, and this one is set again for ever."""

    async def first_request():
        batch = Batch()
        _current_batch.set(batch)
        await probed()
        return weakref.ref(batch)

    async def serve():
        batch = await asyncio.create_task(first_request())
        await asyncio.sleep(0.03)
        gc.collect()
        return batch()

    assert asyncio.run(serve()) is None


def test_a_loop_at_the_address_of_an_earlier_one_is_watched(recording, quick, monkeypatch):
    """The loop that was looked at last is known by its address."""
    seen = beats(monkeypatch)
    monkeypatch.setattr(loop_lag, "id", lambda _: 7, raising=False)
    monkeypatch.setattr(instrument, "id", lambda _: 7, raising=False)

    async def serve():
        await probed()
        await asyncio.sleep(0.03)

    asyncio.run(serve())
    gc.collect()
    first = len(seen)
    asyncio.run(serve())

    assert 0 < first < len(seen)


def test_a_loop_is_watched_again_by_the_next_recording(carried, quick, monkeypatch):
    """The heart stops with its recording."""
    seen = beats(monkeypatch)

    async def serve():
        counts = []
        for _ in range(2):
            recorder.start(carried, lambda: Identity("agent_loop", 0))
            await probed()
            await asyncio.sleep(0.05)
            recorder.stop()
            await asyncio.sleep(0.05)
            counts.append(len(seen))
        return counts

    first, second = asyncio.run(serve())

    assert second > first + 1


def test_a_stall_is_recorded_with_the_call_that_caused_it(recording, carried, quick):
    """In the heartbeat's own context, which has no request."""
    blocking = instrument.wrap(PROBE, lambda: time.sleep(0.3))

    async def serve():
        await probed()
        await asyncio.sleep(0.02)
        blocking()
        await asyncio.sleep(0.02)

    asyncio.run(serve())
    recorder.stop()
    longest = max(lags(carried), key=lambda line: line["duration_sec"])

    assert "event" == longest["extra"]["during"]
    assert "request_id" not in longest["extra"]


def test_a_loop_that_takes_no_timer_of_ours_costs_no_call(recording, capsys):
    """Another implementation of the loop may have another signature."""

    class Loop(asyncio.SelectorEventLoop):
        def call_later(self, delay, callback, *args):
            return super().call_later(delay, callback, *args)

    loop = Loop()
    loop.run_until_complete(probed())
    loop.close()

    assert {} == dict(instrument.status.errors)
    assert {"event": 1} == dict(instrument.status.hits)


def test_a_forked_child_watches_its_own_loops(recording, quick):
    """It has the parent's loop in its memory, which never runs there."""

    async def serve():
        await probed()
        return (loop_lag.last_loop, len(loop_lag._watched))

    async def fork():
        before = await serve()
        child = os.fork()
        if child == 0:
            os._exit(0 if (loop_lag.last_loop, len(loop_lag._watched)) == (0, 0) else 1)
        return before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    (last, watched), status = asyncio.run(fork())

    assert (last, watched) != (0, 0)
    assert 0 == status
