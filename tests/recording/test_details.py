"""Sampled details: which requests' events are written, and that every event is accounted for."""

import signal
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from picked import picked
from reading_back import headers_of, lines_of
from recording.children import run_child, until

from verl_profiler import span
from verl_profiler.recording import context, details, recorder, requests
from verl_profiler.recording.clock import now
from verl_profiler.recording.details import Details
from verl_profiler.recording.encoding import Logged
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder

DETAILS = ("prompt_build", "engine_call", "tool_call", "tool_execution", "turn", "agent_loop")
MS = 1_000_000


@pytest.fixture(autouse=True)
def one_slowest(monkeypatch):
    """Small examples: the longest and the last request of each step are detailed."""
    monkeypatch.setattr(details, "SLOWEST", 1)


def with_events(worker_config, **changes):
    return msgspec.structs.replace(
        worker_config, events=msgspec.structs.replace(worker_config.events, **changes)
    )


class Worker:
    """An agent-loop worker's recorder; requests begin and end at times that the test gives."""

    def __init__(self, worker_config, *, max_pending=200_000, **changes):
        changes = {"detail_share": 0.0, **changes}
        self.directory = worker_config.directory
        # Written when it closes: nothing depends on when the thread runs.
        config = msgspec.structs.replace(
            with_events(worker_config, **changes), max_pending=max_pending, flush_interval_s=60
        )
        self.recorder = Recorder(config, lambda: Identity("agent_loop", 0))
        self.offered = 0
        self.origin = now()

    def event(self, event, begin_ms, end_ms, step=1, **extra):
        begin = None if begin_ms is None else self.origin + begin_ms * MS
        self.recorder.append((event, begin, self.origin + end_ms * MS, extra, step))
        self.offered += 1

    def start(self, name, at_ms, step=1, **extra):
        self.event("request_start", None, at_ms, step, sample=name, **extra)

    def details(self, name, begin_ms, end_ms, step=1, events=DETAILS, **extra):
        for event in events:
            self.event(event, begin_ms, end_ms, step, request_id=name, **extra)

    def end(self, name, begin_ms, end_ms, step=1, **extra):
        self.event("request", begin_ms, end_ms, step, request_id=name, sample=name, **extra)

    def request(self, name, begin_ms, end_ms, step=1, **extra):
        self.start(name, begin_ms, step, **extra)
        self.details(name, begin_ms, end_ms, step)
        self.end(name, begin_ms, end_ms, step, **extra)

    def close(self):
        """Return the lines; check that every event is accounted for."""
        self.recorder.close("exit")
        account = self.recorder.account()
        lines = lines_of(self.directory, own=True)
        assert account["waiting"] == account["dropped"] == 0
        assert self.offered + account["own_events"] == account["events"] + account["sampled_out"]
        assert account["events"] == len(lines)
        (header,) = headers_of(self.directory).values()
        assert header["counters"]["sampled_out"] == account["sampled_out"]
        assert header["sampled_out_events"] == account["sampled_out"]
        return [line for line in lines if line["event"] != "profiler_cost"]


def detailed(lines):
    """Return the number of details by request."""
    return Counter(
        line["extra"]["request_id"]
        for line in lines
        if line["event"] not in ("request", "request_start")
    )


def warmed_up(worker):
    """Let a request of another step be the first with each event, which is always written."""
    worker.request("first", 0, 1, step=0)
    return worker


def test_of_each_step_the_longest_and_those_that_ended_last_have_details(worker_config):
    """By hand: `b` took longest, `d` ended last; `c` and `a` did neither; validation has its own: `w`."""
    worker = warmed_up(Worker(worker_config))
    for name, begin, end in (("a", 0, 10), ("b", 0, 90), ("c", 50, 95), ("d", 90, 99)):
        worker.request(name, begin, end)
    worker.request("v", 0, 5, validate=True)
    worker.request("w", 0, 6, validate=True)

    lines = worker.close()

    assert {"first": 6, "b": 6, "d": 6, "w": 6} == detailed(lines)
    assert ["first", "a", "b", "c", "d", "v", "w"] == [
        line["extra"]["request_id"] for line in lines if line["event"] == "request"
    ]
    assert not any("sampled" in line["extra"] for line in lines)


@pytest.mark.parametrize("status", ["error", "cancelled", "unfinished"])
def test_a_request_that_failed_has_details(worker_config, status):
    worker = warmed_up(Worker(worker_config))
    worker.start("bad", 0)
    worker.details("bad", 0, 5)
    worker.end("bad", 0, 5, status=status)
    worker.request("a", 0, 10)
    worker.request("b", 0, 90)

    assert {"first": 6, "bad": 6, "b": 6} == detailed(worker.close())


def test_late_details_share_their_requests_fate(worker_config):
    worker = warmed_up(Worker(worker_config))
    for name, end in (("a", 10), ("b", 90)):
        worker.start(name, 0)
        worker.details(name, 0, end)
        worker.end(name, 0, end)
        worker.details(name, 0, end + 1, events=("turn",))
    worker.details("a", 0, 95, events=("turn",))

    assert {"first": 6, "b": 7} == detailed(worker.close())


def test_what_is_no_detail_is_always_written(worker_config):
    """Also details of the trainer and the load balancer, where no request begins."""
    worker = warmed_up(Worker(worker_config))
    worker.details("elsewhere", 0, 10, events=("reward", "server_acquire"))
    worker.start("a", 0)
    worker.event("tq_put", 0, 1, request_id="a")
    worker.event("event_loop_lag", 0, 1, request_id="a")
    worker.event("turn", 0, 1)
    worker.details("a", 0, 2)
    worker.end("a", 0, 2)
    worker.request("b", 0, 90)

    written = Counter(line["event"] for line in worker.close())

    assert (1, 1) == (written["tq_put"], written["event_loop_lag"])
    assert (1, 1) == (written["reward"], written["server_acquire"])
    # One without an id, of which no request can be told.
    assert 3 == written["turn"]


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_an_id_of_the_users_own_is_nobodys_detail(share):
    """No `request` line follows it: whoever held it back would hold it until the process ends."""
    details = Details(share, 1, 1000, 0)
    details.add(("request_start", None, 0, {"sample": 1}, 1))
    for number in range(2000):
        for event in ("http", "engine_call"):
            # As `log_manager.log` makes them.
            item = (event, 0, 1, Logged({"request_id": f"job-{number}"}), 1)
            assert [item] == list(details.add(item))

    assert 0 == details.waiting
    assert [] == details.close()


def test_with_no_more_room_the_request_that_began_first_is_written(worker_config):
    worker = warmed_up(Worker(worker_config, max_pending=1000))
    details = worker.recorder._writer.details
    details._limit = 20
    worker.start("long", 0)
    worker.details("long", 0, 1, events=["turn"] * 15)
    for number in range(5):
        worker.start(f"r{number}", 0)
        worker.details(f"r{number}", 0, 10 + number)
        worker.end(f"r{number}", 0, 10 + number)
    worker.end("long", 0, 5)

    # `r4` took longest and ended last of those that ended in time.
    assert {"first": 6, "long": 15, "r4": 6} == detailed(worker.close())


def test_a_step_without_an_end_is_written_when_a_later_one_begins(worker_config):
    """The slowest of a step are known once it is over: a run that is killed keeps them."""
    worker_config = with_events(worker_config, detail_share=0.0)
    active = recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    try:
        for step in (1, 2):
            context.process.step = step
            for name, length_s in (("a", 0), ("b", 0.05)):
                begin = now()
                recorder.record("request_start", None, begin, {"sample": name}, step)
                for event in DETAILS:
                    recorder.record(event, begin, now(), {"request_id": f"{name}{step}"}, step)
                time.sleep(length_s)
                recorder.record("request", begin, now(), {"request_id": f"{name}{step}"}, step)
        until(lambda: active.account()["waiting"] == 6)
        assert {"a1": 6, "b1": 6} == detailed(lines_of(worker_config.directory))
    finally:
        recorder.stop()
    assert detailed(lines_of(worker_config.directory))["b2"] == 6


def test_a_quiet_step_is_over(worker_config, monkeypatch):
    from verl_profiler.recording import details

    monkeypatch.setattr(details, "QUIET_NS", 1)
    worker_config = with_events(worker_config, detail_share=0.0)
    active = recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    begin = now()
    recorder.record("request_start", None, begin, {"sample": 1}, 1)
    recorder.record("turn", begin, now(), {"request_id": "a"}, 1)
    recorder.record("engine_call", begin, now(), {"request_id": "a"}, 1)
    recorder.record("request", begin, now(), {"request_id": "a"}, 1)
    until(lambda: not active.account()["waiting"])
    assert {"a": 2} == detailed(lines_of(worker_config.directory))
    recorder.stop()


def test_requests_that_the_users_code_names_are_sampled_too(worker_config):
    """Through the public `span`: the third and fourth are neither first, nor longest, nor last."""
    worker_config = with_events(worker_config, detail_share=0.0)
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    for name, wait in (("a", 0), ("b", 0.03), ("c", 0), ("d", 0)):
        with span("episode", request_id=name), span("move"):
            time.sleep(wait)
    recorder.stop()

    counts = detailed(lines_of(worker_config.directory))
    account = headers_of(worker_config.directory)["worker_0"]["counters"]

    # The span that is the request comes before the request's end, and is one of its details.
    assert {"a": 2, "b": 2, "d": 2} == counts
    assert 2 == account["sampled_out"]


def test_open_requests_keep_their_details_at_the_end(worker_config):
    worker_config = with_events(worker_config, detail_share=0.0)
    recorder.start(worker_config, lambda: Identity("agent_loop", 0))
    recorder.before_stop(requests.finish_open_requests)
    request = context.Request(1)
    request.request_id = "open"
    requests.begin_request(request)
    requests.open_turn(request, 0)
    requests.close_turn(request, now())
    recorder.stop()

    assert ["request_start", "turn", "request"] == [
        line["event"] for line in lines_of(worker_config.directory)
    ]


def test_a_killed_process_counts_what_it_held(worker_config):
    """`waiting_events` of its header: the details of its open requests are lost with it.

    The header is up to date: all else is in the files, and it proves that.
    """
    worker_config = with_events(worker_config, detail_share=0.0)
    finished = run_child(
        worker_config,
        """
        for name in ("a", "b"):
            recorder.record("request_start", None, now(), {"sample": 1}, 1)
            for _ in range(1 + (name == "b")):
                recorder.record("turn", now(), now(), {"request_id": name}, 1)
        until(lambda: (active.account()["waiting"], active.account()["events"]) == (2, 3))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert -signal.SIGKILL == finished.returncode, finished.stderr

    (header,) = headers_of(worker_config.directory).values()

    lines = lines_of(worker_config.directory, own=True)
    size = sum(file.stat().st_size for file in Path(worker_config.directory).rglob("*.jsonl"))

    assert (3, 2, 0, 0) == picked(
        header, "written_events waiting_events sampled_out_events dropped_events"
    )
    assert (None, size, 0.01) == picked(header, "ended written_bytes flush_interval_s")
    assert 3 == len(lines)
    assert max(line["timestamp"] for line in lines) < header["complete_until"]
