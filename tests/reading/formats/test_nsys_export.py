"""What an export of nsys says, whatever tables its version and its capture gave it."""

import json

import nsys_database
import pytest
from event_files import line, write_run
from nsys_database import EPOCH_NS, PID, TID

from verl_profiler.reading.formats.nsys_export import read
from verl_profiler.reading.reader import load


@pytest.fixture
def path(tmp_path):
    return tmp_path / "actor_0.step2.sqlite"


def test_ranges_have_domain_category_payload_and_wall_clock(path):
    """Names are numbers there, domains and categories are rows of the same table."""
    nsys_database.write(
        path, ranges=[(10, 30, "push", "load", TID), (20, 90, "start", "turn", TID)]
    )

    assert [
        ("verl_profiler", "load", "workers", 7, "push", PID, TID, EPOCH_NS + 10, EPOCH_NS + 30),
        ("verl_profiler", "turn", "workers", 7, "start", PID, TID, EPOCH_NS + 20, EPOCH_NS + 90),
    ] == read(path).ranges


def test_kernels_know_the_call_that_launched_them(path):
    """A launch that was not traced leaves the thread open."""
    nsys_database.write(path, kernels=[(5, 40, 60, "gemm", TID)], copies=[(70, 75)])

    assert [
        ("kernel", "gemm", "0", 7, PID, TID, EPOCH_NS + 5, EPOCH_NS + 40, EPOCH_NS + 60),
        ("memcpy", "memcpy", "0", 7, PID, None, None, EPOCH_NS + 70, EPOCH_NS + 75),
    ] == read(path).work


def test_what_an_export_lacks_is_said(path):
    """nsys makes a table only when it has rows for it."""
    nsys_database.write(path, epoch_ns=0)

    assert [
        "it has no wall-clock start, so it cannot be joined with the events",
        "it has no NVTX ranges",
        "it has no GPU work",
    ] == read(path).problems


def capture(**changes):
    return {
        "role": "actor",
        "rank": 0,
        "host": "h1",
        "pid": PID,
        "step": 2,
        "task": None,
        "number": 1,
        "begin_ns": EPOCH_NS,
        "end_ns": EPOCH_NS + 1000,
        "tool": "nsys",
        "file": "actor_0.step2.nsys-rep",
        "size_bytes": 6,
        "problem": "",
        **changes,
    }


def write_captures(run, *captures):
    write_run(run, [line()])
    (run / "nsight").mkdir()
    (run / "nsight" / "captures.json").write_text(json.dumps(captures))


def test_a_run_is_read_with_its_captures(tmp_path):
    """The export lies beside the report."""
    missing = capture(rank=1, file=None, problem="nsys wrote nothing")
    write_captures(tmp_path, capture(), missing)
    nsys_database.write(
        tmp_path / "nsight" / "actor_0.step2.sqlite",
        ranges=[(10, 30, "push", "load", TID)],
        kernels=[(15, 40, 60, "gemm", TID)],
    )
    with load(tmp_path) as run:
        assert [("actor_0", 2), ("actor_1", 2)] == [
            (row["name"], row["step"]) for row in run.rows("FROM captures ORDER BY name")
        ]
        assert [("actor_0", 2, "load", EPOCH_NS + 10)] == [
            (row["name"], row["step"], row["event"], row["begin_ns"])
            for row in run.rows("FROM capture_ranges")
        ]
        assert [("gemm", EPOCH_NS + 15)] == [
            (row["kernel"], row["launch_ns"]) for row in run.rows("FROM capture_work")
        ]
        assert "capture of actor_1 in step 2: nsys wrote nothing" in run.problems


def test_damage_costs_only_itself(tmp_path):
    """Files are never trusted: no database, a file outside of the run, rows of another form."""
    write_captures(tmp_path / "run", "x", {"role": "actor"}, capture())
    (tmp_path / "run" / "nsight" / "actor_0.step2.sqlite").write_bytes(b"x" * 4096)
    with load(tmp_path / "run") as run:
        assert 1 == len(run.rows("FROM captures"))
        assert [] == run.rows("FROM capture_ranges") == run.rows("FROM capture_work")
        assert [p for p in run.problems if "is not an nsys export" in p]
    nsys_database.write(tmp_path / "outside.sqlite", ranges=[(1, 2, "push", "secret", 3)])
    write_captures(tmp_path / "other", capture(file="../../outside.sqlite"))
    with load(tmp_path / "other") as run:
        assert "nsight/captures.json: 1 entries are not captures" in run.problems
        assert [] == run.rows("FROM capture_ranges")
