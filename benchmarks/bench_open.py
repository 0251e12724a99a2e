"""What it costs to look for open calls: CPU time of a look, by the requests that run in the process.

    python benchmarks/bench_open.py
    python benchmarks/bench_open.py --alternate 40
    python benchmarks/bench_open.py --run logs/my-run

Each request is two probed calls, one awaiting the other, as an agent loop and its tool call.  Looks are made
from a thread beside the event loop.  While no request is older than `profiler.stuck.after`, only requests and
phases are looked at; with an old one, all tasks and stacks are, and the file is written.

--alternate: one process makes probed calls for two seconds at a time, with and without the watching thread in
turn, in pairs of random order; printed is the CPU time per call with it relative to that without it.  The
thread looks four times per second (`profiler.stuck.after=1`), 60 times as often as by default.
--run: what looks took in each process of a recorded run, from its headers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import api, context, open_state, recorder
from verl_profiler.recording.requests import begin_request

_LOOKS = 30
_LONG_S, _SHORT_S = 3600.0, 0.01


def cpu_ms(after_s: float) -> float:
    """Return the median CPU time of a look in milliseconds."""
    active = recorder.active()
    assert active is not None
    watcher = open_state._Watcher(active, after_s)
    spent: list[float] = []
    for _ in range(_LOOKS):
        # Each one writes the file, if there is something to write.
        watcher.written = None
        begin = time.thread_time_ns()
        watcher.look()
        spent.append((time.thread_time_ns() - begin) / 1e6)
    watcher.remove()
    return statistics.median(spent)


async def measure(count: int) -> tuple[float, float]:
    """Return the CPU time of a look with so many running requests: all young, and all old."""
    over = asyncio.Event()

    async def tool() -> None:
        await over.wait()

    tool_call = wrapping.wrap(Probe("tool_call", "rollout", ("x:y",)), tool)

    async def conversation() -> None:
        await tool_call()

    agent_loop = wrapping.wrap(Probe("agent_loop", "rollout", ("x:y",)), conversation)
    requests = [context.Request(1) for _ in range(count)]
    for request in requests:
        begin_request(request)
    tasks = [asyncio.create_task(agent_loop()) for _ in requests]
    await asyncio.sleep(0.1)
    found = await asyncio.to_thread(cpu_ms, _LONG_S), await asyncio.to_thread(cpu_ms, _SHORT_S)
    over.set()
    await asyncio.gather(*tasks)
    return found


async def calls_for(seconds: float, count: int) -> float:
    """Return the CPU time of the process per probed call in microseconds."""

    async def tool() -> None:
        await asyncio.sleep(0)

    tool_call = wrapping.wrap(Probe("tool_call", "rollout", ("x:y",)), tool)
    made, until = 0, time.monotonic() + seconds

    async def conversation() -> None:
        nonlocal made
        while time.monotonic() < until:
            await tool_call()
            made += 1

    begin = time.process_time_ns()
    await asyncio.gather(*(conversation() for _ in range(count)))
    return (time.process_time_ns() - begin) / 1e3 / made


def alternate(pairs: int) -> None:
    """Print the CPU time per call with the watching thread relative to that without it."""
    active = recorder.active()
    assert active is not None
    ratios: list[float] = []
    spent: list[float] = []
    asyncio.run(calls_for(1.0, 64))
    for _ in range(pairs):
        per_call: dict[bool, float] = {}
        for watched in random.sample((False, True), 2):
            watcher = open_state._Watcher(active, 1.0)
            if watched:
                watcher.start()
            per_call[watched] = asyncio.run(calls_for(2.0, 64))
            if watched:
                watcher.ended = True
                watcher.woken.set()
                watcher.join()
                spent.append(watcher.cpu_ns / 1e9 / 2.0)
        ratios.append(per_call[True] / per_call[False])
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    print(
        f"with / without: median {statistics.median(ratios):.4f}, 95 % bootstrap interval "
        f"{medians[50]:.4f} to {medians[1950]:.4f}, {pairs} pairs; the thread used "
        f"{statistics.mean(spent):.4%} of a core at 4 looks per second"
    )


def print_run(run: Path) -> None:
    """Print the share of a core that looks took in each process of a run."""
    print("| process | looks | CPU time | of a core |")
    print("| --- | --- | --- | --- |")
    for path in sorted(run.glob("processes/*.json")):
        header = json.loads(path.read_text())
        looks = header.get("looks")
        if looks:
            begin, end = (datetime.fromisoformat(header[key]) for key in ("started", "updated"))
            share = looks["cpu_s"] / (end - begin).total_seconds()
            print(
                f"| {path.stem} | {looks['count']} | {looks['cpu_s'] * 1e3:.1f} ms | {share:.4%} |"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alternate", type=int, metavar="PAIRS")
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.run is not None:
        print_run(arguments.run)
        return
    if arguments.alternate:
        with tempfile.TemporaryDirectory() as folder:
            api.start(folder, role="agent_loop", rank=0)
            time.sleep(1)
            alternate(arguments.alternate)
            api.stop()
        return
    with tempfile.TemporaryDirectory() as folder:
        api.start(folder, role="agent_loop", rank=0)
        time.sleep(1)
        print("| running requests | CPU time of a look, none old | with old ones |")
        print("| --- | --- | --- |")
        print(f"| 0 | {cpu_ms(_LONG_S):.3f} ms | |")
        for count in (64, 256, 1024):
            young, old = asyncio.run(measure(count))
            print(f"| {count} | {young:.2f} ms | {old:.1f} ms |")
        api.stop()


if __name__ == "__main__":
    main()
