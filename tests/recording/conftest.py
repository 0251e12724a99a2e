"""What tests of open calls, and of what is in the queue, share."""

import msgspec
import pytest
from recording.children import until

from verl_profiler.recording import open_calls, open_state, recorder
from verl_profiler.recording.identity import Identity


@pytest.fixture
def watcher(recording):
    """One that looks when it is told to; what is open for 50 ms is long."""
    active = recorder.active()
    until(lambda: active.name is not None)
    # Phases of earlier tests, which ran without a watcher.
    open_calls.forget()
    yield open_state._Watcher(active, 0.05)
    open_calls.forget()


@pytest.fixture
def queued(worker_config):
    """A recorder whose events stay in its queue."""
    config = msgspec.structs.replace(worker_config, flush_interval_s=60)
    yield recorder.start(config, lambda: Identity("actor", 0))
    recorder.stop()
