"""Which nodes ship, whose clocks are compared, and what happens when one fails; Ray is a fake, with actors in threads.

tests/on_ray has a real cluster.
"""

import functools
import json
import shutil
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from shipping import copies

from verl_profiler.capture import gather
from verl_profiler.nodes import actor, clock, files, rounds
from verl_profiler.nodes import thread as ship
from verl_profiler.nodes.rounds import Nodes
from verl_profiler.recording.clock import now

pytest.importorskip("ray")


class FakeRay:
    """A cluster of nodes with folders of their own: `node_id → directory`."""

    def __init__(self, directories):
        self.directories = directories
        self.alive = dict.fromkeys(directories, True)
        self.broken = set()
        self.hanging = set()
        # Where tools write on a node, if not into the run directory; seconds that a piece takes.
        self.raw = {}
        self.slow_s = 0
        # Nodes with a kernel of their own, whose clock is ahead by so many nanoseconds.
        self.ahead_ns = {}
        self.calls = []
        self.opened = set()
        self.actors = []
        self.initialized = True
        self._pool = ThreadPoolExecutor(16)

    def is_initialized(self):
        return self.initialized

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self):
        return [
            {"NodeID": node, "Alive": alive, "NodeManagerHostname": f"host-{node}"}
            for node, alive in self.alive.items()
        ]

    def remote(self, actor_class):
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(
                remote=lambda: self._start(actor_class, options)
            )
        )

    def _start(self, actor_class, options):
        assert 0 == options["num_cpus"]
        node = options["scheduling_strategy"].node_id
        instance = actor_class()
        handle = types.SimpleNamespace(node=node, ended=False)
        for name in ("who", "read", "files"):
            method = types.SimpleNamespace(remote=self._method(handle, instance, name))
            setattr(handle, name, method)
        self.actors.append(handle)
        return handle

    def _method(self, handle, instance, name):
        def call(*arguments):
            if handle.node in self.broken or handle.ended or not self.alive[handle.node]:
                raise RuntimeError("the actor died")
            while handle.node in self.hanging:
                time.sleep(0.01)
            self.calls.append((handle.node, name))
            if name == "who" and handle.node in self.ahead_ns:
                return f"boot of {handle.node}"
            if name == "read":
                return now() + self.ahead_ns[handle.node]
            if name == "files":
                asked, directory, *more = arguments
                self.opened.add(directory)
                places = self.raw if directory.endswith("/raw") else self.directories
                arguments = (asked, str(places[handle.node]), *more)
                time.sleep(self.slow_s if asked == "read" else 0)
            return getattr(instance, name)(*arguments)

        return lambda *arguments: self._pool.submit(call, *arguments)

    def get(self, future, timeout=None):
        return future.result(timeout)

    def kill(self, handle):
        handle.ended = True

    def running(self):
        return sorted(actor.node for actor in self.actors if not actor.ended)


@pytest.fixture(autouse=True)
def _no_priority(monkeypatch):
    # Of this process, in which the fake's actors run.
    monkeypatch.setattr(actor.os, "nice", lambda _more: 0)
    # Real ids are longer than the names here.
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy",
        lambda node_id, soft: types.SimpleNamespace(node_id=node_id, soft=soft),
    )


write = functools.partial(copies.write, mode="ab")


@pytest.fixture
def cluster(tmp_path):
    """The driver's run directory, and a cluster of three other nodes; one shares the driver's disk."""
    run = tmp_path / "run"
    run.mkdir()
    places = {"here": run, "a": tmp_path / "a", "b": tmp_path / "b", "c": run}
    for name, place in places.items():
        write(place, f"processes/worker_{name}.json", "{}")
        write(place, f"step_1/worker_{name}.jsonl", f"{name}\n")
    return run, FakeRay(places)


def content(run):
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*.jsonl")}


def rows(run):
    return {each["host"]: each for each in json.loads((run / "shipping.json").read_text())["nodes"]}


EVERYTHING = {f"step_1/worker_{name}.jsonl": f"{name}\n" for name in ("here", "a", "b", "c")}


def test_nodes_with_disks_of_their_own_ship_and_others_do_not(cluster):
    """The actor of one that shares the disk ends at once, and none is started there again."""
    run, ray = cluster
    alive, before = ray.alive, sorted(path.name for path in run.iterdir())
    shipments = Nodes(ray, run)
    # On a single node, neither an actor nor a file is made.
    ray.alive = {"here": True}
    assert shipments.round()
    assert ([], before) == (ray.actors, sorted(path.name for path in run.iterdir()))
    ray.alive = alive

    assert shipments.round()
    assert EVERYTHING == content(run)
    assert {"host-a", "host-b"} == {*rows(run)}
    assert ["a", "b"] == ray.running()
    assert shipments.round()
    assert 3 == len(ray.actors)
    assert [] == shipments.finish()
    assert [] == ray.running()
    assert {"ended"} == {each["state"] for each in rows(run).values()}


def test_evidence_is_requested_on_each_disk_and_comes_back_with_the_headers(cluster, tmp_path):
    """The driver's run directory has the request, or the evidence of a process that made it elsewhere."""
    run, ray = cluster
    shipments = Nodes(ray, run)
    shipments.round()
    assert not (tmp_path / "a" / "evidence").exists()

    # The trainer's process, on node a, finds that the run is stuck, and its own file is sent.
    write(tmp_path / "a", "evidence/1/worker_a.json", '{"at": "a"}')
    shipments.round(light=True)
    assert '{"at": "a"}' == (run / "evidence" / "1" / "worker_a.json").read_text()

    shipments.round(light=True)
    assert (tmp_path / "b" / "evidence" / "1").is_dir()
    write(tmp_path / "b", "evidence/1/worker_b.json", '{"at": "b"}')
    shipments.round(light=True)
    assert '{"at": "b"}' == (run / "evidence" / "1" / "worker_b.json").read_text()

    # Two more before the next visit.
    for number in ("2", "3", "notes"):
        (run / "evidence" / number).mkdir()
    shipments.round(light=True)
    for node in ("a", "b"):
        assert ["1", "2", "3"] == sorted(
            each.name for each in (tmp_path / node / "evidence").iterdir()
        )


def test_two_nodes_that_share_a_disk_ship_it_once(cluster, tmp_path):
    """And when the one that ships leaves, the other goes on."""
    run, ray = cluster
    ray.directories["b"] = tmp_path / "a"
    shipments = Nodes(ray, run)
    shipments.round()
    (first,) = rows(run)
    assert {"step_1/worker_a.jsonl", "step_1/worker_here.jsonl", "step_1/worker_c.jsonl"} == {
        *content(run)
    }
    assert "worker_a" in rows(run)[first]["processes"]

    ray.alive[first[-1]] = False
    write(tmp_path / "a", "step_1/worker_a.jsonl", "more\n")
    shipments.round()
    shipments.round()

    assert "a\nmore\n" == content(run)["step_1/worker_a.jsonl"]
    (second,) = rows(run)
    assert first != second
    assert {"worker_a": "worker_a"} == rows(run)[second]["processes"]


def test_a_failing_node_costs_the_others_nothing_and_comes_back(cluster, tmp_path):
    """Its new actor continues where the old one ended."""
    run, ray = cluster
    shipments = Nodes(ray, run)
    shipments.round()
    ray.broken.add("a")
    write(tmp_path / "a", "step_1/worker_a.jsonl", "2\n")
    write(tmp_path / "b", "step_1/worker_b.jsonl", "2\n")

    assert not shipments.round()
    assert "b\n2\n" == content(run)["step_1/worker_b.jsonl"]
    assert any(
        "host-a did not send all" in each and "RuntimeError" in each
        for each in shipments.problems()
    )

    ray.broken.clear()
    # It is skipped for a round after its first failure.
    for _ in range(2):
        shipments.round()
    assert "a\n2\n" == content(run)["step_1/worker_a.jsonl"]
    assert [] == shipments.problems()


def test_a_node_that_hangs_does_not_hold_up_the_end(cluster, monkeypatch):
    """The others' events arrive; it is named."""
    run, ray = cluster
    shipments = Nodes(ray, run)
    ray.hanging.add("a")
    try:
        found = shipments.finish(patience_s=1.0)
    finally:
        ray.hanging.clear()
    assert "step_1/worker_b.jsonl" in content(run)
    assert ["host-a did not send all of its files: no answer for 1 s"] == found


def test_a_second_driver_process_continues(cluster, tmp_path):
    """As `collect --ray` does after a kill, of a copy too; names stay those of the first."""
    run, ray = cluster
    for place in ("a", "b"):
        write(tmp_path / place, "processes/worker_same.json", "{}")
        write(tmp_path / place, "step_1/worker_same.jsonl", f"{place}\n")
    Nodes(ray, run).round()
    first = content(run)
    assert {"a\n", "b\n"} == {
        first["step_1/worker_same.jsonl"],
        first["step_1/worker_same-2.jsonl"],
    }
    for place in ("a", "b"):
        write(tmp_path / place, "step_1/worker_same.jsonl", f"{place}2\n")

    moved = run.rename(tmp_path / "moved")
    assert [] == Nodes(ray, moved).finish()

    second = content(moved)
    assert {str(run)} == ray.opened
    assert {"a\na2\n", "b\nb2\n"} == {
        second["step_1/worker_same.jsonl"],
        second["step_1/worker_same-2.jsonl"],
    }
    assert {*first} == {*second}


def test_after_ray_was_shut_down_the_end_is_a_line(cluster, monkeypatch, capsys):
    """Nothing connects again."""
    run, ray = cluster
    monkeypatch.setattr(ship, "LIGHT_S", 0.05)
    ship.start(ray, run, 0.05)
    copies.wait_until(lambda: content(run) == EVERYTHING)
    ray.initialized = False
    ship.finish()

    (line,) = capsys.readouterr().err.splitlines()
    assert "Ray has been shut down" in line
    assert f"verl-profiler collect --ray {run} (not-shipped)" in line


@pytest.fixture
def clocks(cluster):
    """The cluster, with a clock of its own on each node but one that shares this kernel."""
    clock.begin()
    run, ray = cluster
    ray.ahead_ns = {"a": 5_000_000_000, "c": -7_000_000_000}
    yield run, ray
    clock.begin()


def compared():
    """Return how many samples are kept of each host."""
    peers = clock.account().get("clock_exchange", {}).get("peers", [])
    return {peer["host"]: len(peer["samples"]) for peer in peers}


def test_without_shipping_clocks_are_compared_and_nothing_is_written(clocks):
    """`profiler.events.ship_every_s=null`."""
    run, ray = clocks
    before = content(run)
    nodes = Nodes(ray, run, clocks=True, files=False)
    nodes.round()

    assert {"host-a": 1, "host-c": 1} == compared()
    assert ["a", "c"] == ray.running(), "b has the clock of the driver's kernel"
    assert [] == nodes.finish()
    assert (before, []) == (content(run), ray.running())
    assert not (run / ".disk").exists()


def test_an_actor_that_starts_slowly_is_left_to_start(clocks, tmp_path):
    """Ended and started again, it would come last in the queue of a node that is busy starting others."""
    run, ray = clocks
    nodes = Nodes(ray, run, clocks=True)
    ray.hanging.add("a")
    try:
        for _ in range(3):
            nodes.round(patience_s=0.05)
        assert {"host-c"} == {*compared()}
        assert 3 == len(ray.actors)
    finally:
        ray.hanging.clear()
    nodes._await(list(nodes._nodes.values()), 30)
    nodes.round()

    assert {"host-a", "host-c"} == {*compared()}
    assert 3 == len(ray.actors)


def test_an_actor_that_never_starts_is_ended_and_tried_less_and_less_often(clocks):
    """It costs an actor for each try, and the others nothing."""
    run, ray = clocks
    nodes = Nodes(ray, run, clocks=True, files=False, start_s=0.01)
    ray.hanging.add("a")
    try:
        for _ in range(8):
            nodes.round()
    finally:
        ray.hanging.clear()

    assert {"host-c": 8} == compared()
    assert [3, False] == [sum(each.node == "a" for each in ray.actors), "a" in ray.running()]


def capture(place, pid, *names, raw=None):
    """Write a journal of captures, and their reports, as a process of a node does."""
    lines = [
        {"capture": number, "role": "actor", "rank": pid, "host": "h", "pid": pid, "step": number}
        | {"task": None, "tool": "nsys", "begin_ns": number, "end_ns": number + 1}
        for number in range(1, len(names) + 1)
    ]
    write(
        place, f"nsight/journal/actor_h_{pid}.jsonl", "".join(f"{json.dumps(x)}\n" for x in lines)
    )
    for name in names:
        write(raw or place / "nsight/raw", name, f"report {name}")


@pytest.fixture
def captured(cluster, tmp_path, monkeypatch):
    """The cluster as `import ray` has it; two captures on `a`, of which one is empty, and one on `b`."""
    run, ray = cluster
    module = types.ModuleType("ray")
    for name in ("is_initialized", "get_runtime_context", "nodes", "remote", "get", "kill"):
        setattr(module, name, getattr(ray, name))
    monkeypatch.setitem(sys.modules, "ray", module)
    capture(tmp_path / "a", 1, "actor_h_1.1.nsys-rep", "actor_h_1.2.nsys-rep")
    (tmp_path / "a" / "nsight/raw/actor_h_1.2.nsys-rep").write_bytes(b"")
    capture(tmp_path / "b", 2, "actor_h_2.nsys-rep")
    (run / "nsight").mkdir()
    return run, ray


def gathered(run, fetch, **options):
    found = gather.collect(run, fetch=fetch, poll_s=0.01, **options)
    return {each.label + f".{each.step}": each.size_bytes for each in found if not each.problem}


def test_reports_of_other_nodes_come_whole_and_once(captured, tmp_path, monkeypatch):
    """In pieces; not one that its tool has open, nor one that was gathered under another name."""
    run, ray = captured
    monkeypatch.setattr(files, "CHUNK_BYTES", 4)
    # What an earlier try left must not become part of it.
    write(run, "nsight/raw/actor_h_1.1.nsys-rep.part", "torn")
    fetch = gather.Fetch(run)
    with (tmp_path / "b" / "nsight/raw/actor_h_2.nsys-rep").open("a"):
        assert {"actor_1.1": 27} == gathered(run, fetch)
    assert {"actor_1.1": 27, "actor_2.1": 25} == gathered(run, fetch)
    assert [] == fetch.account()
    assert "report actor_h_1.1.nsys-rep" == (run / "nsight/actor_1.step1.nsys-rep").read_text()
    assert b"" == (run / "nsight/actor_1.step2.nsys-rep").read_bytes(), "its problem is that it is"
    assert ["host-a", "host-b"] == sorted(host for host, _ in fetch._nodes[0].sent())
    assert not ray.running()

    again = gather.Fetch(run)
    assert {"actor_1.1": 27, "actor_2.1": 25} == gathered(run, again)
    # An empty file has nothing to send.
    assert {"host-a": 0, "host-b": 0} == dict(again._nodes[0].sent())
    # Neither events nor an account of shipping came with them.
    assert {"step_1/worker_here.jsonl", "step_1/worker_c.jsonl"} == {
        name for name in content(run) if name.startswith("step_")
    }
    assert not (run / "shipping.json").exists()


def test_reports_come_from_disks_of_the_tool_where_the_run_has_one_for_all(captured, tmp_path):
    """`profiler.nsight.directory`; journals are on the shared disk."""
    run, ray = captured
    shutil.rmtree(tmp_path / "b")
    for node in ("a", "b"):
        ray.directories[node] = run
        ray.raw[node] = tmp_path / node / "raw"
        capture(run, ord(node), f"actor_h_{ord(node)}.nsys-rep", raw=ray.raw[node])
    ray.raw["c"] = tmp_path / "none"
    raw = tmp_path / "here" / "raw"
    fetch = gather.Fetch(run, raw)

    assert {"actor_97.1": 26, "actor_98.1": 26} == gathered(run, fetch, raw=raw)
    assert [] == fetch.account()
    assert [] == list(raw.glob("actor*"))


def test_nodes_that_send_no_reports_are_named(captured, capfd):
    """Those that hang share one deadline; one that has left was never visited."""
    run, ray = captured
    ray.alive |= {"gone": False, "d": True}
    ray.directories["d"] = run
    ray.broken.add("a")
    ray.hanging |= {"c", "d"}
    fetch = gather.Fetch(run)
    try:
        assert {"actor_2.1": 25} == gathered(run, fetch, fetch_s=1)
    finally:
        ray.hanging.clear()
    lines = fetch.account()

    assert all(line.endswith("(not-fetched)") for line in lines)
    assert ["host-a", "host-c", "host-d", "host-gone"] == sorted(line.split()[1] for line in lines)
    assert 2 == sum("no answer for 1 s" in line for line in lines)


def test_a_node_that_is_sending_may_finish_after_the_deadline(captured, monkeypatch):
    """A report may have gigabytes."""
    run, ray = captured
    monkeypatch.setattr(files, "CHUNK_BYTES", 1)
    monkeypatch.setattr(rounds, "CHUNK_BYTES", 1)
    ray.slow_s = 0.01

    assert {"actor_1.1": 27, "actor_2.1": 25} == gathered(run, gather.Fetch(run), fetch_s=0.1)


def test_collecting_starts_no_cluster(captured):
    """The command may have shut Ray down before; `ray.nodes()` would start another one."""
    run, ray = captured
    ray.initialized = False
    capture(run, 3, "actor_h_3.nsys-rep")
    fetch = gather.Fetch(run)

    assert {"actor_3.1": 25} == gathered(run, fetch)
    assert [] == ray.actors
    assert "Ray has been shut down" in fetch.account()[0]
