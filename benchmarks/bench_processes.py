"""Measure what many recording processes cost: start, memory, CPU, and operations on a shared disk.

    python benchmarks/bench_processes.py                           256 processes, 45 s
    python benchmarks/bench_processes.py --processes 512 --seconds 60
    python benchmarks/bench_processes.py --rate 200                events per second and process
    python benchmarks/bench_processes.py --stall-s 5               the disk stands still at the end

Each is a Python process of its own with the real recorder and nothing else: no torch, no Ray.  It
records at a steady rate, in steps of `--step-s` seconds, and ends regularly.  One process runs under
strace; its operations on paths in the run directory are those that a metadata server would get.  At
the end the run is read: every event that was offered has to be there, or counted as dropped.  With
`--stall-s` the run is on a disk (bindfs, root) that stands still when all processes end: what is then
neither there nor counted is that of processes that the reader calls killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median
from typing import Any

_EXTRAPOLATED = 1_024
# Claiming a name and making the first files; closing them and ending the header.
_START_S = 3.0
_END_S = 1.0


def child(scratch: Path, number: int, seconds: float, rate: float, step_s: float) -> None:
    """Record; print what it cost."""
    before, cpu = time.perf_counter(), time.process_time()
    import msgspec

    from verl_profiler.recording import clock, recorder
    from verl_profiler.recording.identity import Identity
    from verl_profiler.recording.worker_config import WorkerConfig

    config = msgspec.json.decode((scratch / "config.json").read_bytes(), type=WorkerConfig)
    recorder.start(config, lambda: Identity("agent_loop", number))
    start_s, start_cpu_s = time.perf_counter() - before, time.process_time() - cpu
    Path(scratch / "ready" / str(number)).touch()
    while not (scratch / "go").exists():
        time.sleep(0.2)
    cpu = time.process_time()
    begin, offered = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        step = 1 + int(elapsed / step_s)
        while offered < rate * elapsed:
            end_ns = clock.now()
            extra = {"item": f"{number:08x}{offered:024x}", "part": offered % 8}
            recorder.record("own_work", end_ns - 1_000_000, end_ns, extra, step)
            offered += 1
        time.sleep(0.25)
    recorder.stop("stopped")
    status = Path("/proc/self/smaps_rollup").read_text()
    private = sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+)", status, re.MULTILINE))
    result = {
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "cpu_s": time.process_time() - cpu,
        "rss_kb": int(re.findall(r"^Rss:\s+(\d+)", status, re.MULTILINE)[0]),
        "private_kb": private,
        "offered": offered,
    }
    (scratch / "results" / f"{number}.json").write_text(json.dumps(result))


def prepare(scratch: Path) -> Path:
    """Make the run directory as a driver does; return it."""
    import msgspec

    from verl_profiler.recording import run_directory
    from verl_profiler.recording.clock import take_anchor
    from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

    anchor, events = take_anchor(), EventSettings(devices=False)
    made = run_directory.make(str(scratch / "disk" / "run"), anchor, events, {})
    config = WorkerConfig(str(made), str(made), events, anchor)
    (scratch / "config.json").write_bytes(msgspec.json.encode(config))
    for name in ("ready", "results"):
        (scratch / name).mkdir()
    return made


def operations(trace: Path, folder: Path) -> tuple[Counter[str], Counter[str], float]:
    """Count system calls on paths in the run by name.

    Returns:
        Those of the first and the last seconds, those between, and how many seconds these took.
    """
    calls: list[tuple[float, str]] = []
    for line in trace.read_text(errors="replace").splitlines():
        match = re.match(r"(?:\d+ +)?(\d+\.\d+) (\w+)\(", line)
        if match and str(folder) in line:
            calls.append((float(match[1]), match[2]))
    first_s, last_s = calls[0][0] + _START_S, calls[-1][0] - _END_S
    edges = Counter(name for at_s, name in calls if not first_s <= at_s <= last_s)
    between = Counter(name for at_s, name in calls if first_s <= at_s <= last_s)
    return edges, between, last_s - first_s


def main() -> int:
    """Start, wait, and print a table; return 1 when events are missing without being counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--rate", type=float, default=20, help="events per second and process")
    parser.add_argument("--step-s", type=float, default=15)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stall-s", type=float, default=0, help="the disk stands still at the end")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Installed packages have their bytecode; sources would be compiled in each process.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.child is not None:
        child(args.scratch, args.child, args.seconds, args.rate, args.step_s)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench_processes-") as name:
        scratch = Path(name)
        with disk(scratch, own=bool(args.stall_s)) as process:
            folder = prepare(scratch)
            results = run(args, scratch, folder, process)
            return report(args, scratch, folder, results)


@contextlib.contextmanager
def disk(scratch: Path, *, own: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    """Make a folder for the run, if need be on a disk whose process is given."""
    mounted, real = scratch / "disk", scratch / "real"
    mounted.mkdir()
    if not own:
        yield None
        return
    real.mkdir()
    with subprocess.Popen(["bindfs", "-f", "--multithreaded", str(real), str(mounted)]) as process:
        try:
            while not os.path.ismount(mounted):
                time.sleep(0.02)
            yield process
        finally:
            subprocess.run(["umount", "-l", str(mounted)], check=False)
            process.terminate()


def run(
    args: argparse.Namespace, scratch: Path, folder: Path, disk: subprocess.Popen[bytes] | None
) -> dict[str, Any]:
    """Start all processes and wait for them; return how long that took."""
    command = [sys.executable, __file__, "--scratch", str(scratch)]
    command += ["--seconds", str(args.seconds), "--rate", str(args.rate)]
    command += ["--step-s", str(args.step_s)]
    begin = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(args.processes):
            own = [*command, "--child", str(number)]
            if number == 0 and shutil.which("strace"):
                own = [
                    "strace",
                    "-f",
                    "-e",
                    "trace=%file",
                    "-ttt",
                    "-o",
                    str(scratch / "strace"),
                    *own,
                ]
            running.append(subprocess.Popen(own, stdout=subprocess.DEVNULL))
            # Two cores start a few at a time.
            while number - len(os.listdir(scratch / "ready")) > 8:
                time.sleep(0.02)
        while len(os.listdir(scratch / "ready")) < args.processes:
            time.sleep(0.1)
        started_s = time.perf_counter() - begin
        (scratch / "go").touch()
        if disk is not None:
            # Just before all of them end.
            time.sleep(args.seconds - 0.2)
            disk.send_signal(signal.SIGSTOP)
            time.sleep(args.stall_s)
            disk.send_signal(signal.SIGCONT)
        files: list[int] = []
        while any(each.poll() is None for each in running):
            time.sleep(1)
            files.append(sum(len(names) for _, _, names in os.walk(folder)))
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
    return {"started_s": started_s, "files": files[-1] if files else 0}


def report(args: argparse.Namespace, scratch: Path, folder: Path, results: dict[str, Any]) -> int:
    """Print the table; return 1 when events are missing."""
    from verl_profiler.reading.losses import end_problems
    from verl_profiler.reading.reader import load

    rows = [json.loads(path.read_text()) for path in (scratch / "results").iterdir()]
    offered = sum(row["offered"] for row in rows)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    begin = time.perf_counter()
    with load(folder, cache=False) as run:
        read = run.rows("SELECT count(*) AS n FROM event_fields WHERE event = 'own_work'")[0]["n"]
        dropped = run.rows("SELECT sum(dropped)::BIGINT AS n FROM processes")[0]["n"] or 0
        killed = run.rows(
            "SELECT count(*) FILTER (ended IS NULL) AS n, count(*) AS all FROM processes"
        )[0]
        # As a reader sees it once the run is silent for a minute.
        later = datetime.now(timezone.utc) + timedelta(minutes=2)
        problems = [*run.problems, *end_problems(run.tables, run.arrived, later)]
    read_s = time.perf_counter() - begin
    steps = max(1, round(args.seconds / args.step_s))
    load_1 = os.getloadavg()[0]
    print(f"{len(rows)} processes, {args.rate:g} events/s each, {args.seconds:g} s, {steps} steps;")
    print(f"load {load_1:.1f} on {os.cpu_count()} cores")
    print(f"  all started after            {results['started_s']:10.1f} s")
    for name, key, factor, unit in (
        ("import and start, CPU, median", "start_cpu_s", 1e3, "ms"),
        ("resident, median", "rss_kb", 1e-3, "MB"),
        ("private, median", "private_kb", 1e-3, "MB"),
    ):
        print(f"  {name:<29}{median(row[key] for row in rows) * factor:10.1f} {unit}")
    # Less what the generator of events takes: it wakes up four times a second.
    share = sum(row["cpu_s"] for row in rows) / args.seconds / len(rows)
    print(f"  CPU per process, with its host{share * 100:9.2f} %")
    print(f"  files                        {results['files']:10,}")
    print(
        f"  bytes                        {size / 1e6:10.1f} MB, {size / max(1, offered):.0f} per event"
    )
    print(f"  reading them                 {read_s:10.1f} s")
    trace = scratch / "strace"
    if trace.exists():
        edges, between, lasted_s = operations(trace, folder)
        per_minute = sum(between.values()) / lasted_s * 60
        print(f"  operations on paths, start and end {sum(edges.values()):4,} per process")
        print(f"  and between                  {per_minute:10.1f} per process and minute")
        for kind, counts in (("start and end", edges), ("between", between)):
            print(f"      {kind}: {', '.join(f'{n} {name}' for name, n in counts.most_common(8))}")
        per_second = per_minute / 60 * _EXTRAPOLATED
        print(f"  {_EXTRAPOLATED} processes               {per_second:10.1f} per second between")
    print(f"  events offered               {offered:10,}")
    print(f"  read, and counted as dropped {read:10,} and {dropped:,}")
    print(f"  headers, of these without an end {killed['all']:6,} and {killed['n']:,}")
    for problem in problems[:5]:
        print(f"  problem: {problem}")
    if args.stall_s:
        return int(read + dropped < offered and not problems)
    return int(read + dropped != offered or len(rows) != args.processes)


if __name__ == "__main__":
    sys.exit(main())
