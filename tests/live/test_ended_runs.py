"""Runs that failed, or whose files no longer change, from headers and open files written by hand."""

import os
import socket
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from stuck_runs import GATHER, NOW, RUN, WORKER, ago, call, header, opened, phase, request, write

from verl_profiler.cli import main
from verl_profiler.events.failure_texts import reason_in
from verl_profiler.live.stuck import verdict

HERE = Path(__file__).parent
DIED = {
    "error": "ActorDiedError",
    "pid": 71,
    "ip": "10.0.0.7",
    "reason": "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits",
}
MEMORY = {
    "error": "OutOfMemoryError",
    "pid": 70,
    "ip": "10.0.0.7",
    "reason": "CUDA out of memory. Tried to allocate 2.50 GiB",
}
# Of the host, where Ray ended a worker.
ENDED = {
    **MEMORY,
    "reason": reason_in(
        "250.04GB / 251.54GB (0.99), which exceeds the memory usage threshold of 0.95"
    ),
}
RANKS = {f"actor_{rank}": header("actor", rank, pid=70 + rank) for rank in (0, 1)}


def failure(open_s=4.0, **more):
    found = opened(
        failed={
            "event": "update_actor",
            "step": 7,
            "since": ago(open_s + 20),
            "open_s": open_s,
            **more,
        }
    )
    return {**found, "at": ago(20)}


@pytest.mark.parametrize(
    ("failed", "culprit", "confidence"),
    [
        (DIED, f"actor_1, which died: {DIED['reason']}", "high"),
        (MEMORY, f"actor_0 raised OutOfMemoryError: {MEMORY['reason']}", "high"),
        (ENDED, f"actor_0, which died: {ENDED['reason']}", "high"),
        ({"error": "ValueError"}, "trainer_0 raised ValueError", "high"),
        (
            {"error": "KeyError", "pid": 5, "ip": "10.0.0.9"},
            "a process with pid 5 on 10.0.0.9 raised KeyError",
            "medium",
        ),
    ],
)
@pytest.mark.parametrize("ended", [None, ago(2)])
def test_a_failure_names_the_process_and_the_reason(failed, culprit, confidence, ended):
    """Whether the trainer could still write its end or not, and long after the run."""
    headers = {**RUN, **RANKS, "trainer_0": header("trainer", ended=ended)}

    for now in (NOW, NOW + timedelta(days=2)):
        found = verdict(headers, {"trainer_0": failure(**failed)}, HERE, now)

        assert ("failed", culprit, confidence) == (found.state, found.culprit, found.confidence)
        assert f"update_actor of step 7 failed after 4.00 s: {failed['error']}." == found.summary
        assert "trainer_0" == found.chain[0].process
        assert found.at == ago(20)


def test_the_dead_process_shows_what_it_was_in():
    """From its last look, where it had something open for long."""
    files = {
        "trainer_0": failure(90.0, **DIED),
        "actor_1": opened(calls=[call("update_actor", 99, GATHER)]),
    }

    link = verdict({**RUN, **RANKS}, files, HERE, NOW).chain[-1]

    assert ("actor_1", GATHER) == (link.process, link.at)
    assert link.what.startswith("update_actor, last sign of life at 2026-11-23T11:59:")


def test_a_timeout_after_a_hang_is_explained_by_the_hang():
    """What raises is the watchdog of a rank that waited; the culprit is the one it waited for."""
    trainer = failure(600.0, error="DistBackendError", pid=70, ip="10.0.0.7")
    trainer["phases"] = [phase("update_actor", 620.0, 10.0)]
    files = {
        "trainer_0": trainer,
        "actor_0": opened(calls=[call("update_actor", 610, GATHER)]),
        "actor_1": opened(calls=[call("update_actor", 610, "torch.serialization:load:3")]),
    }

    found = verdict({**RUN, **RANKS}, files, HERE, NOW)

    assert "failed" == found.state
    assert "update_actor of step 7 failed after 10 min 0 s: DistBackendError." == found.summary
    assert found.culprit.startswith("actor_1 in torch.serialization:load:3")


@pytest.mark.parametrize(("open_s", "state"), [(4.0, "ended"), (100.0, "stuck")])
def test_an_interrupt_is_no_failure(open_s, state):
    """But shows what the run was stuck on, if it was."""
    trainer = failure(open_s, error="KeyboardInterrupt")
    if state == "stuck":
        trainer["phases"] = [phase("update_actor", open_s + 20, 10.0)]

    found = verdict(RUN, {"trainer_0": trainer}, HERE, NOW)

    assert state == found.state
    if state == "ended":
        assert "update_actor of step 7 was interrupted after 4.00 s (KeyboardInterrupt)." == (
            found.summary
        )


def here(pid):
    """The part of a header that makes it a process of this host and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "pid": pid, "clock": {"boot_id": boot}}


def test_a_run_is_not_killed_while_its_trainer_exists(tmp_path):
    """Its disk may be full, or may not answer."""
    alive = {"trainer_0": header("trainer", heard=300, **here(os.getpid()))}

    found = verdict(alive, {}, tmp_path, NOW)

    assert "silent" == found.state
    assert "Nothing has been written for 5 min" in found.summary
    assert found.culprit.startswith("trainer_0, which is alive")

    child = subprocess.Popen(["true"])
    child.wait()
    gone = {"trainer_0": header("trainer", heard=300, **here(child.pid))}
    assert "killed" == verdict(gone, {}, tmp_path, NOW).state
    elsewhere = verdict({"trainer_0": header("trainer", heard=300)}, {}, tmp_path, NOW)
    assert "killed" == elsewhere.state
    assert ["Whether trainer_0 is alive: it was on another host."] == elsewhere.unknown


def test_a_full_disk_is_the_culprit(tmp_path):
    """A real one, of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        alive = {"trainer_0": header("trainer", heard=300, **here(os.getpid()))}
        writing = {"trainer_0": header("trainer", **here(os.getpid()))}
        assert "running" == verdict(writing, {}, disk, NOW).state
        with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb") as file:
            while True:
                file.write(bytes(65536))
                file.flush()

        # Headers are overwritten in place, so it may seem to write.
        found, other = (verdict(headers, {}, disk, NOW) for headers in (alive, writing))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

    assert f"the disk of {disk}: 0 B are free" == found.culprit == other.culprit
    assert "high" == found.confidence


def test_an_engine_that_is_never_resumed_is_the_culprit():
    """Not the requests that wait in it, and not an engine whose requests take long."""
    files = {
        "trainer_0": opened(phases=[phase()]),
        "worker_0": WORKER,
        "engine_0": opened(calls=[call("engine_request", 97, "sglang:wait:5")]),
        "engine_1": opened(paused={"since": ago(99), "open_s": 98}),
    }

    found = verdict(RUN, files, HERE, NOW)

    assert (
        "engine_1, paused for 99.0 s and not resumed: 1 generate call is not answered by s:1"
        == found.culprit
    )
    files["engine_1"]["weight_version"] = 17
    assert "paused for 99.0 s at weight version 17 and not resumed" in (
        verdict(RUN, files, HERE, NOW).culprit
    )

    half = {"probes": {"missed": {"engine_resume": "no open_submission_gate"}}}
    unknown = verdict({**RUN, "engine_1": {**RUN["engine_1"], **half}}, files, HERE, NOW)
    assert "not resumed" not in unknown.culprit
    assert any("Whether engine_1 is paused" in each for each in unknown.unknown)


@pytest.mark.parametrize(
    ("innermost", "expected"),
    [
        ("asyncio.locks:Semaphore.acquire:387", "tools:search:7, which waits for a semaphore"),
        ("asyncio.queues:Queue.get:158", "tools:search:7, which waits for an item of a queue"),
        ("ssl:SSLSocket.read:1168", "tools:search:7"),
    ],
)
def test_the_lock_that_a_call_waits_for_is_named(innermost, expected):
    """Who holds it is not on record."""
    waiting = call("tool_call", 90, "tools:search:7", request_id="r1", tool="search")
    waiting["stack"] = ["tools:search:7", innermost]
    worker = opened(open_requests=1, requests=[request(1)], calls=[waiting])

    found = verdict(RUN, {"trainer_0": opened(phases=[phase()]), "worker_0": worker}, HERE, NOW)

    assert found.culprit.endswith(f"the oldest is in {expected}")


def test_the_command_exits_with_1_for_a_failed_run(tmp_path, capsys):
    """Also with --wait, which need not wait."""
    write(tmp_path / "run", {**RUN, **RANKS}, {"trainer_0": failure(**MEMORY)})

    assert 1 == main(["stuck", str(tmp_path / "run"), "--wait"])
    assert "Culprit: actor_0 raised OutOfMemoryError" in capsys.readouterr().out
