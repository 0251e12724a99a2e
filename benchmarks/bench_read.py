"""Measure opening a run and writing its report against a plain Python `json` loop over the same files.

    python benchmarks/bench_read.py                      1e6 events, then 1e7
    python benchmarks/bench_read.py --events 1e6
    python benchmarks/bench_read.py --parquet --events 1e8

Each measurement is a process of its own.  The loop is what the original logger's scripts do: parse
every line, keep durations by step and event, and the slowest requests.  It makes one table; the
report makes some thirty, and the timelines.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generate_events import generate, shape_for
from generate_shards import multiply

BARS = {1_000_000: (5, None), 10_000_000: (30, 2.0), 100_000_000: (120, 3.0)}


def report_first(folder: Path) -> None:
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    report(folder)


def report(folder: Path) -> None:
    from verl_profiler.cli.report import write_report

    write_report(folder, folder / "report.html", force=True)


def json_loop(folder: Path) -> None:
    durations: dict[tuple[int, str], list[float]] = {}
    requests = []
    for path in sorted(folder.glob("step_*/*.jsonl")):
        with path.open() as file:
            for line in file:
                event = json.loads(line)
                if "duration_sec" in event:
                    key = (event["step"], event["event"])
                    durations.setdefault(key, []).append(event["duration_sec"])
                if event["event"] == "request":
                    requests.append((event["duration_sec"], event["extra"]["request_id"]))
    for values in durations.values():
        values.sort()
    requests.sort(reverse=True)


WAYS = {"first": report_first, "again": report, "loop": json_loop}


def measure(way: str, folder: Path) -> tuple[float, float, float]:
    """Run one way in a process of its own; return wall seconds, CPU seconds and GB."""
    command = [sys.executable, __file__, "--way", way, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, cpu, memory = map(float, done.stdout.split())
    return wall, cpu, memory


def compare(events: int, folder: Path, *, parquet: bool) -> bool:
    if parquet:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            base = Path(scratch) / folder.name
            generate(base, shape_for(1_000_000))
            total = multiply(base, folder, events)
    else:
        total = generate(folder, shape_for(events))["total"]
    print(f"{total:,} events")
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"  {written / 1e9:.2f} GB in files")
    ways = ("first", "again") if parquet else ("first", "again", "loop")
    results = {way: measure(way, folder) for way in ways}
    names = {
        "first": "report, no cache yet",
        "again": "report, from the cache",
        "loop": "Python json loop",
    }
    for way, (wall, cpu, memory) in results.items():
        line = f"  {names[way]:<32}{wall:8.1f} s  {cpu:8.1f} s CPU  {memory:6.2f} GB"
        if "loop" in results and way != "loop":
            line += f"   {results['loop'][0] / wall:5.1f} times as fast as the loop"
        print(line)
    limit_s, limit_gb = BARS.get(events, (None, None))
    wall, _, memory = results[ways[0]]
    met = (limit_s is None or wall < limit_s) and (limit_gb is None or memory < limit_gb)
    if limit_s is not None:
        memory_bar = "" if limit_gb is None else f", {limit_gb:g} GB"
        print(f"  bar: {limit_s} s{memory_bar}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=float, action="append", help="how many; may be repeated")
    parser.add_argument("--parquet", action="store_true", help="events that were converted before")
    parser.add_argument("--scratch", type=Path, help="where the runs are made and removed")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        begin = time.perf_counter()
        WAYS[arguments.way](arguments.folder)
        wall = time.perf_counter() - begin
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)
        return 0
    met = True
    for events in arguments.events or [1e6, 1e7]:
        with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="bench_read-") as scratch:
            met &= compare(int(events), Path(scratch) / "run", parquet=arguments.parquet)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
