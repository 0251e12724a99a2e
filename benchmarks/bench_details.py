"""What sampled details save, and how good the estimates are.

    python benchmarks/bench_details.py [--requests 2000] [--workers 8] [--share 0.02]

A generated run is recorded again: the lines of its agent-loop workers go, event by event and in the order
of their ends, through the recorder that training processes use, in full and with sampled details.  Printed
are bytes and events of these workers, the writer thread's CPU time per event, and how far estimated sums
are from those of the full run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from generate_events import Shape, generate

from verl_profiler.reading.reader import load
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of one process by their ends."""
    lines = [
        json.loads(line)
        for path in sorted(run.glob(f"step_*/{name}.jsonl"))
        for line in path.read_text().splitlines()
    ]
    # Of two events that end together, the one that contains the other ends later.
    return sorted(lines, key=lambda line: (line["timestamp"], line.get("duration_sec", 0)))


def record_again(full: Path, folder: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """Record the agent-loop workers of a run again, into a copy of it.

    Args:
        full: The run.
        folder: The copy, which is made.
        **settings: Of `EventSettings`.

    Returns:
        The recorders' accounts by process, with the number of events `offered` and `writer_cpu_s`.
    """
    shutil.copytree(full, folder)
    accounts: dict[str, dict[str, Any]] = {}
    for header in sorted((full / "processes").glob("worker_*.json")):
        name = header.stem
        (folder / "processes" / header.name).unlink()
        for path in folder.glob(f"step_*/{name}.jsonl"):
            path.unlink()
        config = WorkerConfig(
            str(folder),
            str(folder),
            EventSettings(**settings),
            flush_interval_s=60,
            max_pending=5_000_000,
        )
        identity = Identity("agent_loop", int(name.rpartition("_")[2]))
        recorder = Recorder(config, lambda identity=identity: identity)
        offset = recorder.anchor.wall_ns - recorder.anchor.monotonic_ns
        offered = 0
        for line in lines_of(full, name):
            if line["event"] == "profiler_cost":
                continue
            moment = datetime.fromisoformat(line["timestamp"])
            end_ns = (moment - EPOCH) // timedelta(microseconds=1) * 1000 - offset
            length = line.get("duration_sec")
            begin_ns = None if length is None else end_ns - round(length * 1e6) * 1000
            recorder.append((line["event"], begin_ns, end_ns, line.get("extra"), line["step"]))
            offered += 1
        recorder.close("exit")
        made = folder / "processes" / f"{name}.json"
        told = json.loads(made.read_text())
        accounts[name] = {
            **recorder.account(),
            "offered": offered,
            "writer_cpu_s": told["counters"]["writer_cpu_s"],
        }
        # The generated clocks are not of this boot; their lines are on one axis as they are.
        generated = json.loads(header.read_text())
        told |= {key: generated[key] for key in ("clock", "started") if key in generated}
        made.write_text(json.dumps(told))
    return accounts


_SUMS = {
    "turns": "SELECT sum(sampled) AS n FROM turns",
    "engine calls": "SELECT sum(sampled) AS n FROM engine_calls",
    "engine time": "SELECT sum(sampled * duration_us) AS n FROM engine_calls",
    "tool calls": "SELECT sum(sampled) AS n FROM tool_calls",
    "tool time": "SELECT sum(sampled * duration_us) AS n FROM tool_calls",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000, help="per step")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.02)
    chosen = parser.parse_args()
    shape = Shape(steps=chosen.steps, workers=chosen.workers, requests=chosen.requests)
    with tempfile.TemporaryDirectory() as folder:
        full, again, part = (Path(folder) / name for name in ("generated", "full", "sampled"))
        generate(full, shape)
        accounts = {
            "full": record_again(full, again),
            "sampled": record_again(full, part, detail_share=chosen.share),
        }
        print("agent-loop workers      events      bytes  writer CPU per offered event")
        for name, own in accounts.items():
            events, size, offered = (
                sum(each[key] for each in own.values()) for key in ("events", "bytes", "offered")
            )
            cpu_us = sum(each["writer_cpu_s"] for each in own.values()) / offered * 1e6
            print(f"{name:<18}{events:>12,}{size:>11,}  {cpu_us:.2f} us")
        with load(again, cache=False) as truth, load(part, cache=False) as sampled:
            (row,) = sampled.rows(
                "SELECT count(*) AS requests, count_if(detailed) AS detailed FROM requests"
            )
            print(f"details of {row['detailed']:,} of {row['requests']:,} requests")
            for name, query in _SUMS.items():
                exact, estimate = (run.rows(query)[0]["n"] for run in (truth, sampled))
                print(f"{name:<18}{100 * (estimate / exact - 1):+.1f} %")


if __name__ == "__main__":
    main()
