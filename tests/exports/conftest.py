"""A log with traced calls, read: two processes, two functions, one id that both handled."""

import pytest
from tq_lines import Writer, log_of

from verl_profiler.reading.formats.tq_log import read_logs

PARTS = [("get", 0.05), ("compute", 0.8), ("put", 0.06)]
SHARED_ID = "5f0c6a51-3f3e-5b7c-9a64-0b8f3d2c1e4f"


@pytest.fixture
def training_log(tmp_path):
    """The path of the log."""
    rollout, actor = Writer("AgentLoopWorker pid=7"), Writer("WorkerDict pid=8", sampled=2)
    rollout.call(0.0, PARTS, func="generate", trace_id=SHARED_ID, mb=15.2, step=1)
    rollout.call(0.5, PARTS, func="generate", mb=15.2, step=1, status="error")
    actor.call(2.0, PARTS[:2], func="update", trace_id=f"{SHARED_ID},other,+3", mb=30.0, step=2)
    path = tmp_path / "training.log"
    path.write_text(log_of(rollout, actor))
    return path


@pytest.fixture
def log_tables(training_log):
    """Its tables."""
    return read_logs([training_log]).tables()


@pytest.fixture
def receiver():
    """A receiver of OpenTelemetry spans that is stopped when the test ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from exports.otlp_receiver import Receiver

    started = Receiver()
    yield started
    started.stop()
