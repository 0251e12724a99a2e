"""What NVTX ranges add to a probed call: off, on without a tool, and on under nsys.

python benchmarks/bench_ranges.py
nsys profile --trace=nvtx --sample=none --cpuctxsw=none -o ranges python benchmarks/bench_ranges.py
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from verl_profiler import start, stop
from verl_profiler.environ import NVTX_LIBRARY
from verl_profiler.instrumentation import nvtx_ranges, wrapping
from verl_profiler.instrumentation.probe import Probe

CALLS = 2_000
ROUNDS = 15
PLAIN = Probe("load", "workers", ("m:f",))
LOOPED = Probe("tool_call", "rollout", ("m:g",))


def plain() -> None:
    """Do nothing."""


async def looped() -> None:
    """Do nothing."""


def microseconds(calls: int, run: object) -> float:
    """Return the time of one call in the quietest of the rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()  # type: ignore[operator]
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return min(times)


def measure() -> tuple[float, float]:
    """Return microseconds per probed plain call and per probed coroutine."""
    call, coroutine = wrapping.wrap(PLAIN, plain), wrapping.wrap(LOOPED, looped)

    def plain_calls() -> None:
        for _ in range(CALLS):
            call()

    async def await_all() -> None:
        for _ in range(CALLS):
            await coroutine()

    return microseconds(CALLS, plain_calls), microseconds(CALLS, lambda: asyncio.run(await_all()))


def main() -> None:
    """Print one line per state."""
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder) / "run")
        off = measure()
        attached = "with a tool" if nvtx_ranges.tool_attached() else "without a tool"
        # Any file stands for the tool's library.
        os.environ.setdefault(NVTX_LIBRARY, __file__)
        nvtx_ranges.switch_on()
        on = measure()
        nvtx_ranges.switch_off()
        stop()
    print(f"ranges off:                plain {off[0]:6.2f} µs, coroutine {off[1]:6.2f} µs")
    print(f"ranges on {attached}: plain {on[0]:6.2f} µs, coroutine {on[1]:6.2f} µs")
    print(
        f"added:                     plain {on[0] - off[0]:6.2f} µs, coroutine {on[1] - off[1]:6.2f} µs"
    )


if __name__ == "__main__":
    main()
