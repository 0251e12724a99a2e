"""What a process shows of itself when the run is stuck: gathered then, in bounded time, at most N times."""

import asyncio
import json
import threading
import time

from recording.children import until

from verl_profiler.recording import evidence, open_calls, open_state, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now


class Owner:
    """An object of the host, with which its source goes."""


def files_of(watcher):
    return sorted(watcher.active.directory.glob("evidence/*/*.json"))


def stuck_phase(step):
    call = Call("gen", now() - 10**9, step=step)
    open_calls.begin_phase(call)
    return call


def end(call):
    call.end_ns = now()
    open_calls.end_phase(call)
    # So that the next one has no usual length of a second.
    open_calls._lengths.clear()


def test_evidence_is_written_when_a_phase_is_stuck_and_not_before(watcher):
    """Once for each hang, at most as often as the settings have it."""
    watcher.look()
    watcher.add_evidence()
    assert [] == files_of(watcher)

    for number in range(1, 6):
        call = stuck_phase(number)
        for _ in range(3):
            watcher.look()
            watcher.add_evidence()
        assert min(number, 3) == len(files_of(watcher))
        end(call)
        watcher.look()

    first = json.loads(files_of(watcher)[0].read_text())
    assert "stacks" in first
    places = [place for row in first["stacks"]["threads"] for place in row["stack"]]
    assert any(f"{__name__}:test_evidence_is_written" in place for place in places)


def test_other_processes_follow_the_trainer(watcher):
    """They have no phase; the folder that the trainer's process made is enough."""
    engine = Owner()
    evidence.add_source_of("engine", engine, lambda _: {"requests": 3})
    watcher.add_evidence()
    assert [] == files_of(watcher)

    (watcher.active.directory / "evidence" / "1").mkdir(parents=True)
    watcher.add_evidence()
    watcher.add_evidence()

    (path,) = files_of(watcher)
    found = json.loads(path.read_text())
    assert {"requests": 3} == found["engine"]
    assert watcher.active.name == found["name"] == path.stem


def test_a_process_that_starts_later_has_no_part_in_earlier_hangs(recording):
    """Such as a worker that is restarted."""
    (recorder.active().directory / "evidence" / "1").mkdir(parents=True)
    late = open_state._Watcher(recorder.active(), 1.0)
    late.start()
    until(lambda: late.hangs)
    late.ended = True
    late.woken.set()
    late.join(5)

    assert 1 == late.hangs
    assert [] == files_of(late)


def test_a_source_that_hangs_or_fails_holds_up_nothing():
    """It is named; and is not called again while it hangs."""
    owner = Owner()
    release, calls = threading.Event(), []

    def hang(_owner):
        calls.append(1)
        release.wait(20)
        return {"late": 1}

    def fail(_owner):
        raise ValueError("my secret")

    evidence.add_source_of("engine", owner, hang)
    evidence.add_source_of("other", owner, fail)
    try:
        first, second = evidence.gather(0.5), evidence.gather(0.5)
    finally:
        release.set()

    assert [1] == calls
    for found in (first, second):
        assert ["engine"] == found["unanswered"]
        assert {"other": "ValueError"} == found["errors"]
        assert "engine" not in found
        assert "stacks" in found
        assert "secret" not in json.dumps(found)


def test_tasks_of_all_loops_are_counted_by_where_they_stand():
    """Also of a loop in which nothing is probed."""
    release = threading.Event()

    async def many():
        forever = asyncio.Event()

        async def wait():
            await forever.wait()

        tasks = [asyncio.create_task(wait()) for _ in range(7)]
        while not release.is_set():
            await asyncio.sleep(0.01)
        forever.set()
        await asyncio.gather(*tasks)

    thread = threading.Thread(target=asyncio.run, args=(many(),))
    thread.start()
    time.sleep(0.2)
    found = evidence.gather()
    release.set()
    thread.join()

    (row,) = [row for row in found["stacks"]["tasks"] if row["tasks"] == 7]
    assert "Future" == row["awaits"]
    assert row["stack"][-1].startswith("asyncio.locks:Event.wait")
    assert ".wait:" in row["stack"][0]
