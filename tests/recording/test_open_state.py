"""What is open for long is in a file, with where it stands; the file goes when it has ended."""

import asyncio
import json
import os
import threading
import time

import pytest
from recording.children import until

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.trainer import PROBES
from verl_profiler.recording import context, open_calls, open_state
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.requests import begin_request, end_request


def written(watcher):
    """What the file holds after a look; None if there is none."""
    watcher.look()
    path = watcher.active.directory / "open" / f"{watcher.active.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


async def written_meanwhile(watcher, call, release):
    """Return what the file holds 100 ms into a call, and the call's result once it is released."""
    task = asyncio.create_task(call())
    await asyncio.sleep(0.1)
    found = await asyncio.to_thread(written, watcher)
    release.set()
    return found, await task


def _wait(event):
    event.wait(10)


def test_a_call_that_blocks_its_thread_is_written_until_it_ends(watcher):
    """With the function and line that it stands in, which is ours here."""
    release = threading.Event()
    probed = wrapping.wrap(Probe("update_actor", "workers", ("x:y",)), _wait)
    thread = threading.Thread(target=probed, args=(release,), name="rank")
    thread.start()
    try:
        assert written(watcher) is None, "not open for long yet"
        time.sleep(0.1)
        found = written(watcher)
    finally:
        release.set()
        thread.join()

    (call,) = found["calls"]
    assert ("update_actor", "rank") == (call["event"], call["thread"])
    assert 0.1 <= call["open_s"] < 10
    line = _wait.__code__.co_firstlineno + 1
    assert call["at"] == f"{__name__}:_wait:{line}"
    assert call["stack"][0] == call["at"], "what called the wrapper is left out"
    assert call["stack"][-1].startswith("threading:"), "Python's own functions are in the stack"
    assert written(watcher) is None


def test_a_suspended_tool_call_is_written_with_its_request(watcher):
    """Nobody's thread is in it: it is found in the task that awaits it."""
    release = asyncio.Event()

    async def tool(_name):
        await release.wait()

    def enter(call):
        call.request = context.current_request.get()
        call.extra = {"tool": call.arguments["_name"]}

    probed = wrapping.wrap(Probe("tool_call", "rollout", ("x:y",), enter=enter), tool)

    async def run():
        request = context.Request(3)
        request.request_id, request.agent = "r-1", "tool_agent"
        begin_request(request)
        context.current_request.set(request)
        request.tool_begin_ns = now()
        found, _ = await written_meanwhile(watcher, lambda: probed("search"), release)
        end_request(request, now(), None)
        return found, await asyncio.to_thread(written, watcher)

    found, after = asyncio.run(run())

    (call,) = found["calls"]
    assert {"request_id": "r-1", "tool": "search"} == call["extra"]
    assert call["at"].startswith(f"{__name__}:test_a_suspended_tool_call")
    assert any("test_open_state" in place for place in call["stack"])
    (request,) = found["requests"]
    assert 3 == request["step"]
    assert ("r-1", "tool_execution") == (request["extra"]["request_id"], request["extra"]["doing"])
    assert after is None


def test_a_blocked_event_loop_is_written_with_what_blocks_it(watcher):
    """The loop of another thread, which sleeps in a callback."""
    probed = wrapping.wrap(Probe("engine_call", "rollout", ("x:y",)), asyncio.sleep)

    async def blocking():
        await probed(0)
        time.sleep(1)

    thread = threading.Thread(target=asyncio.run, args=(blocking(),))
    thread.start()
    time.sleep(0.5)
    found = written(watcher)
    thread.join()

    assert found["threads"] == [], "the loop's thread is listed once"
    (loop,) = found["blocked_loops"]
    assert loop["at"].startswith(f"{__name__}:test_a_blocked_event_loop")
    assert 0.2 <= loop["open_s"] < 5


def phase(event, step, length_s=None, error=None):
    """A phase of the trainer: of that length, or open."""
    call = Call(event, now(), step=step)
    open_calls.begin_phase(call)
    if length_s is not None:
        call.end_ns = call.begin_ns + round(length_s * 1e9)
        call.error = error
        open_calls.end_phase(call)
    return call


@pytest.mark.parametrize(
    ("steps", "lengths", "open_s", "stuck"),
    [
        (False, [], 0.2, False),
        (False, [], 0.6, True),
        (False, [0.02] * 3, 0.04, False),
        (False, [0.02] * 3, 0.2, True),
        (False, [0.2] * 3, 1.0, False),
        (False, [0.2, 0.3, 0.2, 0.2], 1.3, True),
        # `gen` of an asynchronous trainer is usually over at once, for less than a tenth of the steps, and at
        # times it waits for a whole sample: stuck at ten times `after`, and at twice its longest length but one.
        (True, [0.001] * 4, 0.4, False),
        (True, [0.001] * 4, 0.6, True),
        (True, [0.5, 0.001, 0.4, 0.001, 0.001, 0.001], 0.7, False),
        (True, [0.5, 0.001, 0.4, 0.001, 0.001, 0.001], 0.9, True),
        (True, [0.02] * 4, 0.2, True),
    ],
)
def test_a_phase_is_stuck_at_six_times_its_usual_length(
    watcher, capfd, steps, lengths, open_s, stuck
):
    """But not before the 50 ms are over; one whose length is not known, at ten times as much.

    Where there are steps, they take 0.1 s.
    """
    for length in lengths:
        phase("gen", 1, length)
        if steps:
            phase("step", 1, 0.1)
    call = Call("gen", now() - round(open_s * 1e9), step=2)
    open_calls.begin_phase(call)

    found = written(watcher)

    assert found is not None or open_s < 0.05
    if found is not None:
        assert [stuck] == [each["stuck"] for each in found["phases"]]
    printed = capfd.readouterr().err
    assert stuck == ("gen of step 2 has taken" in printed), printed
    call.end_ns = now()
    open_calls.end_phase(call)
    assert written(watcher) is None
    assert stuck == ("gen of step 2 is over" in capfd.readouterr().err)


@pytest.mark.parametrize("open_s", [0.01, 1.0])
def test_what_an_exception_ends_stays_on_record(watcher, open_s):
    """Who waits for long presses Ctrl-C: with what was open then; the next phase begins anew."""
    outer = phase("step", 2)
    call = Call("gen", now() - round(open_s * 1e9), step=2)
    open_calls.begin_phase(call)
    before = written(watcher)
    call.error, call.end_ns = KeyboardInterrupt(), now()
    open_calls.end_phase(call)
    outer.error, outer.end_ns = call.error, now()
    open_calls.end_phase(outer)

    found = written(watcher)

    failed = found["failed"]
    assert ("gen", 2, "KeyboardInterrupt") == (failed["event"], failed["step"], failed["error"])
    assert open_s <= failed["open_s"] < open_s + 5
    assert found.get("phases") == (before or {}).get("phases")
    assert found == written(watcher)

    phase("gen", 3, 0.01)
    assert written(watcher) is None


@pytest.mark.parametrize(("event", "name"), [("validation", "_validate"), ("init", "init")])
def test_what_fails_outside_verl_s_timers_is_on_record_too(watcher, event, name):
    """verl 0.9.1 validates before the first step in no timer, and ends there when rewards fail."""

    class Trainer:
        global_steps = 0

        def fails(self):
            raise ValueError("my secret")

    (probe,) = [each for each in PROBES if each.event == event]
    setattr(Trainer, name, wrapping.wrap(probe, Trainer.fails))
    with pytest.raises(ValueError, match="secret"):
        getattr(Trainer(), name)()

    failed = written(watcher)["failed"]
    assert (event, 0, "ValueError") == (failed["event"], failed["step"], failed["error"])


def test_a_failure_is_written_at_once(recording, watcher):
    """The process may be killed within the next second: the thread does not wait for its next look."""
    open_state.begin()
    phase("update_actor", 4, 0.01, ValueError("my secret"))
    path = recording.directory / "open" / f"{recording.name}.json"
    until(path.exists)

    assert 10 < open_state._watcher.period_s, "it looks every 15 s"
    failed = json.loads(path.read_text())["failed"]
    assert ("update_actor", 4, "ValueError") == (failed["event"], failed["step"], failed["error"])
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), GeneratorExit()])
def test_what_only_ends_a_wait_is_no_failure(watcher, error):
    """A data loader at its end, for example."""
    phase("gen", 2, 0.01, error)

    assert written(watcher) is None


def test_a_paused_engine_is_on_record(watcher):
    """Also without requests: those that it sent back are tried again and again."""
    open_calls.paused_ns = now() - 10**9

    assert 1 <= written(watcher)["paused"]["open_s"] < 6

    open_calls.paused_ns = None
    assert written(watcher) is None


def test_a_forked_child_has_nothing_open(watcher):
    """What is open is its parent's."""
    phase("gen", 2)
    open_state.begin()
    child = os.fork()
    if child == 0:
        os._exit(len(open_calls.open_phases()) + (open_state._watcher is not None))
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert 1 == len(open_calls.open_phases())


def test_the_users_function_in_a_thread_pool_is_written(watcher):
    """A coroutine awaits it, which does not show where it stands."""
    release = threading.Event()

    async def score(event):
        await asyncio.get_running_loop().run_in_executor(None, _wait, event)

    probed = wrapping.wrap(Probe("reward_score", "reward", ("x:y",)), score)
    found, _ = asyncio.run(written_meanwhile(watcher, lambda: probed(release), release))

    assert ["reward_score"] == [call["event"] for call in found["calls"]]
    line = _wait.__code__.co_firstlineno + 1
    assert f"{__name__}:_wait:{line}" in [thread["at"] for thread in found["threads"]]


def test_a_generator_of_tokens_is_written_while_it_waits(watcher):
    """As an engine's: its consumer awaits the next item, not the generator."""

    release = asyncio.Event()

    async def generate():
        yield 1
        await release.wait()
        yield 2

    probed = wrapping.wrap(Probe("engine_request", "engine", ("x:y",)), generate)

    async def consume():
        return [item async for item in probed()]

    found, items = asyncio.run(written_meanwhile(watcher, consume, release))

    assert [1, 2] == items
    (call,) = found["calls"]
    assert "engine_request" == call["event"]
    assert call["at"].startswith(f"{__name__}:test_a_generator_of_tokens")


def test_a_rollouter_without_progress_is_announced(watcher, capfd):
    """At ten times `after`, unless it has waited as long before; not while a limit keeps it from dispatching."""
    open_calls.note_progress(now() - round(0.4e9))
    watcher.look()
    assert "has taken" not in capfd.readouterr().err
    open_calls.idle_ns = None
    watcher.look()

    open_calls.idle_ns = now() - round(0.6e9)
    found = written(watcher)
    assert [("no_progress", True)] == [(row["event"], row["stuck"]) for row in found["phases"]]
    assert "the wait for the next sample to be dispatched or finished has taken 1 s" in (
        capfd.readouterr().err
    )
    # It goes on, and has waited for 0.6 s once.
    open_calls.note_progress(now())
    watcher.look()
    assert "is over after" in capfd.readouterr().err

    open_calls.idle_ns = now() - round(2.0e9)
    watcher.look()
    assert "has taken" not in capfd.readouterr().err, "six times 0.6 s are not over"
    open_calls.idle_ns = None
    assert written(watcher) is None
