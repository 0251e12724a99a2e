"""The clocks of many nodes are compared, also where processes start slowly; with a stand-in for Ray."""

import threading
from types import SimpleNamespace

import pytest

from verl_profiler.launch import clock_exchange
from verl_profiler.recording.clock import now


class Ray:
    """Counts what is requested of it; actors answer once they have started.

    Args:
        counts: How often actors were made and ended, and how often somebody waited for one.
        started: The nodes whose actors have started.
    """

    def __init__(self):
        self.counts = dict.fromkeys(("actors", "kill", "wait", "samples"), 0)
        self.started = set()

    def actor(self, node):
        self.counts["actors"] += 1

        def listen(_address, _token):
            return node, lambda: ((f"boot of {node}", node), None)

        def read():
            self.counts["samples"] += 1
            return node, now

        return SimpleNamespace(
            listen=SimpleNamespace(remote=listen), read=SimpleNamespace(remote=read)
        )

    def get(self, reference, timeout):
        node, answer = reference
        if node not in self.started:
            self.counts["wait"] += timeout > 0
            raise TimeoutError(node)
        return answer()

    def wait(self, references, *, num_returns, timeout):
        assert num_returns == len(references)
        self.counts["wait"] += timeout > 0
        return [each for each in references if each[0] in self.started], []

    def kill(self, _actor):
        self.counts["kill"] += 1


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(clock_exchange, "_actor", lambda _ray, node: ray.actor(node))
    monkeypatch.setattr(clock_exchange, "_samples", {})
    return ray


def nodes_of(count):
    """Return nodes as Ray lists them."""
    return [{"NodeID": f"node {n}", "NodeManagerAddress": f"10.0.0.{n}"} for n in range(count)]


def compared():
    """Return how many bursts are kept of each node."""
    return [len(about["samples"]) for about in clock_exchange._samples.values()]


@pytest.mark.parametrize("count", [2, 8, 128])
def test_the_actors_of_all_nodes_start_at_once(ray, count):
    """One node after the other, a cluster whose processes start slowly took seconds per node."""
    clock_exchange._Nodes(ray, threading.Event()).poll(nodes_of(count))

    assert {"actors": count, "kill": 0, "wait": 1, "samples": 0} == ray.counts


def test_an_actor_that_starts_slowly_is_left_to_start(ray):
    """Ended and started again, it would come last in the queue of a node that is busy starting others."""
    nodes = clock_exchange._Nodes(ray, threading.Event())
    for _ in range(4):
        nodes.poll(nodes_of(3))
    ray.started = {"node 0", "node 2"}
    nodes.poll(nodes_of(3))
    some = compared()
    ray.started.add("node 1")
    nodes.poll(nodes_of(3))

    assert [1, 1] == some
    assert [2, 2, 1] == compared()
    assert (3, 0) == (ray.counts["actors"], ray.counts["kill"])


def test_an_actor_that_never_starts_is_ended(ray, monkeypatch):
    """And tried again less and less often."""
    monkeypatch.setattr(clock_exchange, "_START_S", 0.0)
    nodes = clock_exchange._Nodes(ray, threading.Event())
    ray.started = {"node 0"}
    for _ in range(8):
        nodes.poll(nodes_of(2))

    assert [8] == compared()
    assert 4 == ray.counts["actors"]
    assert 3 == ray.counts["kill"]


@pytest.mark.parametrize("count", [2, 16, 64])
def test_a_round_takes_one_burst_of_each_node(ray, count):
    """Whatever the number of processes: messages grow with the nodes."""
    ray.started = {each["NodeID"] for each in nodes_of(count)}
    nodes = clock_exchange._Nodes(ray, threading.Event())
    for _ in range(3):
        nodes.poll(nodes_of(count))

    assert [3] * count == compared()
    assert count * 3 * clock_exchange._BURST == ray.counts["samples"]
    assert count == ray.counts["actors"]


def test_nodes_that_left_are_dropped_while_they_start(ray):
    """With their actors."""
    nodes = clock_exchange._Nodes(ray, threading.Event())
    nodes.poll(nodes_of(3))
    nodes.poll(nodes_of(2))
    nodes.poll([])

    assert (3, 3) == (ray.counts["actors"], ray.counts["kill"])
