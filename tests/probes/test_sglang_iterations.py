"""Iterations that SGLang's own publisher sends: rows of 100 ms, with what happened in between."""

import dataclasses
import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from picked import picked

from verl_profiler.probes import sglang_iterations
from verl_profiler.recording import context, recorder

MS = 1_000_000


@pytest.fixture(scope="module")
def sglang_metrics():
    """SGLang's own module, without the rest of the package, which needs a device."""
    pytest.importorskip("zmq")
    package = importlib.util.find_spec("sglang")
    if package is None:
        pytest.skip("SGLang is not installed")
    path = Path(package.submodule_search_locations[0]) / "srt/observability/forward_pass_metrics.py"
    spec = importlib.util.spec_from_file_location("real_forward_pass_metrics", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recording(engine_recording):
    yield engine_recording("engine_iterations")
    recorder.stop()
    for thread in threading.enumerate():
        if thread.name == "verl-profiler-iterations":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def server(monkeypatch):
    """In the place of verl's `SGLangHttpServer`; its module has SGLang's `ServerArgs`."""
    arguments = dataclasses.make_dataclass(
        "ServerArgs",
        [
            ("enable_forward_pass_metrics", bool, False),
            ("forward_pass_metrics_ipc_name", str, None),
        ],
    )

    class FakeServer:
        def __init__(self):
            self.config = SimpleNamespace(engine_kwargs={})

    monkeypatch.setattr(sys.modules[__name__], "ServerArgs", arguments, raising=False)
    return FakeServer()


class FakeManager:
    """In the place of SGLang's `TokenizerManager`."""

    server_args = SimpleNamespace(dp_size=2)


def decoding(metrics, rank, requests, seconds, *, context=0, waiting=0, retracted=0):
    return metrics.ForwardPassMetrics(
        worker_id="any",
        dp_rank=rank,
        wall_time=seconds,
        scheduled_requests=metrics.ScheduledRequestMetrics(
            num_decode_requests=requests, sum_decode_kv_tokens=context, var_decode_kv_tokens=1.5
        ),
        queued_requests=metrics.QueuedRequestMetrics(
            num_prefill_requests=waiting, num_decode_requests=retracted
        ),
    )


def passes(metrics, *each):
    """Encode as SGLang does, decode as the subscriber does."""
    return [
        (at_ms * MS, msgspec.msgpack.decode(metrics.encode(message), type=sglang_iterations._Pass))
        for at_ms, message in each
    ]


def test_iterations_are_summed_for_100_ms(recording, sglang_metrics):
    """The row ends with the iteration that reaches 100 ms; a heartbeat ends it before."""
    recording.start()
    sums = sglang_iterations.Sums()
    prefill = sglang_metrics.ForwardPassMetrics(
        wall_time=0.03,
        scheduled_requests=sglang_metrics.ScheduledRequestMetrics(
            num_prefill_requests=2, sum_prefill_tokens=70, sum_prefill_kv_tokens=16
        ),
    )
    for at_ns, each in passes(
        sglang_metrics,
        (1_030, prefill),
        (1_080, decoding(sglang_metrics, 0, 2, 0.04, context=90, waiting=3)),
        (1_130, decoding(sglang_metrics, 0, 2, 0.04, context=92, waiting=2, retracted=1)),
        (1_150, decoding(sglang_metrics, 0, 1, 0.02, context=40)),
        (2_150, sglang_metrics.ForwardPassMetrics()),
        # 2 s without anything to do, and no heartbeat: the forward pass itself counts.
        (4_150, decoding(sglang_metrics, 0, 1, 0.02, context=41)),
        (4_250, sglang_metrics.ForwardPassMetrics()),
    ):
        sums.add(at_ns, each)

    rows = recording.end()

    assert [
        (3, 0.13, 0.11, 2, 70, 4, 182, 2, 3, 1),
        (1, 0.02, 0.02, 0, 0, 1, 40, 1, 0, 0),
        (1, 0.02, 0.02, 0, 0, 1, 41, 1, 0, 0),
    ] == [
        picked(
            row,
            "iterations busy_s device_s prefill_requests prefill_tokens decode_requests "
            "context_tokens running_requests waiting_requests retracted_requests",
        )
        for row in rows
    ]


def test_each_iteration_of_a_captured_step_is_a_row(recording, sglang_metrics, monkeypatch):
    """Of step 3 alone; what was summed before belongs to the first of them."""
    recording.start(captured_steps=(3, 8))
    sums = sglang_iterations.Sums()
    for step, at_ms in ((2, 1_010), (2, 1_020), (3, 1_030), (3, 1_040), (4, 1_050), (4, 1_060)):
        monkeypatch.setattr(context.process, "step", step)
        ((at_ns, each),) = passes(sglang_metrics, (at_ms, decoding(sglang_metrics, 0, 2, 0.01)))
        sums.add(at_ns, each)
    sums.end(0)

    rows = recording.end()

    assert [(3, 0.03), (1, 0.01), (2, 0.02)] == [(row["iterations"], row["busy_s"]) for row in rows]


def test_a_pause_without_heartbeat_is_no_iteration(recording, sglang_metrics):
    """Between two messages may be a weight sync: a second of it is not the second's iteration."""
    recording.start()
    sums = sglang_iterations.Sums()
    for at_ns, each in passes(
        sglang_metrics,
        (1_000, decoding(sglang_metrics, 0, 4, 0.01)),
        (1_015, decoding(sglang_metrics, 0, 4, 0.01)),
        (2_015, decoding(sglang_metrics, 0, 4, 0.01)),
        (2_027, decoding(sglang_metrics, 0, 4, 0.01)),
    ):
        sums.add(at_ns, each)
    sums.end(0)

    rows = recording.end()

    assert [(2, 0.025), (2, 0.022)] == [(row["iterations"], row["busy_s"]) for row in rows]


def test_sglangs_own_publisher_is_read(recording, sglang_metrics, server, monkeypatch):
    """Real messages over real sockets, of two data-parallel ranks; each iteration once."""
    recording.start()
    read = []
    add = sglang_iterations.Sums.add

    def counted(self, at_ns, each):
        add(self, at_ns, each)
        read.extend([each] if each.wall_time else [])

    monkeypatch.setattr(sglang_iterations.Sums, "add", counted)
    sglang_iterations.begin_launch(server)
    options = server.config.engine_kwargs["sglang"]
    assert options["enable_forward_pass_metrics"]
    base = options["forward_pass_metrics_ipc_name"]
    publishers = [
        sglang_metrics._FpmPublisherThread(f"{base}.{rank}", worker_id="", dp_rank=rank)
        for rank in range(2)
    ]
    manager = FakeManager()
    sglang_iterations.end_launch(manager)
    sums = sglang_iterations._subscriber.sums
    until = time.monotonic() + 20
    while len(sums) < 2 and time.monotonic() < until:
        # Messages before the subscription are lost; heartbeats show that it is there.
        for rank, publisher in enumerate(publishers):
            publisher.publish(sglang_metrics.ForwardPassMetrics(dp_rank=rank))
        time.sleep(0.02)
    for _ in range(50):
        for rank, publisher in enumerate(publishers):
            publisher.publish(decoding(sglang_metrics, rank, 3 + rank, 0.001, context=100))
    for rank, publisher in enumerate(publishers):
        publisher.publish(sglang_metrics.ForwardPassMetrics(dp_rank=rank))
    until = time.monotonic() + 20
    while time.monotonic() < until:
        # The last heartbeats end the rows.
        if len(read) == 100 and not any(each.sums for each in sums.values()):
            break
        time.sleep(0.02)
    # It drops what its thread has not sent yet.
    for publisher in publishers:
        publisher.shutdown()

    rows = recording.end()

    for rank in range(2):
        own = [row for row in rows if row["dp_rank"] == rank]
        assert (50, 50 * (3 + rank), 5_000) == tuple(
            sum(row[key] for row in own)
            for key in ("iterations", "decode_requests", "context_tokens")
        )


def test_a_version_without_them_is_reported_and_left_alone(recording, server, monkeypatch, capfd):
    """One line, and the engine is launched as before."""
    recording.start()
    monkeypatch.setattr(sys.modules[__name__], "ServerArgs", object)
    sglang_iterations.begin_launch(server)
    sglang_iterations.end_launch(SimpleNamespace())

    assert {} == server.config.engine_kwargs
    assert 1 == capfd.readouterr().err.count("engine-iterations-missing")


def test_nothing_changes_unless_they_are_requested(recording, server, capfd):
    """The setting is off by default."""
    recording.start(enabled=False)
    sglang_iterations.begin_launch(server)
    sglang_iterations.end_launch(SimpleNamespace())

    assert {} == server.config.engine_kwargs
    assert sglang_iterations._subscriber is None
    assert "engine-iterations" not in capfd.readouterr().err


@pytest.mark.parametrize("options", [{"sglang": None}, {"sglang": {"device": "cpu"}}])
def test_sockets_have_short_paths_wherever_files_go(
    recording, server, options, monkeypatch, tmp_path
):
    """SGLang's schedulers end with an error if they cannot bind theirs."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(sglang_iterations.tempfile, "tempdir", str(folder))
    server.config.engine_kwargs = options
    recording.start()
    sglang_iterations.begin_launch(server)
    endpoint = options["sglang"]["forward_pass_metrics_ipc_name"]

    path = Path(endpoint.removeprefix("ipc://"))
    assert len(f"{path}.128") < 107
    assert path.parent.is_dir()
    assert (options["sglang"].get("device") == "cpu") is (len(options["sglang"]) == 3)
    path.parent.rmdir()
