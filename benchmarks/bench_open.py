"""What it costs to look for open calls: CPU time of a look, by the requests that run in the process.

    python benchmarks/bench_open.py
    python benchmarks/bench_open.py --alternate 40

Each request is two probed calls, one awaiting the other, as an agent loop and its tool call.  Looks are made
from a thread beside the event loop.  While no request is older than `profiler.stuck.after`, only requests and
phases are looked at; with an old one, all tasks and stacks are, and the file is written.

--alternate: one process makes probed calls for two seconds at a time, with and without the watching thread in
turn, in pairs of random order; printed is the CPU time per call with it relative to that without it.  The
thread looks four times per second (`profiler.stuck.after=1`), 60 times as often as by default.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from measuring import alternating, ratio, recording

from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import context, open_state, recorder
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
    spent: list[float] = []

    def per_call(watched: bool) -> float:
        watcher = open_state._Watcher(active, 1.0)
        if watched:
            watcher.start()
        found = asyncio.run(calls_for(2.0, 64))
        if watched and watcher.ident is not None:
            spent.append(time.clock_gettime(time.pthread_getcpuclockid(watcher.ident)) / 2.0)
            watcher.ended = True
            watcher.woken.set()
            watcher.join()
        return found

    asyncio.run(calls_for(1.0, 64))
    print(
        f"{ratio(alternating(per_call, pairs))}; the thread used {statistics.mean(spent):.4%} of a "
        "core at 4 looks per second"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alternate", type=int, metavar="PAIRS")
    arguments = parser.parse_args()
    with recording("agent_loop"):
        time.sleep(1)
        if arguments.alternate:
            alternate(arguments.alternate)
            return
        print("| running requests | CPU time of a look, none old | with old ones |")
        print("| --- | --- | --- |")
        print(f"| 0 | {cpu_ms(_LONG_S):.3f} ms | |")
        for count in (64, 256, 1024):
            young, old = asyncio.run(measure(count))
            print(f"| {count} | {young:.2f} ms | {old:.1f} ms |")


if __name__ == "__main__":
    main()
