"""What profiler.events.engine_timing costs: CPU per request of the real SGLang with and without it; on a CPU.

    python benchmarks/bench_engine_timing.py [--requests 16] [--tokens 400] [--pairs 20] [--control]

Two engines run side by side, one with `enable_metrics`, and serve the same requests in turns, in random
order.  The CPU time is that of all threads of an engine's processes: server, scheduler, detokenizer.
A tiny model with random weights.  With --control both engines run without it: the interval has to contain 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench_engine_state import SGLANG_ON_CPU, make_model, start_for_sglang, threads_s
from measuring import alternating, ratio


def _serve(pipe: Any, model: str, requests: int, tokens: int, enable_metrics: bool) -> None:
    """Serve a batch of requests for each True, and answer with its CPU time and the times that came."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        max_total_tokens=50_000,
        enable_metrics=enable_metrics,
        random_seed=0,
        **SGLANG_ON_CPU,
    )

    async def batch(number: int) -> list[dict[str, Any]]:
        calls = (
            engine.async_generate(
                input_ids=[1 + (number + each) % 300, *range(1, 128)],
                sampling_params={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0},
            )
            for each in range(requests)
        )
        return [answer["meta_info"] for answer in await asyncio.gather(*calls)]

    loop = asyncio.get_event_loop()
    # Both engines serve the same batches.
    for number in itertools.count():
        if not pipe.recv():
            break
        before = threads_s(os.getpid())
        answers = loop.run_until_complete(batch(number))
        spent = threads_s(os.getpid()) - before
        pipe.send((spent, sum("queue_time" in each for each in answers)))
    engine.shutdown()


def _measure(ask: Callable[[bool], tuple[float, int]], chosen: argparse.Namespace) -> None:
    def spent_s(enabled: bool) -> float:
        spent, timed = ask(enabled)
        assert timed == (chosen.requests if enabled and not chosen.control else 0)
        return spent

    # The first pair starts threads and fills caches.
    pairs = alternating(spent_s, chosen.pairs + 1)[1:]
    off, on = (median(column) / chosen.requests * 1e3 for column in zip(*pairs, strict=True))
    print(f"requests of {chosen.tokens} tokens, {chosen.requests} at once")
    print(f"CPU per request: {off:.1f} ms without, {on:.1f} ms with")
    print(ratio(pairs))
    print("each pair:", *(f"{each:.3f}" for each in sorted(on / off for off, on in pairs)))


def main() -> None:
    """Start both engines, measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--control", action="store_true")
    chosen = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        pipes: dict[bool, Any] = {}
        servers = []
        for enabled in (False, True):
            pipes[enabled], theirs = spawn.Pipe()
            metrics = enabled and not chosen.control
            arguments = (theirs, folder, chosen.requests, chosen.tokens, metrics)
            servers.append(spawn.Process(target=_serve, args=arguments))
            servers[-1].start()

        def ask(enabled: bool) -> tuple[float, int]:
            pipes[enabled].send(True)
            return pipes[enabled].recv()

        try:
            _measure(ask, chosen)
        finally:
            for pipe in pipes.values():
                pipe.send(False)
            for server in servers:
                server.join()


if __name__ == "__main__":
    start_for_sglang()
    main()
