"""The recorder: what reaches the files, in which form, and what is said of the rest."""

import dataclasses
import datetime as dt
import enum
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from reading_back import headers_of, lines_of
from recording.children import run_child

from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig


def test_a_line_has_the_original_loggers_keys_in_its_order(recording, worker_config):
    """`jq` recipes and the users' own scripts go on working; intervals nest to the microsecond."""
    # It begins 1 ns before the end of a microsecond of the timestamps, and ends 1 ns after the begin of one.
    part_ns = (recording.anchor.wall_ns - recording.anchor.monotonic_ns) % 1000
    times = (1_000_999 - part_ns, 3_500_001 - part_ns)
    recorder.record("tool_call", *times, {"request_id": "r", "turn": 0}, 3)
    recorder.record("request_start", None, 4_000_000, None, 3)
    recorder.stop()

    span, instant = lines_of(worker_config.directory)

    assert ["timestamp", "event", "duration_sec", "extra", "workid", "step"] == list(span)
    assert ["timestamp", "event", "workid", "step"] == list(instant)
    assert (0.0025, 0, 3) == (span["duration_sec"], span["workid"], span["step"])
    assert recording.name == "worker_0"
    assert ["step_3/worker_0.jsonl"] == [
        str(file.relative_to(worker_config.directory))
        for file in recording.directory.glob("step_*/*.jsonl")
    ]


def test_steps_that_are_not_wanted_are_not_recorded(tmp_path):
    """`profiler.events.steps` keeps the rest out of memory too."""
    worker_config = WorkerConfig(str(tmp_path), str(tmp_path), EventSettings(steps=(2,)))
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    for step in (1, 2, 3):
        recorder.record("turn", 0, 1, None, step)
    recorder.stop()

    assert [2] == [line["step"] for line in lines_of(tmp_path)]


def test_what_json_does_not_know_costs_no_event(recording, worker_config):
    """Known types by value, other objects by their type, a cycle as one field."""

    class Text(str):
        __slots__ = ()

    class Whole(int):
        pass

    class Color(enum.Enum):
        RED = "red"

    @dataclasses.dataclass
    class Point:
        x: int = 1

    cycle: dict = {}
    cycle["self"] = cycle
    recorder.record("a", 0, 1, {"whole": Whole(3), "text": Text("x"), ("a", "b"): {1}}, 0)
    recorder.record("b", 0, 1, cycle, 0)
    recorder.record("c", 0, 1, {"type": object, "object": object()}, 0)
    recorder.record("d", 0, 1, {"enum": Color.RED, "data": Point(), "path": Path("/a"), 1: None}, 0)
    recorder.record("e", 0, 1, {"error": ValueError("no"), "date": dt.date(2026, 1, 2)}, 0)
    recorder.stop()

    a, b, c, d, e = [line["extra"] for line in lines_of(worker_config.directory)]

    assert {"whole": 3, "text": "x", "('a', 'b')": [1]} == a
    assert {"self": "<cycle>"} == b
    assert {"type": "<class 'object'>", "object": "<object object>"} == c
    assert {"enum": "red", "data": {"x": 1}, "path": "/a", "1": None} == d
    assert {"error": "ValueError: no", "date": "2026-01-02"} == e


def test_the_profiler_accounts_for_itself_per_step(recording, worker_config):
    """Events and bytes of its own lines are those of the file."""
    for step in (1, 1, 2):
        recorder.record("turn", 0, 1, {"request_id": "r"}, step)
    recorder.stop()

    lines = lines_of(worker_config.directory, own=True)
    costs = {line["step"]: line["extra"] for line in lines if line["event"] == "profiler_cost"}
    size = len(json.dumps(lines[0], separators=(",", ":"))) + 1

    assert {1: 2, 2: 1} == {step: cost["events"] for step, cost in costs.items()}
    assert 2 * size == costs[1]["bytes"]
    assert costs[1]["writer_s"] > 0
    assert costs[1]["writer_cpu_s"] > 0


def test_sampled_sections_stand_for_those_beside_them(recording, monkeypatch):
    """Each section takes 5 ns on a core; a few of them are measured."""
    clock = iter(range(5, 10**9, 5))
    here = threading.get_ident()
    monkeypatch.setattr(
        recorder.time,
        "thread_time_ns",
        lambda: next(clock) if threading.get_ident() == here else 0,
    )
    monkeypatch.setattr(recorder, "now", iter(range(10**9)).__next__)
    # Each looks at the clock twice: every time is met once in so many sections.
    count = 10 * recorder.SAMPLED
    for _ in range(count):
        recording.end_section(*recording.begin_section())

    assert 5 * count == recording.wrapper_cpu_ns
    assert next(clock) < 5 * count


def test_two_processes_of_one_name_never_share_a_file(worker_config):
    """An actor that was restarted gets a name of its own."""
    names = []
    for _ in range(3):
        active = recorder.start(worker_config, lambda: Identity("agent_loop", 0))
        recorder.record("turn", 0, 1, None, 1)
        recorder.stop()
        names.append(active.name)

    assert ["worker_0", "worker_0-2", "worker_0-3"] == names
    assert 3 == len(lines_of(worker_config.directory))


def test_handles_of_finished_steps_are_closed(recording, worker_config):
    """A run of thousands of steps needs no `ulimit -n`."""
    for step in range(40):
        recorder.record("turn", 0, 1, None, step)
    while recording.account()["events"] < 40:
        pass
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    open_files = sum(name.endswith(".jsonl") for name in opened)

    assert 1 <= open_files <= 4


def test_a_header_takes_what_packages_use_for_their_versions(tmp_path, capfd):
    """torch.__version__ is a subclass of str, which a JSON encoder refuses."""

    class TorchVersion(str):
        __slots__ = ()

    describe = {"packages": {"torch": TorchVersion("2.13.0+cpu"), "odd": object()}}
    settings = EventSettings()
    worker_config = WorkerConfig(str(tmp_path), str(tmp_path), settings)
    recorder.start(worker_config, lambda: Identity("actor", 1), lambda: describe)
    recorder.record("turn", 0, 1, None, 1)
    recorder.stop()

    (header,) = headers_of(tmp_path).values()
    assert "2.13.0+cpu" == header["packages"]["torch"]
    assert "could not be written" not in capfd.readouterr().err


def test_a_process_that_is_not_known_yet(worker_config):
    """Events wait until Ray has named the actor; without a role they go under host and pid, if there are any."""
    known = []
    recorder.start(worker_config, lambda: known[0] if known else None)
    recorder.record("load", 0, 1, None, 0)
    known.append(Identity("actor", 3))
    recorder.stop()
    for events in (0, 1):
        recorder.start(worker_config, lambda: None)
        for _ in range(events):
            recorder.record("turn", 0, 1, None, 0)
        recorder.stop()

    assert [3] == [
        line["workid"] for line in lines_of(worker_config.directory) if line["event"] == "load"
    ]
    assert {"actor_3", f"process_{os.uname().nodename}_{os.getpid()}"} == {
        *headers_of(worker_config.directory)
    }


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sys.exit(3)", 3, "exit"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, "sigterm"),
        ("os._exit(4)", 4, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
    ],
)
def test_how_a_process_ends(worker_config, ending, status, reason):
    """One that can writes everything, up to its last millisecond; one that is killed whole lines, and no end."""
    finished = run_child(
        worker_config,
        f"""
        for n in range(1000): recorder.record('turn', 0, 1, {{'n': n}}, 1)
        until(lambda: active.account()["events"] >= 1000)
        for n in range(1000, 5000): recorder.record('turn', 0, 1, {{'n': n}}, 1)
        {ending}
        """,
    )
    killed = reason is None
    got = [line["extra"]["n"] for line in lines_of(worker_config.directory, killed=killed)]
    header = headers_of(worker_config.directory)["worker_0"]

    assert status == finished.returncode
    assert list(range(len(got))) == got
    assert len(got) >= 1000 if killed else len(got) == 5000
    assert reason == (None if killed else header["end_reason"])
    assert killed == (header["ended"] is None)


def test_the_hosts_own_sigterm_handler_stays(worker_config):
    """Ray's, for example."""
    finished = run_child(
        worker_config,
        """
        recorder.stop()
        recorder.process_end._installed = False
        mine = lambda *_: sys.exit(9)
        signal.signal(signal.SIGTERM, mine)
        recorder.start(worker_config, lambda: Identity("agent_loop", 0))
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        """,
    )

    assert 9 == finished.returncode, finished.stderr
