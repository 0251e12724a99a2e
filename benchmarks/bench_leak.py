"""Whether memory stays flat over a million requests, each of which drops its generator.

    python benchmarks/bench_leak.py [--requests N] [--bare]

verl takes the first item of SGLang's `generate_request` and lets the generator go, so each request ends
in GeneratorExit, in a task of the event loop.  The plugin is active as in a worker, with its probes on
stand-ins of verl's server and SGLang's tokenizer manager, which have their names.  A request carries
4,000 prompt tokens, an answer 1,000; `--bare` does the same without the plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import sys
import tempfile
import time
import types
import weakref
from pathlib import Path

from verl_profiler.environ import SETTINGS
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"
MANAGER = "sglang.srt.managers.tokenizer_manager"
AT_ONCE = 64
PARTS = 10


class Request:
    """In the place of SGLang's `GenerateReqInput`."""

    def __init__(self, prompt_ids):
        self.input_ids = prompt_ids


class TokenizerManager:
    """In the place of SGLang's."""

    async def generate_request(self, obj, request=None):
        await asyncio.sleep(0)
        async for response in self._wait_one_response(obj.input_ids[:1000]):
            yield response

    async def release_memory_occupation(self, obj, request=None):
        """Nothing to release."""

    async def resume_memory_occupation(self, obj, request=None):
        """Nothing to take back."""

    async def _wait_one_response(self, ids):
        await asyncio.sleep(0)
        yield {"output_ids": ids, "meta_info": {"cached_tokens": 7, "e2e_latency": 0.5}}


class SGLangHttpServer:
    """In the place of verl's."""

    def __init__(self):
        self.tokenizer_manager = TokenizerManager()
        self.alive = weakref.WeakSet()

    async def generate(self, prompt_ids, request_id):
        request = Request(prompt_ids)
        self.alive.add(request)
        answer = await self.tokenizer_manager.generate_request(request, None).__anext__()
        return answer["output_ids"]

    async def set_global_steps(self, global_steps):
        """No weights."""


def resident_mb():
    """Return the memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def activate(folder):
    """Load the plugin as Ray does in a worker."""
    for name, kind in ((SERVER, SGLangHttpServer), (MANAGER, TokenizerManager)):
        module = types.ModuleType(name)
        setattr(module, kind.__name__, kind)
        sys.modules[name] = module
    worker_config = WorkerConfig(folder, folder, EventSettings(), take_anchor())
    os.environ[SETTINGS] = worker_config.encode()
    from verl_profiler import plugin
    from verl_profiler.instrumentation.status import status

    plugin.activate()
    placed = sum(map(len, status.installed.values()))
    if not placed:
        sys.exit("no probe was placed; the targets have changed")
    return placed


async def serve(requests, server):
    """Make the requests; return (requests, MB, objects alive) ten times."""
    readings = []
    done = 0
    while done < requests:
        for _ in range(0, requests // PARTS, AT_ONCE):
            await asyncio.gather(
                *(server.generate([number] * 4000, f"{done}-{number}") for number in range(AT_ONCE))
            )
            done += AT_ONCE
        await asyncio.sleep(0.2)
        readings.append((done, resident_mb(), len(server.alive)))
        print(f"{done:>10,} requests {readings[-1][1]:>8.1f} MB {readings[-1][2]:>8,} alive")
    return readings


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--bare", action="store_true", help="without the plugin")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench_leak_")
    try:
        placed = 0 if args.bare else activate(folder)
        begin = time.monotonic()
        readings = asyncio.run(serve(args.requests, SGLangHttpServer()))
        seconds = time.monotonic() - begin
        events = 0
        if placed:
            from verl_profiler.recording import recorder

            active = recorder.active()
            recorder.stop()
            lines = sum(
                file.read_bytes().count(b'"engine_request"')
                for file in Path(folder).glob("step_*/*.jsonl")
            )
            events = lines if active is not None else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    first, last = readings[0], readings[-1]
    print(f"{placed} probes, {events:,} engine_request events, {seconds:.0f} s")
    print(f"end over begin: {last[1] / first[1]:.3f} ({first[1]:.1f} MB to {last[1]:.1f} MB)")


if __name__ == "__main__":
    main()
