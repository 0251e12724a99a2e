"""What tests of engines share."""

import pytest

from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import WorkerConfig


@pytest.fixture
def record_engine(tmp_path):
    """Return a function that starts a recorder as `engine_0`, with settings and captured steps."""

    def start(events, captured_steps):
        config = WorkerConfig(
            str(tmp_path),
            str(tmp_path),
            events,
            take_anchor(),
            captured_steps=captured_steps,
            flush_interval_s=0.01,
        )
        recorder.start(config, lambda: Identity("engine", 0), dict)

    return start
