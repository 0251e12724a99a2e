"""Captures of a process: what starts them, and what its journal has about each."""

import gzip
import json
import threading

import msgspec
import pytest

from verl_profiler.capture import session
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.recording import context, recorder
from verl_profiler.recording.identity import Identity

BY_RANGE = {"capture-range": "nvtx"}


@pytest.fixture
def captured(worker_config, tmp_path):
    """Record as agent-loop worker 0 with a plan; returns a function that takes the plan's changes."""

    def begin(**changes):
        plan = Plan(
            "nsys",
            (2,),
            False,
            str(tmp_path / "raw"),
            str(tmp_path / "journal"),
            {"agent_loop": RoleCapture((0,), BY_RANGE)},
        )
        plan = msgspec.structs.replace(plan, **changes)
        recorder.start(
            msgspec.structs.replace(worker_config, capture_plan=plan.encode()),
            lambda: Identity("agent_loop", 0),
        )
        recorder.active()._writer.process.identity = Identity("agent_loop", 0)
        return plan

    yield begin
    recorder.stop()


def journal(tmp_path):
    (file,) = (tmp_path / "journal").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_capture_is_a_range_that_nsys_waits_for(captured, nvtx, tmp_path):
    """Start and end are written at once, so that a killed process leaves the start."""
    captured()

    assert session.start(None, 2)
    assert [("start", "capture", "verl_profiler", None, None)] == nvtx.calls
    assert 1 == len(journal(tmp_path))

    session.stop()

    assert ("end", 1) == nvtx.calls[-1]
    begin, end = journal(tmp_path)
    assert {"capture": 1, "role": "agent_loop", "rank": 0, "step": 2, "tool": "nsys"}.items() <= (
        begin.items()
    )
    assert begin["begin_ns"] <= end["end_ns"]


def test_starting_twice_is_starting_once(captured, nvtx, tmp_path):
    """verl starts the profiler of a process once per worker group that lives there; it may have no step."""
    captured()
    context.process.step = 5
    for call in (session.start, session.start, session.stop, session.stop):
        call()

    assert ["start", "end"] == [call[0] for call in nvtx.calls]
    assert [5, 5] == [line["step"] for line in journal(tmp_path)]


def test_what_was_not_chosen_captures_nothing(captured, nvtx, tmp_path, worker_config):
    """Another rank, and a run without profile_steps."""
    captured(roles={"agent_loop": RoleCapture((1,), BY_RANGE)})
    assert not session.start(None, 2)
    recorder.stop()
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    assert not session.start(None, 2)

    assert [] == nvtx.calls
    assert not (tmp_path / "journal").exists()


def test_captures_that_the_host_starts_are_in_the_journal_too(captured, tmp_path):
    """On CUDA verl calls the CUDA profiler itself, with its own step and task."""
    by_cuda = {"agent_loop": RoleCapture(None, {"capture-range": "cudaProfilerApi"})}
    captured(discrete=True, roles=by_cuda)
    process = session.current()
    session.note_step(7)
    session.note_task("actor_update")
    process.opened()
    process.closed()
    process.opened()

    lines = journal(tmp_path)
    assert [(1, "actor_update"), (1, "actor_update"), (2, None)] == [
        (line["capture"], line["task"]) for line in lines
    ]
    assert {7} == {line["step"] for line in lines}


def test_the_torch_profiler_leaves_a_chrome_trace(captured, tmp_path):
    """The second tool: real torch, on a CPU."""
    torch = pytest.importorskip("torch")
    captured(tool="torch")
    session.start(None, 2)
    # Also of another thread: actors run their methods in several.
    thread = threading.Thread(target=lambda: torch.ones(8).sum())
    thread.start()
    thread.join()
    session.stop()

    (trace,) = (tmp_path / "raw").iterdir()
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert "aten::sum" in names


def test_a_capture_that_runs_when_recording_stops_is_ended(captured, nvtx):
    """Otherwise the tool would write no report."""
    captured()
    session.start(None, 2)
    recorder.stop()
    session.stop()

    assert ("end", 1) == nvtx.calls[-1]
