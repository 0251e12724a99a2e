"""What a process shows of itself when the run is stuck: gathered then, in bounded time, at most N times."""

import asyncio
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest

from verl_profiler.recording import evidence, open_calls, open_state, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now


@pytest.fixture
def sources(monkeypatch):
    """No source that an earlier test added."""
    monkeypatch.setattr(evidence, "_sources", {})
    monkeypatch.setattr(evidence, "_running", {})
    return evidence._sources


@pytest.fixture
def watcher(sources, watcher):
    """The watcher of this folder, without other sources."""
    return watcher


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


def test_other_processes_follow_the_trainer(watcher, sources):
    """They have no phase; the folder that the trainer's process made is enough."""
    sources["engine"] = lambda: {"requests": 3}
    watcher.add_evidence()
    assert [] == files_of(watcher)

    (watcher.active.directory / "evidence" / "1").mkdir(parents=True)
    watcher.add_evidence()
    watcher.add_evidence()

    (path,) = files_of(watcher)
    found = json.loads(path.read_text())
    assert {"requests": 3} == found["engine"]
    assert watcher.active.name == found["name"] == path.stem


def test_a_process_that_starts_later_has_no_part_in_earlier_hangs(recording, sources):
    """Such as a worker that is restarted."""
    (recorder.active().directory / "evidence" / "1").mkdir(parents=True)
    late = open_state._Watcher(recorder.active(), 1.0)
    late.start()
    until = time.monotonic() + 5
    while late.hangs == 0 and time.monotonic() < until:
        time.sleep(0.01)
    late.ended = True
    late.woken.set()
    late.join(5)

    assert 1 == late.hangs
    assert [] == files_of(late)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(open_state, "now", lambda: round(clock.s * 1e9))
    return clock


def trainer_writes(watcher, number, ended=None):
    """As the trainer's process does all the time."""
    path = watcher.active.directory / "processes" / "trainer_0.json"
    path.write_text(json.dumps({"ended": ended, "complete_until": number}))
    os.utime(path, ns=(number * 10**9, number * 10**9))


def look_for(clock, seconds, *watchers, every_s=0.25):
    """Let watchers look while time passes; they plan to do so four times per second."""
    until = clock.s + seconds
    while clock.s < until:
        clock.s += every_s
        for watcher in watchers:
            watcher.look()
            watcher.look_at_trainer()
            watcher.add_evidence()


@pytest.fixture
def training(watcher):
    """A run that has begun its first step."""
    (watcher.active.directory / "step_1").mkdir()


def test_others_request_evidence_while_the_trainers_process_stands_still(
    watcher, clock, training, capfd
):
    """It is stopped, and cannot do so itself. Its clock may be hours off."""
    for number in range(4):
        trainer_writes(watcher, number)
        look_for(clock, 9, watcher)
    assert [] == files_of(watcher), "not before 10 s"
    look_for(clock, 12, watcher)

    assert ["1"] == [path.parent.name for path in files_of(watcher)], "once"
    line, *others = [line for line in capfd.readouterr().err.splitlines() if "trainer" in line]
    assert "WARNING trainer_0 has written nothing for 10 s" in line
    assert line.endswith("(trainer-silent)")
    assert [] == others

    # It goes on, and stops once more.
    for number in range(9, 12):
        trainer_writes(watcher, number)
        look_for(clock, 6, watcher)
    assert "trainer_0 goes on after " in capfd.readouterr().err
    look_for(clock, 6, watcher)
    assert ["1", "2"] == [path.parent.name for path in files_of(watcher)]


def test_one_of_many_processes_requests_it(watcher, clock, training, capfd):
    """Whoever makes the folder prints the line; all the others write theirs into it."""
    other = open_state._Watcher(watcher.active, 0.05)
    trainer_writes(watcher, 1)
    look_for(clock, 15, watcher, other)

    assert (1, 1) == (watcher.hangs, other.hangs)
    assert 1 == capfd.readouterr().err.count("(trainer-silent)")
    assert ["1"] == [each.name for each in (watcher.active.directory / "evidence").iterdir()]


@pytest.mark.parametrize("case", ["ended", "no header", "a copy", "starting", "a busy machine"])
def test_a_trainer_that_has_reason_to_write_nothing_stands_not_still(watcher, clock, capfd, case):
    """It has ended, is elsewhere or starts; or whoever looks runs late, too."""
    if case == "a copy":
        nodes = [{"processes": {"trainer_0": "trainer_0"}}]
        (watcher.active.directory / "shipping.json").write_text(json.dumps({"nodes": nodes}))
    if case != "no header":
        trainer_writes(watcher, 1, "2026-11-24T00:00:00+00:00" if case == "ended" else None)
    (watcher.active.directory / ("step_0" if case == "starting" else "step_1")).mkdir()
    look_for(clock, 30, watcher, every_s=2.5 if case == "a busy machine" else 0.25)

    assert not (watcher.active.directory / "evidence").exists()
    assert "trainer-silent" not in capfd.readouterr().err


def test_a_source_that_hangs_or_fails_holds_up_nothing(sources, monkeypatch):
    """It is named; and is not called again while it hangs."""
    monkeypatch.setattr(evidence, "_PATIENCE_S", 0.5)
    release, calls = threading.Event(), []

    def hang():
        calls.append(1)
        release.wait(20)
        return {"late": 1}

    def fail():
        raise ValueError("my secret")

    sources.update(engine=hang, other=fail)
    try:
        first, second = evidence.gather(), evidence.gather()
    finally:
        release.set()

    assert [1] == calls
    for found in (first, second):
        assert ["engine"] == found["unanswered"]
        assert {"other": "ValueError"} == found["errors"]
        assert "engine" not in found
        assert "stacks" in found
        assert "secret" not in json.dumps(found)


def test_tasks_of_all_loops_are_counted_by_where_they_stand(sources):
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
