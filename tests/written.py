"""Event files that a test writes by hand."""

import json
from datetime import datetime, timedelta, timezone

LAUNCHED = datetime(2026, 11, 21, 2, 33, 20, tzinfo=timezone.utc)


def line(event, end_s, length_s=None, *, step=1, rank=0, **extra):
    """Return an event that ended so many seconds after the launch."""
    moment = (LAUNCHED + timedelta(seconds=end_s)).isoformat(timespec="microseconds")
    made = {"timestamp": moment, "event": event, "extra": extra, "workid": rank, "step": step}
    return made if length_s is None else {**made, "duration_sec": round(length_s, 6)}


def write(folder, **lines):
    """Append the lines of each process to its files, one for each step; return the folder."""
    for name, each in lines.items():
        for step in {line["step"] for line in each}:
            path = folder / f"step_{step}" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in each if line["step"] == step)
    return folder
