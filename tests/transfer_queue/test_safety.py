"""Tracing keeps nothing of a call, is bounded when its lines cannot be printed, and ends when it is told to."""

import asyncio
import gc
import logging
import re
import threading
import time
import weakref
from contextvars import ContextVar, copy_context

import pytest

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.status import status
from verl_profiler.transfer_queue import calls, lines, probes
from verl_profiler.transfer_queue.switches import Switches

ALL = Switches(trace=True, detail=True)
_batch: ContextVar[object] = ContextVar("batch")


class Stop(Exception):
    """What the host raises."""


class Data:
    """What the host moves."""


class KVBatchMeta(Data):
    """By its name the metadata of a batch."""

    def __init__(self):
        self.tags, self.partition_id, self.size = [{"global_steps": 7}], "train", 1


class Printed(logging.Handler):
    """Keeps what is printed; waits while it is told to."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.open = threading.Event()
        self.open.set()

    def emit(self, record):
        self.open.wait()
        self.texts.append(record.getMessage())


@pytest.fixture
def printed():
    """The lines' handler."""
    handler = Printed()
    lines._log.addHandler(handler)
    lines._log.propagate = False
    yield handler
    handler.open.set()
    lines._log.removeHandler(handler)
    lines._log.propagate = True


@pytest.fixture
def tracing(printed):
    """Everything on, on no target of verl's."""
    calls.start(ALL, "run", records=False)
    yield
    printed.open.set()
    calls.stop()
    status.clear()


TRACES = {
    "direct": (probes.begin_function, "f", False, False),
    "client_get": (probes.begin_client_call, "GET"),
}


def around(kind, function):
    """Return the function, traced."""
    return wrapping.wrap(probes.traced("f", *TRACES[kind]), function)


def test_a_task_that_outlives_a_traced_call_keeps_nothing_of_its_caller(tracing):
    """Such a task has the call in its context; the call must not have its caller's."""
    left = []

    async def begin(*_arguments):
        left.append(asyncio.create_task(asyncio.Event().wait()))
        await asyncio.sleep(0)

    async def caller():
        await around("direct", begin)(KVBatchMeta())
        await around("client_get", begin)(Data(), KVBatchMeta())
        batch = Data()
        _batch.set(batch)
        return weakref.ref(batch)

    async def use():
        batch = await asyncio.create_task(caller())
        lines.flush()
        await asyncio.sleep(0)
        gc.collect()
        found = batch()
        for task in left:
            task.cancel()
        return found

    assert asyncio.run(use()) is None


def test_a_log_that_stands_still_costs_lines_and_they_are_counted(tracing, printed):
    """A full pipe stops the thread that prints, not the host, and not for more than so much memory."""
    # One that cannot be put together is counted like those that there is no room for.
    lines.write_soon(lambda: 1 / 0)
    printed.open.clear()
    for number in range(51_000):
        lines.write_soon("line {}".format, number)

    assert len(lines._pending) <= 50_000
    printed.open.set()
    lines.flush()
    deadline = time.monotonic() + 10
    while not any("tq-lines-dropped" in text for text in printed.texts):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        lines.flush()
    said = [int(found[1]) for text in printed.texts if (found := re.search(r"(\d+) lines", text))]
    shown = [text for text in printed.texts if text.startswith("line")]

    assert 51_001 == sum(said) + len(shown)
    assert sorted(shown, key=lambda text: int(text[5:])) == shown


def tracing_threads():
    return sorted(each.name for each in threading.enumerate() if "verl-profiler tq" in each.name)


def test_threads_that_begin_together_start_one_writer(tracing, monkeypatch):
    """A second one would never end."""
    lines.stop()
    barrier = threading.Barrier(6)

    def begin():
        barrier.wait()
        lines.write_soon("x".format)

    threads = [threading.Thread(target=begin) for _ in range(6)]
    make = threading.Thread.__init__

    def slowly(self, *args, **kwargs):
        time.sleep(0.02)
        make(self, *args, **kwargs)

    monkeypatch.setattr(threading.Thread, "__init__", slowly)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["verl-profiler tq lines"] == tracing_threads()
    calls.stop()
    assert [] == tracing_threads()


def test_a_call_that_fails_to_begin_leaves_the_function_around_it_as_it_was(tracing, monkeypatch):
    """Else the stages after it would be wrong, and the next call take it for its own."""
    original = lines.write_soon

    def write_soon(make, *arguments):
        if "TQ_CLIENT_GET_START" in arguments:
            raise Stop
        original(make, *arguments)

    monkeypatch.setattr(lines, "write_soon", write_soon)
    stages = []

    def get(_self, _meta):
        assert calls.current_client.get() is None

    def function(_meta):
        around("client_get", get)(Data(), KVBatchMeta())
        stages.append(calls.current.get().stage)

    around("direct", function)(KVBatchMeta())

    assert ["COMPUTE"] == stages
    assert {"f": 1} == dict(status.errors)


def test_calls_that_end_in_another_context_are_ended(tracing, printed):
    """The garbage collector closes a dropped coroutine wherever the thread is."""

    class Never:
        def __await__(self):
            yield

    async def endless(*_arguments):
        await Never()

    for kind in ("direct", "client_get"):
        run = around(kind, endless)(Data(), KVBatchMeta())
        copy_context().run(run.send, None)
        run.close()
    lines.flush()

    assert {} == dict(status.errors)
    assert [1, 1] == [
        sum(f"stage={stage}" in text for text in printed.texts)
        for stage in ("FUNCTION_END", "TQ_CLIENT_GET_END")
    ]
