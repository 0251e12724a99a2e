"""Events of nodes with disks of their own, on a real Ray cluster: in chunks, at the end, after kills."""

import hashlib
import json

import pytest
from shipping.on_nodes import run_on_nodes

from verl_profiler.reading.reader import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

SPANS = 200


@pytest.fixture(scope="module")
def shipped(namespaces):
    """What the script prints, and the folder of its runs."""
    pytest.importorskip("ray")
    with run_on_nodes(namespaces, "shipping_nodes.py") as found:
        yield found


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_events_arrive_in_chunks_while_the_run_goes_on(shipped):
    """Each chunk after the one before, long before the end."""
    found, _ = shipped

    assert found["sizes"] == sorted(set(found["sizes"]))
    assert 3 == len(found["sizes"])


def test_at_the_end_the_files_are_those_of_the_node_byte_by_byte(shipped):
    """Events and headers; what was shipped last was more than one piece."""
    found, logs = shipped
    there = {name: each for name, each in found["there"].items() if name != "run.json"}

    assert {"step_1/worker_0.jsonl", "step_2/worker_0.jsonl", "processes/worker_0.json"} <= {*there}
    assert there == {name: digest(logs / "run" / name) for name in there}
    assert (logs / "run" / "step_2" / "worker_0.jsonl").stat().st_size > 8 << 20
    assert "ended" == found["shipping"]["node-two"]["state"]


def test_a_node_that_shares_the_disk_ships_nothing(shipped):
    """It is not in shipping.json, and its worker's file was written by itself, once."""
    found, logs = shipped

    assert {"node-two", "node-three"} == {*found["shipping"]}
    assert found["disks"]
    lines = (logs / "run" / "step_1" / "worker_2.jsonl").read_text().splitlines()
    assert SPANS == sum('"looked"' in line for line in lines)


def test_a_node_that_died_loses_what_it_had_not_shipped_and_the_problems_have_how_much(shipped):
    """Its second step: the header came, the events did not."""
    found, logs = shipped
    with load(logs / "run", cache=False) as run:
        problems = run.problems
        read = run.rows("SELECT count(*) AS n FROM events WHERE name = 'worker_1'")[0]["n"]

    header = json.loads((logs / "run" / "processes" / "worker_1.json").read_text())
    written = max(header["written_events"], header["counters"]["events"])
    (about,) = [problem for problem in problems if "node-three" in problem and "left" in problem]
    assert "left" == found["shipping"]["node-three"]["state"]
    assert written >= found["three"]["written"]
    assert written - read >= SPANS
    assert f"{written - read:,} events that its processes had written by" in about
    assert "(worker_1)" in about
    assert [] == [problem for problem in problems if "worker_1" in problem and problem is not about]
    assert "node-three has left the cluster" in found["printed"]


def test_after_a_killed_driver_collect_gathers_the_rest(shipped):
    """From where it ended; the captures that the run did not have are no error."""
    found, logs = shipped
    _, written = found["killed"]

    assert 0 == found["killed_before"]
    assert 0 == found["status"], found["collected"]
    assert "node-two" in found["collected"]
    there = {name: each for name, each in found["killed_there"].items() if name != "run.json"}
    assert there == {name: digest(logs / "killed" / name) for name in there}
    with load(logs / "killed", cache=False) as run:
        assert (
            run.rows("SELECT count(*) AS n FROM events WHERE event = 'looked'")[0]["n"] == 3 * SPANS
        )
        assert written >= 3 * SPANS
        assert [] == [problem for problem in run.problems if "node-two" in problem]
