"""What tests of engines share."""

import functools

import msgspec
import pytest
from reading_back import lines_of

from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings


class EngineRecording:
    """Records as `engine_0`; the events of this name have a setting that switches them on."""

    def __init__(self, worker_config, event):
        self.config = worker_config
        self.event = event

    def start(self, *, enabled=True, captured_steps=()):
        events = EventSettings(**{self.event: enabled})
        config = msgspec.structs.replace(self.config, events=events, captured_steps=captured_steps)
        recorder.start(config, lambda: Identity("engine", 0), dict)

    def end(self):
        """Stop; return the fields of the events."""
        recorder.stop()
        lines = lines_of(self.config.directory)
        return [line["extra"] for line in lines if line["event"] == self.event]


@pytest.fixture
def engine_recording(worker_config):
    """Return a function that makes the recording of some events, which ends with the test."""
    yield functools.partial(EngineRecording, worker_config)
    recorder.stop()
