"""What profiling costs an agent-loop worker that has a core to itself.

    python benchmarks/bench_worker.py [--steps 5]

A profiled rehearsal with the stand-in engine and one agent-loop worker, which has the last core to
itself; everything else shares the others.  Printed is the worker's own account, of all steps but
the first, for the work of `bench_run.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path

import psutil
from bench_run import run

WORKER = "ray::AgentLoopWorker"
SPENT = ("wrapper_s", "wrapper_cpu_s", "writer_s", "writer_cpu_s")


def keep_apart(ended, cores):
    """Give the last core to the worker, and the others to all other descendants of this process."""
    while not ended.wait(2):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_worker = " ".join(process.cmdline()).startswith(WORKER)
                for thread in process.threads():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(thread.id, cores[-1:] if is_worker else cores[:-1])


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("at least two cores are needed")
    ended = threading.Event()
    threading.Thread(target=keep_apart, args=(ended, cores), daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix="bench_worker_"))
    overrides = ["actor_rollout_ref.rollout.agent.num_workers=1", *args.overrides]
    rows = run(args.steps, list(range(1, args.steps + 1)), folder, overrides)
    ended.set()
    total_s = rows[-1]["time_s"] - rows[0]["time_s"]
    first, last = (
        next(each for each in row["processes"].values() if each["role"] == "agent_loop")
        for row in (rows[0], rows[-1])
    )
    events = last["events"] - first["events"]
    steps = len(rows) - 1
    print(f"{steps} steps of {total_s / steps:.1f} s, {events / total_s:.0f} events/s")
    for name in SPENT:
        spent_s = last[name] - first[name]
        print(f"  {name:14} {spent_s / events * 1e6:6.1f} µs per event, {spent_s / total_s:.3%}")


if __name__ == "__main__":
    main()
