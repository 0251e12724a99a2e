"""Reading an engine's load: lines of what changed, and an end where the engine has one."""

import asyncio
import functools
import threading
import time
from types import SimpleNamespace

import pytest

from verl_profiler.instrumentation import wrapping
from verl_profiler.probes import engine_state
from verl_profiler.recording import evidence


class FakeManager:
    """In the place of SGLang's `TokenizerManager`: answers with the given loads, then fails."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    async def get_loads(self):
        self.asked += 1
        if not self.answers:
            raise ConnectionError("gone")
        return self.answers.pop(0)


def fake_load(rank, running, waiting, used):
    """In the form of SGLang's `GetLoadsReqOutput` (sglang 0.5.12)."""
    return SimpleNamespace(
        dp_rank=rank,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_used_tokens=used,
        max_total_num_tokens=1000,
        max_running_requests=8,
    )


@pytest.fixture
def launched(engine_recording):
    """Return a function that launches a server with a manager, and returns the lines that it left."""

    def run(manager, *, enabled=True):
        recording = engine_recording("engine_state")
        recording.start(enabled=enabled)

        class Server:
            tokenizer_manager = manager

            async def launch_server(self):
                return "launched"

        launch = wrapping.wrap(engine_state.PROBES[0], Server.launch_server)

        async def until_it_ends():
            assert "launched" == await launch(Server())
            reader = engine_state._reader
            # It fails after its last answer.
            asked = len(manager.answers) + 1
            while reader is not None and (manager.asked < asked or reader.task is not None):
                await asyncio.sleep(0.01)
            # So long that it would be asked again.
            await asyncio.sleep(0 if reader is None else 0.7)

        asyncio.run(asyncio.wait_for(until_it_ends(), 30))
        return recording.end()

    return run


def test_an_engine_that_fails_is_not_asked_again(launched, capfd):
    """One line on the console names the error."""
    manager = FakeManager([fake_load(None, 1, 0, 5)])

    lines = launched(manager)

    assert [{"running_requests": 1, "waiting_requests": 0, "kv_used_tokens": 5}] == [
        {key: value for key, value in x.items() if key.endswith(("requests", "used_tokens"))}
        for x in lines
    ]
    assert "dp_rank" not in lines[0]
    assert 2 == manager.asked
    assert 1 == capfd.readouterr().err.count("engine-state-failed")


def test_an_engine_that_cannot_or_need_not_be_asked_is_left_alone(launched, capfd):
    """It is launched like any other; the setting is off by default."""
    manager = FakeManager([fake_load(0, 1, 0, 5)])
    manager.answers.clear()

    assert [] == launched(manager, enabled=False)
    assert 0 == manager.asked
    assert "engine-state" not in capfd.readouterr().err
    assert [] == launched(SimpleNamespace(answers=[]))
    assert "engine-state-missing" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("blocks", "answers", "expected"),
    [
        (False, True, {"loads": [{"running_requests": 8, "waiting_requests": 3, "dp_rank": 0}]}),
        (False, False, {"unanswered": "scheduler"}),
        (True, True, {"unanswered": "event loop"}),
    ],
)
def test_what_a_stuck_engine_shows(launched, monkeypatch, blocks, answers, expected):
    """Its scheduler's counts, or that it does not answer; the call for them is not cancelled."""
    on_loop = functools.partial(evidence.on_loop, loop_s=0.3, answer_s=0.3)
    monkeypatch.setattr(evidence, "on_loop", on_loop)
    added = []
    monkeypatch.setattr(evidence, "add_source_of", lambda name, *_: added.append(name))
    manager = FakeManager()
    manager.rid_to_state, manager.is_pause = {"a": 1, "b": 2}, True
    release = threading.Event()
    cancelled = []

    async def get_loads():
        try:
            while not answers and not release.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        load = fake_load(0, 8, 3, 990)
        del load.max_total_num_tokens, load.max_running_requests, load.num_used_tokens
        return [load]

    manager.get_loads = get_loads
    launched(manager, enabled=False)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    if blocks:
        loop.call_soon_threadsafe(release.wait)
    try:
        found = engine_state._current_load(manager, loop)
        assert not cancelled
    finally:
        release.set()
        time.sleep(0.1)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    assert {"requests": 2, "paused": True, **expected} == found
    assert ["engine"] == added
