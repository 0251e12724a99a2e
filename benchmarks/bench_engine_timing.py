"""What profiler.events.engine_timing costs: CPU per request of the real SGLang with and without it; on a CPU.

    python benchmarks/bench_engine_timing.py [--requests 16] [--tokens 400] [--pairs 20] [--control]

Two engines run side by side, one with `enable_metrics`, and serve the same requests in turns, in random
order.  The CPU time is that of all threads of an engine's processes: server, scheduler, detokenizer.
A tiny model with random weights.  With --control both engines run without it: the interval has to contain 1.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench_engine_state import SGLANG_ON_CPU, _model, _threads_s


def _serve(pipe: Any, model: str, requests: int, tokens: int, enable_metrics: bool) -> None:
    """Serve a batch of requests for each message, and answer with its CPU time and the times that came."""
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
    while (number := pipe.recv()) is not None:
        before = _threads_s(os.getpid())
        answers = loop.run_until_complete(batch(number))
        spent = _threads_s(os.getpid()) - before
        pipe.send((spent, sum("queue_time" in each for each in answers)))
    engine.shutdown()


def _interval(ratios: list[float], share: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the ratios' median."""
    source = random.Random(0)
    drawn = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return drawn[int((1 - share) / 2 * 10_000)], drawn[int((1 + share) / 2 * 10_000)]


def _measure(ask: Callable[[bool, int], tuple[float, int]], chosen: argparse.Namespace) -> None:
    pairs: list[tuple[float, float]] = []
    source = random.Random(1)
    for number in range(chosen.pairs + 1):
        spent: dict[bool, float] = {}
        for enabled in source.sample((False, True), 2):
            spent[enabled], timed = ask(enabled, number)
            assert timed == (chosen.requests if enabled and not chosen.control else 0)
        if number:
            pairs.append((spent[False], spent[True]))
    ratios = [on / off for off, on in pairs]
    off, on = (median(column) / chosen.requests * 1e3 for column in zip(*pairs, strict=True))
    low, high = _interval(ratios)
    print(f"{chosen.pairs} pairs of {chosen.requests} requests of {chosen.tokens} tokens")
    print(f"CPU per request: {off:.1f} ms without, {on:.1f} ms with")
    print(f"with / without: {median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")
    print("each pair:", *(f"{each:.3f}" for each in sorted(ratios)))


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
        _model(Path(folder))
        pipes: dict[bool, Any] = {}
        servers = []
        for enabled in (False, True):
            pipes[enabled], theirs = spawn.Pipe()
            metrics = enabled and not chosen.control
            arguments = (theirs, folder, chosen.requests, chosen.tokens, metrics)
            servers.append(spawn.Process(target=_serve, args=arguments))
            servers[-1].start()

        def ask(enabled: bool, number: int) -> tuple[float, int]:
            pipes[enabled].send(number)
            return pipes[enabled].recv()

        try:
            _measure(ask, chosen)
        finally:
            for pipe in pipes.values():
                pipe.send(None)
            for server in servers:
                server.join()


if __name__ == "__main__":
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        from verl_profiler.rehearsal.environment import FOR_SGLANG, FOR_TORCHVISION

        first = f"{FOR_SGLANG}{os.pathsep}{FOR_TORCHVISION}"
        path = f"{first}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})
    main()
