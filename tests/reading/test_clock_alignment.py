"""Clocks of several hosts on one axis: simulated skews, real other clocks, and what is said of them."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiler.launch import clock_exchange
from verl_profiler.reading.clock_alignment import aheads, fit
from verl_profiler.reading.processes import processes
from verl_profiler.reading.reader import load
from verl_profiler.recording.clock import boot_id, now

SECOND = 10**9
WALL_NS = 1_795_228_400 * SECOND


class Network:
    """Two clocks and what lies between them.

    Args:
        offset_ns: By how much the other clock is ahead at the driver's time 0.
        drift: By how much it gains per nanosecond.
        delay_ns: The least time that a message takes, in each direction.
        jitter_ns: What is added to it at most, and to each direction apart.
    """

    def __init__(self, offset_ns, drift, delay_ns=100_000, jitter_ns=400_000, seed=0):
        self.offset_ns, self.drift = offset_ns, drift
        self._delay_ns, self._jitter_ns = delay_ns, jitter_ns
        self._source = random.Random(seed)
        self.time_ns = 0

    def other(self, driver_ns):
        return round(driver_ns + self.offset_ns + self.drift * driver_ns)

    def now(self):
        return self.time_ns

    def ask(self):
        self.time_ns += self._delay_ns + self._source.randrange(self._jitter_ns)
        told = self.other(self.time_ns)
        self.time_ns += self._delay_ns + self._source.randrange(self._jitter_ns)
        return "other", told

    def samples(self, monkeypatch, bursts=40, every_s=30):
        monkeypatch.setattr(clock_exchange, "now", self.now)
        taken = []
        for _ in range(bursts):
            taken.append(clock_exchange.exchange(self.ask)[1])
            self.time_ns += every_s * SECOND
        return taken


@settings(max_examples=60, deadline=None)
@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    delay_ns=st.integers(1_000, 20_000_000),
    jitter_ns=st.integers(1, 20_000_000),
    bursts=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_the_truth_is_within_the_bound(offset_ns, drift, delay_ns, jitter_ns, bursts, seed):
    """Wherever clocks were compared, whatever the network did with each half of the way."""
    network = Network(offset_ns, drift, delay_ns, jitter_ns, seed)
    with pytest.MonkeyPatch.context() as patch:
        samples = network.samples(patch, bursts)
    for at_ns, ahead_ns, bound_ns in samples:
        assert abs(network.other(at_ns) - at_ns - ahead_ns) <= bound_ns + abs(drift) * bound_ns + 1
    line = fit(samples)

    limit = 4 * sorted(bound for _, _, bound in samples)[len(samples) // 2]
    for at_ns, _, bound_ns in samples:
        if bound_ns <= limit / 4:
            other_ns = network.other(at_ns)
            said = line.offset_ns + line.drift * (other_ns - line.at_ns)
            assert abs(said - (other_ns - at_ns)) <= line.bound_ns + 50


def test_a_usual_network_is_aligned_to_half_a_millisecond(monkeypatch):
    """0.1 to 0.5 ms each way, clocks 20 ppm apart, an hour; one comparison that took a second loosens nothing.

    Few comparisons give no drift: over some seconds it would be noise, and be multiplied.
    """
    samples = Network(7 * SECOND, 2e-5).samples(monkeypatch, bursts=120)
    line = fit(samples)
    assert pytest.approx(2e-5, abs=2e-8) == line.drift
    assert line.bound_ns < 500_000
    samples[10] = [samples[10][0], samples[10][1] + 400_000_000, 500_000_000]
    assert line.bound_ns == pytest.approx(fit(samples).bound_ns, rel=0.05)
    assert 119 == fit(samples).samples
    assert 0.0 == fit(Network(SECOND, 0.0).samples(monkeypatch, bursts=3, every_s=5)).drift
    assert fit([]) is None


@pytest.mark.parametrize(
    "exchange",
    [
        None,
        3,
        {"boot_id": 5},
        {"boot_id": "a", "peers": 7},
        {"boot_id": "a", "peers": [3, {"boot_id": 1}, {"boot_id": "b"}]},
        {"boot_id": "a", "peers": [{"boot_id": "b", "samples": [[1, 2], "x", [1, "2", 3]]}]},
        {"boot_id": "a", "peers": [{"boot_id": "b", "samples": [[1, 2, -3]]}]},
    ],
)
def test_what_is_no_comparison_says_nothing(exchange):
    """Files are never trusted."""
    assert [] == list(aheads({"driver": {"clock_exchange": exchange}}))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="time namespaces are Linux's")
def test_a_real_clock_that_is_ahead_is_found():
    """A process in a time namespace of its own, 1000 s ahead, asked over pipes."""
    answer = "import sys, time\nfor _ in sys.stdin: print(time.perf_counter_ns(), flush=True)"
    command = ["unshare", "--user", "--map-root-user", "-T", "--monotonic", "1000"]
    if os.getuid() == 0:
        command = ["unshare", "-T", "--monotonic", "1000"]
    try:
        other = subprocess.Popen(
            [*command, sys.executable, "-c", answer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("no unshare")

    def ask():
        other.stdin.write("\n")
        other.stdin.flush()
        told = other.stdout.readline()
        if not told:
            pytest.skip("time namespaces are not allowed here")
        return "other", int(told)

    with other:
        samples = [clock_exchange.exchange(ask)[1] for _ in range(5)]
        other.stdin.close()
    for _, ahead_ns, bound_ns in samples:
        assert abs(ahead_ns - 1000 * SECOND) <= bound_ns
    line = fit(samples)
    assert abs(line.offset_ns - 1000 * SECOND) <= line.bound_ns


def write_run(folder, network, *, exchange=None, wall_error_ns=0):
    """Write calls of a worker on the driver's host to an engine on another, every minute.

    The engine has each request for all of the call but 2 ms at either end.
    """
    anchors = {
        "a": (WALL_NS, 0),
        # Taken at the driver's time 0 from a wall clock that is wrong.
        "b": (WALL_NS + wall_error_ns, network.other(0)),
    }
    folder.mkdir()
    clocks = {
        boot: {"boot_id": boot, "wall_ns": wall, "monotonic_ns": monotonic, "uncertainty_ns": 50}
        for boot, (wall, monotonic) in anchors.items()
    }
    launch = {"format": 1, "launched": "x", "clock": clocks["a"]}
    (folder / "run.json").write_text(json.dumps(launch))
    (folder / "processes").mkdir()
    headers = {"driver_a_1": "a", "worker_0": "a", "engine_0": "b"}
    for name, boot in headers.items():
        header = {"format": 1, "name": name, "role": name.split("_")[0], "host": boot, "pid": 1}
        header |= {"rank": 0, "clock": clocks[boot], "ended": "2026-11-21T09:00:00+00:00"}
        if name == "worker_0":
            header["role"] = "agent_loop"
        if name == "driver_a_1" and exchange:
            header["clock_exchange"] = {
                "boot_id": "a",
                "peers": [{"boot_id": "b", "host": "b", "samples": exchange}],
            }
        (folder / "processes" / f"{name}.json").write_text(json.dumps(header))
    (folder / "step_1").mkdir()
    truths = []
    for number in range(60):
        begin_ns, end_ns = (number * 60 + 5) * SECOND, (number * 60 + 46) * SECOND
        for name, event, first_ns, last_ns in (
            ("worker_0", "engine_call", begin_ns, end_ns),
            ("engine_0", "engine_request", begin_ns + 2_000_000, end_ns - 2_000_000),
        ):
            wall, monotonic = anchors[headers[name]]
            clock = network.other if headers[name] == "b" else round
            at = [(wall + clock(each) - monotonic) // 1000 for each in (first_ns, last_ns)]
            moment = datetime.fromtimestamp(at[1] // 10**6, timezone.utc)
            line = {
                "timestamp": f"{moment:%Y-%m-%dT%H:%M:%S}.{at[1] % 10**6:06}+00:00",
                "event": event,
                "duration_sec": (at[1] - at[0]) / 1e6,
                "extra": {"engine_request_id": f"e{number}", "request_id": "q", "turn": number},
                "workid": 0,
                "step": 1,
            }
            with (folder / "step_1" / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            truths.append(
                (name, number, *((WALL_NS + each) // 1000 for each in (first_ns, last_ns)))
            )
    return truths


def worst_us(opened, truths):
    """Return by how much the engine's times are wrong at most."""
    rows = opened.rows("SELECT name, turn, begin_us, end_us FROM events")
    found = {(row["name"], row["turn"]): (row["begin_us"], row["end_us"]) for row in rows}
    return max(
        abs(own - truth)
        for name, number, *times in truths
        for own, truth in zip(found[name, number], times, strict=True)
    )


@pytest.mark.parametrize(
    ("wall_error_ns", "drift"), [(0, 0.0), (37_000_000, 4e-5), (-3 * SECOND, -8e-5)]
)
def test_hosts_are_placed_within_the_stated_bound(tmp_path, monkeypatch, wall_error_ns, drift):
    """An hour with clocks that are wrong and drift: below a millisecond, and no request comes early."""
    network = Network(86_400 * SECOND, drift, seed=5)
    exchange = network.samples(monkeypatch, bursts=120)
    truths = write_run(tmp_path / "run", network, exchange=exchange, wall_error_ns=wall_error_ns)

    with load(tmp_path / "run", cache=False) as opened:
        (bound,) = opened.rows("SELECT clock_bound_us AS us FROM processes WHERE host = 'b'")
        assert worst_us(opened, truths) <= bound["us"] < 1000
        assert any("clocks aligned with the driver's: b (moved by" in p for p in opened.problems)
        assert not any("earlier than they were made" in p for p in opened.problems)


def test_alignment_compares_each_anchor_once():
    """Each process once looked through all anchors of its host: 20,000 of them did not end."""

    class Counted(int):
        compared = 0

        def __lt__(self, other):
            Counted.compared += 1
            return int(self) < int(other)

        def __eq__(self, other):
            Counted.compared += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    def comparisons(count):
        headers = {
            f"worker_{n}": {
                "clock": {
                    "boot_id": "one",
                    "wall_ns": WALL_NS + n,
                    "monotonic_ns": n,
                    "uncertainty_ns": Counted(1000 + n % 7),
                }
            }
            for n in range(count)
        }
        Counted.compared = 0
        found = processes(SimpleNamespace(label="run", headers=headers, files=[], launch={}))
        assert count == len(found)
        return Counted.compared

    assert comparisons(400) <= 12 * comparisons(40)


def test_without_comparisons_contradictions_are_said(tmp_path):
    """The wall clock of the engine's host is 37 ms behind: its requests seem to come before they are sent."""
    network = Network(86_400 * SECOND, 0.0)
    truths = write_run(tmp_path / "run", network, wall_error_ns=-37_000_000)

    with load(tmp_path / "run", cache=False) as opened:
        assert 37_000 == worst_us(opened, truths)
        problems = "\n".join(opened.problems)
    assert "the clocks of b were not compared with the driver's" in problems
    assert "60 of 60 generate calls of host a are at host b earlier than they were made" in problems
    # 2 ms of the 37 cannot be seen.
    assert "differ by at least 35.000 ms" in problems


def test_the_exchange_keeps_few_samples_and_no_own_ones(monkeypatch):
    """A week of bursts stays small; the node with the driver's kernel has the driver's clock."""
    monkeypatch.setattr(clock_exchange, "_samples", {})
    clock_exchange._compare(SimpleNamespace(who=(boot_id(), "here")))
    clock_exchange._compare(SimpleNamespace(who=("", "unknown")))
    assert {} == clock_exchange.account()
    for number in range(2000):
        clock_exchange._keep(("other", "there"), [number, 0, 1])

    (peer,) = clock_exchange.account()["clock_exchange"]["peers"]
    kept = [at for at, _, _ in peer["samples"]]
    assert ("other", "there") == (peer["boot_id"], peer["host"])
    assert len(kept) <= 128
    assert (0, 1999) == (kept[0], kept[-1])
    assert kept == sorted(kept)


def test_questions_and_answers_bound_the_difference_apart(monkeypatch):
    """A quick question in one exchange and a quick answer in another: a hundredth of what each says alone."""
    moments = iter([0, 1_010_000, 2_000_000, 3_010_000])
    told = iter([7_000_010_000, 7_003_000_000])
    monkeypatch.setattr(clock_exchange, "now", lambda: next(moments))
    who, (_, ahead, bound) = clock_exchange.exchange(lambda: ("other", next(told)), tries=2)

    # 10 us each way, and what the clocks may have drifted between the exchanges.
    assert "other" == who
    assert 7_000_000_000 == pytest.approx(ahead, abs=bound)
    assert 10_000 < bound < 12_000


class LocalRay:
    """Just so much of Ray that the actor runs in a thread of this process."""

    def __init__(self, listens=True):
        self.listens = listens
        self.calls = []

    def remote(self, made):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self._of(made())))

    def _of(self, actor):
        def method(name):
            def called(*arguments):
                self.calls.append(name)
                answer = getattr(actor, name)(*arguments)
                return answer if self.listens or name != "listen" else (answer[0], None)

            return SimpleNamespace(remote=called)

        return SimpleNamespace(**{name: method(name) for name in ("listen", "read")})

    def get(self, answer, timeout):
        return answer

    def wait(self, answers, num_returns, timeout):
        return answers, []

    def kill(self, actor):
        self.calls.append("kill")


@pytest.fixture
def peer_of(monkeypatch):
    """Make a peer of a Ray, without a cluster."""
    scheduling = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)
    made = []

    def make(ray):
        made.append(clock_exchange._Peer(ray, "node", "127.0.0.1"))
        assert made[-1].has_started()
        return made[-1]

    yield make
    for peer in made:
        peer.end()


@pytest.mark.parametrize("way", ["connection", "no port", "broken connection"])
def test_a_peer_is_asked_over_a_connection_of_its_own(peer_of, way):
    """One call of Ray to find it, none to ask it; by calls of Ray where there is no connection."""
    ray = LocalRay(listens=way != "no port")
    peer = peer_of(ray)
    if way == "broken connection":
        peer._connection.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        before, (who, told), after = now(), peer.ask(), now()

        assert who[0] == boot_id()
        assert before <= told <= after
    assert ray.calls == ["listen", *([] if way == "connection" else ["read", "read"])]


class Cluster:
    """A Ray whose nodes come, go, fail and recover; `rounds` has who lives and who fails in each."""

    def __init__(self, rounds):
        self._rounds = iter(rounds)
        self.failing = ()
        self.done = threading.Event()

    def is_initialized(self):
        return not self.done.is_set()

    def nodes(self):
        try:
            alive, self.failing = next(self._rounds)
        except StopIteration:
            self.done.set()
            return []
        if alive is None:
            raise RuntimeError("the head restarts")
        return [{"Alive": True, "NodeID": name, "NodeManagerAddress": name} for name in alive]


@pytest.fixture
def exchanged(monkeypatch):
    """Compare the clocks of a cluster through its rounds; return who was asked, made and ended."""
    said = []

    class Peer:
        starting = None

        def __init__(self, ray, name, _address):
            self.who, self.ray = (f"boot-{name}", name), ray
            said.append(("made", name))
            if name in ray.failing:
                raise TimeoutError

        def has_started(self):
            return True

        def connect(self):
            pass

        def ask(self):
            said.append(("asked", self.who[1]))
            if self.who[1] in self.ray.failing:
                raise TimeoutError
            return self.who, now()

        def end(self):
            said.append(("ended", self.who[1]))

    def run(rounds, **patches):
        monkeypatch.setattr(clock_exchange, "_FIRST_S", ())
        for name, value in {"_EVERY_S": 0.0, "_Peer": Peer, **patches}.items():
            monkeypatch.setattr(clock_exchange, name, value)
        monkeypatch.setattr(clock_exchange, "exchange", lambda ask: (ask()[0], [now(), 0, 1]))
        monkeypatch.setattr(clock_exchange, "_thread", None)
        cluster = Cluster(rounds)
        clock_exchange.start(cluster)
        assert cluster.done.wait(30)
        clock_exchange.stop()
        return said

    return run


def test_nodes_that_fail_leave_and_recover(exchanged):
    """A node that failed is left alone for a round, and a failing head ends nothing; what was said stays."""
    said = exchanged([*([("ab", "b")] + [("ab", "")] * 4) * 5, (None, ""), ("ac", ""), ("a", "")])

    # Four of the failures are at a question.
    assert 5 * 3 + 4 == said.count(("asked", "b"))
    # A single node has nobody to be compared with.
    assert 5 * 5 + 1 == said.count(("asked", "a"))
    assert said.index(("ended", "b"), -8) < said.index(("made", "c"))
    assert ("ended", "c") in said
    assert {"boot-a", "boot-b", "boot-c"} == set(clock_exchange._samples)
    # A second run begins without samples.
    exchanged([("ad", "")])
    assert {"boot-a", "boot-d"} == set(clock_exchange._samples)


def test_weeks_of_failing_and_new_nodes_stay_small(exchanged):
    """An actor is made for each try, and each new node has a boot of its own."""
    said = exchanged([("ab", "b")] * 50, _EVERY_S=0.001)
    assert 2 <= said.count(("made", "b")) <= 12
    assert 50 == said.count(("asked", "a"))
    exchanged([(("a", f"n{number}"), "") for number in range(1000)])
    assert len(clock_exchange._samples) <= clock_exchange._PEERS
    assert "boot-n999" in clock_exchange._samples


ACTOR = """
import os, resource, sys, threading, time
from types import SimpleNamespace
sys.modules["ray.util.scheduling_strategies"] = SimpleNamespace(
    NodeAffinitySchedulingStrategy=lambda *_, **__: None
)
from verl_profiler.launch.clock_exchange import _actor
ray = SimpleNamespace(remote=lambda made: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made)))
who, port = _actor(ray, "node").listen("127.0.0.1", b"t" * 16)
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
print(port, flush=True)
for line in sys.stdin:
    if line.strip() == "few":
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, usual[1]))
    if line.strip() == "many":
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    print(threading.active_count(), len(os.listdir("/proc/self/fd")), flush=True)
"""


@pytest.fixture
def actor():
    """A clock in a process of its own: its port, and a function that gives it an order."""
    with subprocess.Popen(
        [sys.executable, "-c", ACTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def order(word):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            return tuple(map(int, process.stdout.readline().split()))

        yield int(process.stdout.readline()), order
        process.kill()


def asked(port, token=b"t" * 16):
    with clock_exchange._connected("127.0.0.1", port, token) as connection:
        connection.settimeout(20)
        connection.sendall(b"?")
        return len(connection.recv(8))


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_the_clock_survives_a_moment_without_descriptors(actor):
    """accept() fails with EMFILE; the thread that waited there was gone for good."""
    port, order = actor
    order("few")
    waiting = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(3)]
    time.sleep(0.3)
    order("many")

    assert 8 == asked(port)
    with contextlib.suppress(ConnectionResetError):
        assert 0 == asked(port, b"x" * 16), "one without the token is told nothing"
    for connection in waiting:
        connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_strangers_cost_no_thread_and_few_descriptors(actor):
    """Whoever reaches the port; the driver is answered beside them."""
    port, order = actor
    threads, descriptors = order("count")
    with clock_exchange._connected("127.0.0.1", port, b"t" * 16) as known:
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
        for stranger in strangers[::2]:
            stranger.sendall(b"t" * 15)
        for _ in range(20):
            known.sendall(b"?")
            assert 8 == len(known.recv(8))
        # All have been taken, and most of them closed, when a later one was answered.
        assert 8 == asked(port)
        then = order("count")
        for stranger in strangers:
            stranger.close()

    assert threads == then[0]
    assert then[1] < descriptors + 30
