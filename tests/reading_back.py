"""Read event files the plain way, without the reader under test elsewhere."""

import contextlib
import json
import tempfile
from pathlib import Path

from verl_profiler.recording import api


def lines_of(directory, *, own=False, killed=False):
    """Return the events of a run directory in file order, without the profiler's own accounts.

    Where the process was `killed`, the last line of a file may be cut: Linux ends a write of several
    pages between two of them.
    """
    events = []
    for file in sorted(Path(directory).glob("step_*/*.jsonl")):
        lines = file.read_bytes().splitlines(keepends=True)
        if killed and lines and not lines[-1].endswith(b"\n"):
            del lines[-1]
        for line in lines:
            assert line.endswith(b"\n"), f"{file} has an unfinished line"
            events.append(json.loads(line))
    return [event for event in events if own or event["event"] != "profiler_cost"]


def lines_with_files(directory, files="*"):
    """Return the lines of a run directory in file order, each with its `file` and an `extra`."""
    return [
        {**line, "file": path.stem, "extra": line.get("extra") or {}}
        for path in sorted(Path(directory).glob(f"step_*/{files}.jsonl"))
        for line in map(json.loads, path.read_bytes().splitlines())
    ]


def headers_of(directory):
    """Return the process headers by name."""
    return {
        file.stem: json.loads(file.read_bytes())
        for file in sorted((Path(directory) / "processes").glob("*.json"))
    }


@contextlib.contextmanager
def recorded_events():
    """Record in this process; the list is filled when the block ends, in order of the events' ends."""
    events = []
    with tempfile.TemporaryDirectory() as folder:
        directory = api.start(folder, role="test", rank=0)
        try:
            yield events
        finally:
            api.stop()
            events += sorted(lines_of(directory), key=lambda event: event["timestamp"])
