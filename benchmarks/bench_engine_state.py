"""What one reading of a real SGLang engine's load costs, beside the engine's own iterations; on a CPU.

    python benchmarks/bench_engine_state.py [--requests 16] [--tokens 600] [--readings 3000]

First requests decode, which gives the length of an iteration and its CPU time.  Then the engine is idle and
asked again and again: its scheduler sleeps between two readings, so all of its CPU time is the readings',
with waking up.  A tiny model with random weights: iterations are shorter than those of a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PER_SECOND = 2


def _model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _scheduler_pid() -> int:
    import psutil

    found = [
        each.pid
        for each in psutil.Process().children(recursive=True)
        if "scheduler" in " ".join([each.name(), *each.cmdline()])
    ]
    if len(found) != 1:
        raise SystemExit(f"expected one scheduler, found {len(found)}")
    return found[0]


def _bytes_per_reading(loads: list[Any]) -> float:
    """Return the length of a line, from the recorder's own file."""
    from verl_profiler.probes import engine_state
    from verl_profiler.recording import recorder
    from verl_profiler.recording.clock import take_anchor
    from verl_profiler.recording.identity import Identity
    from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

    with tempfile.TemporaryDirectory() as folder:
        config = WorkerConfig(folder, folder, EventSettings(engine_state=True), take_anchor())
        recorder.start(config, lambda: Identity("engine", 0), dict)
        reader = engine_state._Reader(_bytes_per_reading, None)
        for load in loads:
            reader.recorded.clear()
            reader._record(load)
        recorder.stop()
        lines = [
            line
            for path in Path(folder).rglob("*.jsonl")
            for line in path.read_bytes().splitlines(keepends=True)
            if b"engine_state" in line
        ]
    return sum(map(len, lines)) / len(lines)


async def _measure(engine: Any, requests: int, tokens: int, readings: int) -> None:
    manager = engine.tokenizer_manager
    pid = _scheduler_pid()

    def clocks() -> tuple[float, ...]:
        return _cpu_s(pid), time.process_time(), time.monotonic()

    async def decode(number: int) -> None:
        await engine.async_generate(
            input_ids=[1 + number] * 20,
            sampling_params={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0},
        )

    await decode(0)
    before = clocks()
    await asyncio.gather(*(decode(number) for number in range(requests)))
    cpu, _, length = (late - early for late, early in zip(clocks(), before, strict=True))
    await asyncio.sleep(2)
    before = clocks()
    await asyncio.sleep(5)
    idle, *_ = (late - early for late, early in zip(clocks(), before, strict=True))
    before = clocks()
    loads = [load for _ in range(readings) for load in await manager.get_loads()]
    spent, here, waited = (late - early for late, early in zip(clocks(), before, strict=True))
    cost, cost_here = spent / readings, here / readings
    size = _bytes_per_reading(loads[:1000])
    print(f"iteration with {requests} requests: {length / tokens * 1e3:.2f} ms, ", end="")
    print(f"CPU of the scheduler {cpu / tokens * 1e3:.2f} ms")
    print(f"idle scheduler: {idle / 5:.2%} of a core")
    print(f"{readings:,} readings, {waited / readings * 1e3:.2f} ms each")
    print(
        f"scheduler, per reading: {cost * 1e6:.0f} us of CPU, {cost / cpu * tokens:.1%} of an iteration"
    )
    print(f"server, per reading: {cost_here * 1e6:.0f} us of CPU")
    print(
        f"at {_PER_SECOND} readings per second: {cost * _PER_SECOND:.3%} of the scheduler's time,"
    )
    print(f"  {cost_here * _PER_SECOND:.3%} of the server's, at most {size * _PER_SECOND:.0f} B/s")


def main() -> None:
    """Start an engine, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--readings", type=int, default=3_000)
    chosen = parser.parse_args()
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        _model(Path(folder))
        engine = sglang.Engine(
            model_path=folder,
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_overlap_schedule=True,
            max_total_tokens=200_000,
            mem_fraction_static=0.1,
            skip_server_warmup=True,
            log_level="error",
            sleep_on_idle=True,
        )
        try:
            loop = asyncio.get_event_loop()
            loop.run_until_complete(
                _measure(engine, chosen.requests, chosen.tokens, chosen.readings)
            )
        finally:
            engine.shutdown()


if __name__ == "__main__":
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        from verl_profiler.rehearsal.environment import FOR_SGLANG, FOR_TORCHVISION

        first = f"{FOR_SGLANG}{os.pathsep}{FOR_TORCHVISION}"
        path = f"{first}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})
    main()
