"""Test helpers: the events that your own tools and reward functions record.

from verl_profiler.testing import recorded_events

def test_my_tool_records_its_lookup():
    with recorded_events() as events:
        my_tool("users")

    assert ["database_lookup"] == [event["event"] for event in events]
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from verl_profiler.recording import api

__all__ = ["recorded_events"]


@contextlib.contextmanager
def recorded_events() -> Generator[list[dict[str, Any]], None, None]:
    """Record into a temporary directory; the list is filled when the block exits.

    Yields:
        The events in order of their end times, as JSON objects.  The profiler's own
        cost events are left out.
    """
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="verl_profiler_") as folder:
        directory = api.start(folder, role="test", rank=0)
        try:
            yield events
        finally:
            api.stop()
            for file in sorted(Path(directory).glob("step_*/*.jsonl")):
                with file.open(encoding="utf-8") as lines:
                    events.extend(json.loads(line) for line in lines)
            events[:] = sorted(
                (event for event in events if event["event"] != "profiler_cost"),
                key=lambda event: event["timestamp"],
            )
