"""What it costs to look for open calls: CPU time of a look, by the requests that run in the process.

    python benchmarks/bench_open.py

Each request is two probed calls, one awaiting the other, as an agent loop and its tool call.  Looks are made
from a thread beside the event loop.  While no request is older than `profiler.stuck.after`, only requests and
phases are looked at; with an old one, all tasks and stacks are, and the file is written.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time

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


def main() -> None:
    """Print the table."""
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
