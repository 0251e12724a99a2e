"""Write the files of a run as the recorder does: lines, event files and what lies beside them."""

import json
from datetime import datetime, timedelta, timezone

LAUNCHED = datetime(2026, 11, 21, 2, 33, 20, tzinfo=timezone.utc)


def line(number=0, event="engine_call", **more):
    """Return a line that ended so many microseconds after 02:33:22; a field that is None is left out."""
    content = {
        "timestamp": f"2026-11-21T02:33:22.{number:06d}+00:00",
        "event": event,
        "duration_sec": 0.25,
        "extra": {"request_id": "r1", "turn": 0},
        "workid": 0,
        "step": 1,
        **more,
    }
    # As the recorder writes them: without spaces.
    kept = {key: value for key, value in content.items() if value is not None}
    return json.dumps(kept, separators=(",", ":"))


def write_run(folder, lines, name="worker_0", step=1, *, end="\n", header=None):
    """Write one event file, and what a healthy run has beside it; return its path."""
    path = folder / f"step_{step}" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((end.join(lines) + end).encode())
    if not (folder / "run.json").exists():
        launch = {"format": 1, "launched": folder.name, "host": "n", "pid": 1}
        (folder / "run.json").write_text(json.dumps(launch))
    if header is not False:
        write_header(folder, name, **(header or {}))
    return path


def write_header(folder, name, **changes):
    """Write the header of a process that ended and lost nothing."""
    (folder / "processes").mkdir(exist_ok=True)
    content = {
        "format": 1,
        "name": name,
        "role": "agent_loop" if name.startswith("worker") else name.split("_")[0],
        "rank": 0,
        "host": "n",
        "pid": 7,
        "clock": {},
        "probes": {"installed": {}, "missed": {}, "errors": {}},
        "counters": {"events": 0, "dropped": 0, "write_errors": 0},
        "ended": "2026-11-21T02:40:00+00:00",
        "updated": "2026-11-21T02:40:00+00:00",
    }
    (folder / "processes" / f"{name}.json").write_text(json.dumps({**content, **changes}))


def ended(event, end_s, length_s=None, *, step=1, rank=0, **extra):
    """Return an event that ended so many seconds after the launch."""
    moment = (LAUNCHED + timedelta(seconds=end_s)).isoformat(timespec="microseconds")
    made = {"timestamp": moment, "event": event, "extra": extra, "workid": rank, "step": step}
    return made if length_s is None else {**made, "duration_sec": round(length_s, 6)}


def phases(step, gen_s, step_s, *, begin_s=0.0):
    """Return the trainer's events of a step that generates first and trains for the rest of it."""
    end_s = begin_s + step_s
    return [
        ended("gen", begin_s + gen_s, gen_s, step=step),
        ended("update_actor", end_s, step_s - gen_s, step=step),
        ended("step", end_s, step_s, step=step),
    ]


def write_lines(folder, **lines):
    """Append the lines of each process to its files, one for each step; return the folder."""
    for name, each in lines.items():
        for step in {line["step"] for line in each}:
            path = folder / f"step_{step}" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in each if line["step"] == step)
    return folder
