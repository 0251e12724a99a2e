"""On one real Ray cluster of several nodes: events of other disks, clocks, settings, failures, captures, reading."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import pytest
from cached_runs import REHEARSED

from verl_profiler.reading.reader import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
SPANS = 200


@contextlib.contextmanager
def run_script(namespaces, script, **variables):
    """Run a script of this folder in namespaces; yield the JSON that it printed last, and its folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    folders = [HERE, HERE.parent / "reading", environment.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, filter(None, folders))), **variables}
    # Ray's sockets have no room for a long path.
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        done = subprocess.run(
            [*namespaces, sys.executable, str(HERE / script), folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=380,
            cwd=HERE,
            env=environment,
        )
        assert 0 == done.returncode, (done.stdout + done.stderr)[-4000:]
        yield json.loads(done.stdout.splitlines()[-1]), Path(folder)


@pytest.fixture(scope="module")
def ran(namespaces, tmp_path_factory):
    """What the script prints, and its folder."""
    pytest.importorskip("ray")
    run = tmp_path_factory.mktemp("to_read") / "run"
    shutil.copytree(REHEARSED, run, ignore=shutil.ignore_patterns(".cache"))
    with run_script(namespaces, "on_one_cluster.py", RUN_TO_READ=str(run)) as found:
        yield found


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_settings_reach_every_node_of_a_running_cluster(ran):
    """Its raylets do not have the driver's environment; the user's own variable and hook stay."""
    found, _ = ran
    here = {"plugin": True, "settings": True, "tracing": "1", "users": ["yes", "yes"]}

    assert [here | {"verl": False}] * 3 == found["arrived"]


def test_events_arrive_in_chunks_while_the_run_goes_on(ran):
    """Each chunk after the one before, long before the end."""
    found, _ = ran

    assert found["sizes"] == sorted(set(found["sizes"]))
    assert 3 == len(found["sizes"])


def test_at_the_end_the_files_are_those_of_the_node_byte_by_byte(ran):
    """Events and headers; what was shipped last was more than one piece."""
    found, folder = ran
    run = folder / "logs" / "run"
    there = {name: each for name, each in found["there"].items() if name != "run.json"}

    assert {"step_1/worker_0.jsonl", "step_2/worker_0.jsonl", "processes/worker_0.json"} <= {*there}
    assert there == {name: digest(run / name) for name in there}
    assert (run / "step_2" / "worker_0.jsonl").stat().st_size > 4 << 20
    assert "ended" == found["shipping"]["node-two"]["state"]


def test_a_node_that_shares_the_disk_ships_nothing(ran):
    """It is not in shipping.json, and its worker's file was written by itself, once."""
    found, folder = ran

    assert {"node-two", "node-three"} == {*found["shipping"]}
    assert found["disks"]
    lines = (folder / "logs/run/step_1/worker_2.jsonl").read_text().splitlines()
    assert SPANS == sum('"looked"' in line for line in lines)


def test_a_node_that_died_loses_what_it_had_not_shipped_and_the_problems_have_how_much(ran):
    """Its second step: the header came, the events did not."""
    found, folder = ran
    with load(folder / "logs" / "run", cache=False) as run:
        problems = run.problems
        read = run.rows("SELECT count(*) AS n FROM events WHERE name = 'worker_1'")[0]["n"]

    header = json.loads((folder / "logs/run/processes/worker_1.json").read_text())
    written = max(header["written_events"], header["counters"]["events"])
    (about,) = [problem for problem in problems if "node-three" in problem and "left" in problem]
    assert "left" == found["shipping"]["node-three"]["state"]
    assert written >= found["three"]["written"]
    assert written - read >= SPANS
    assert f"{written - read:,} events that its processes had written by" in about
    assert "(worker_1)" in about
    assert [] == [problem for problem in problems if "worker_1" in problem and problem is not about]
    assert "node-three has left the cluster" in found["printed"]


def test_the_other_hosts_events_are_placed_within_the_stated_bound(ran):
    """1000 s of monotonic and -37 ms of wall clock are taken out of them, to the bound."""
    _, folder = ran
    directory = folder / "logs" / "run"
    clock = json.loads((directory / "run.json").read_text())["clock"]
    with load(directory, cache=False) as opened:
        rows = opened.rows(
            "SELECT p.host, shift_us, clock_bound_us, e.begin_us, "
            "CAST(extra->>'$.true_ns' AS BIGINT) AS true_ns "
            "FROM events AS e JOIN processes AS p USING (run, name) WHERE event = 'looked' "
            "AND step = 1"
        )
        problems = "\n".join(opened.problems)
    hosts = {row["host"]: row for row in rows}
    errors = {host: [] for host in hosts}
    for row in rows:
        true_us = (row["true_ns"] + clock["wall_ns"] - clock["monotonic_ns"]) // 1000
        # The event is logged some microseconds after its field was read.
        errors[row["host"]].append(abs(row["begin_us"] - true_us) - 500)

    assert {"node-two", "node-three", "node-four"} == {*hosts}
    # A process may lose its core between the two; a clock that is off moves all of its events.
    assert all(median(each) <= hosts[host]["clock_bound_us"] for host, each in errors.items())
    own = hosts["node-four"]
    assert 37_000 == pytest.approx(own["shift_us"], abs=own["clock_bound_us"])
    assert 0 < own["clock_bound_us"] < 20_000
    assert "clocks aligned with the driver's: node-four (moved by +3" in problems


def test_the_profilers_actors_take_no_cpus_and_end_with_ray(ran):
    """After `ray.shutdown` nothing connects again."""
    found, _ = ran
    free, all_of_them = found["cpus"]

    assert all_of_them == free
    assert not found["second"]["connected"]
    assert not found["second"]["visits"]


def test_after_a_killed_driver_collect_gathers_the_rest(ran):
    """From where it ended; the captures that the run did not have are no error."""
    found, folder = ran
    run = folder / "logs" / "killed"

    assert 0 == found["killed_before"]
    assert 0 == found["status"], found["collected"]
    assert "node-two" in found["collected"]
    there = {name: each for name, each in found["killed_there"].items() if name != "run.json"}
    assert there == {name: digest(run / name) for name in there}
    with load(run, cache=False) as opened:
        (read,) = opened.rows("SELECT count(*) AS n FROM events WHERE event = 'looked'")
        assert 3 * SPANS == read["n"] <= found["second"]["written"]
        assert [] == [problem for problem in opened.problems if "node-two" in problem]


def test_rays_own_exceptions_name_the_process(ran):
    """Of a task in a task, the inner one; of an actor that was killed, the actor."""
    found, _ = ran
    pid, ip = found["failing"]
    failed, died = found["failures"]

    assert {"error": "ValueError", "pid": pid, "ip": ip} == failed
    assert ("ActorDiedError", pid, ip) == (died["error"], died["pid"], died["ip"])
    assert died["reason"].startswith("Worker exit type: SYSTEM_ERROR Worker exit detail: ")


def test_a_run_is_read_by_tasks_of_two_nodes_and_the_answers_are_the_same(ran):
    """All CPUs are taken, as by a training; nothing is left for the reader to make."""
    read = ran[0]["read"]

    assert 2 == read["tasks_on"]
    assert 2 <= read["shards"]
    assert ([], []) == (read["different"], read["made_by_the_reader"])


def test_only_chosen_processes_run_under_nsys(ran):
    """The controller and the chosen rank; no process by inheritance; all with one Python.

    nsys is a stand-in that logs its arguments.
    """
    found, folder = ran

    assert {
        "trainer": True,
        "engine 0": False,
        "engine 1": True,
        "nameless": False,
        "worker": False,
        "task": False,
    } == {name: watched for name, (watched, _) in found["watched"].items()}
    folders = {Path(python).parent for _, python in found["watched"].values()}
    assert {Path(sys.executable).parent} == folders
    assert {"engine 1": True} == found["reached"]
    # The check tries the options too; it finds nothing wrong but nvtx, if that is missing.
    assert found["problems"]
    assert all("nvtx is not installed" in each for node in found["problems"] for each in node)
    calls = [line.split() for line in (folder / "log").read_text().splitlines()]
    (engine,) = [argv for argv in calls if f"{folder}/raw/engine_%h_%p" in argv]
    assert {"--capture-range=nvtx", "--trace=nvtx", "-o", "python"} <= set(engine)


@pytest.mark.nightly
def test_reports_of_another_node_arrive_and_a_node_without_nsys_is_reported(nsys, namespaces):
    """Nodes with their own host names and disks, and a real nsys on two of the three."""
    roles = ("trainer_0", "agent_loop_0", "agent_loop_1")
    with run_script(namespaces, "captures_nodes.py", **nsys) as (found, folder):
        home = folder / "logs" / "run" / "nsight"
        captures = json.loads((home / "captures.json").read_text())
        files = {path.name for path in home.glob("*.*")}
        assert all((home / capture["file"]).stat().st_size for capture in captures), found

    expected = {f"{name}.step{step}" for name in roles for step in (1, 2)}
    assert {f"{name}.{end}" for name in expected for end in ("nsys-rep", "json")} | {
        "captures.json"
    } == files
    assert [""] * len(expected) == [capture["problem"] for capture in captures]
    of_loops = {(each["rank"], each["host"]) for each in captures if each["role"] == "agent_loop"}
    assert set(enumerate(found["hosts"])) == of_loops
    assert "node-two" == found["hosts"][1] != found["hosts"][0]
    assert "node-three: nsys is not on the PATH" in found["refused"]
    assert "node-two" not in found["refused"]
    # `collect --ray` restored what had been deleted here.
    assert (0, True) == (found["status"], found["back"])
