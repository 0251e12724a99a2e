"""What tests of open calls share."""

import time

import pytest

from verl_profiler.recording import open_calls, open_state, recorder


@pytest.fixture
def watcher(recording):
    """One that looks when it is told to; what is open for 50 ms is long."""
    active = recorder.active()
    until = time.monotonic() + 5
    while active.name is None and time.monotonic() < until:
        time.sleep(0.01)
    # Phases of earlier tests, which ran without a watcher.
    open_calls.forget()
    yield open_state._Watcher(active, 0.05)
    open_calls.forget()
