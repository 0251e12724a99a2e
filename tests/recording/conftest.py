"""What tests of open calls share."""

import pytest
from recording.children import until

from verl_profiler.recording import open_calls, open_state, recorder


@pytest.fixture
def watcher(recording):
    """One that looks when it is told to; what is open for 50 ms is long."""
    active = recorder.active()
    until(lambda: active.name is not None)
    # Phases of earlier tests, which ran without a watcher.
    open_calls.forget()
    yield open_state._Watcher(active, 0.05)
    open_calls.forget()
