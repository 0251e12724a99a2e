"""Read event files the plain way, without the reader under test elsewhere."""

import json
from pathlib import Path


def lines_of(directory, *, own=False):
    """Return the events of a run directory in file order, without the profiler's own accounts."""
    events = []
    for file in sorted(Path(directory).glob("step_*/*.jsonl")):
        for line in file.read_bytes().splitlines(keepends=True):
            assert line.endswith(b"\n"), f"{file} has an unfinished line"
            events.append(json.loads(line))
    return [event for event in events if own or event["event"] != "profiler_cost"]


def headers_of(directory):
    """Return the process headers by name."""
    return {
        file.stem: json.loads(file.read_bytes())
        for file in sorted((Path(directory) / "processes").glob("*.json"))
    }
