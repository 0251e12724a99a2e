"""What readings of a real engine's load cost, beside the engine's own iterations; on a CPU.

    python benchmarks/bench_engine_state.py [--requests 16] [--tokens 600] [--readings 3000]
    python benchmarks/bench_engine_state.py --engine vllm [--requests 16] [--tokens 600] [--rounds 3]
    python benchmarks/bench_engine_state.py --engine messages [--readings 100000]

First requests decode, which gives the length of an iteration and its CPU time.  Then the engine is idle and
asked again and again: its scheduler sleeps between two readings, so all of its CPU time is the readings',
with waking up.  A tiny model with random weights: iterations are shorter than those of a real one.

vLLM hands its statistics to the reading in each iteration: this is timed, and the CPU time of the server and
of the engine's core is compared with that of engines without statistics, in turns.

`messages` is what the server spends on the messages of SGLang's iterations, 10 ms apart, without the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measuring import recording

_PER_SECOND = 2
# How SGLang runs on a CPU with a tiny model.
SGLANG_ON_CPU: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "skip_server_warmup": True,
    "log_level": "error",
    "sleep_on_idle": True,
}


def start_for_sglang() -> None:
    """Start this program anew with the environment that SGLang needs on a CPU, unless it has it."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return
    from verl_profiler.rehearsal.environment import FOR_SGLANG, FOR_TORCHVISION

    path = (
        f"{FOR_SGLANG}{os.pathsep}{FOR_TORCHVISION}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


def make_model(folder: Path, heads: int = 4) -> None:
    """Write a model with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _scheduler() -> Any:
    """Return the scheduler's process."""
    import psutil

    found = [
        each
        for each in psutil.Process().children(recursive=True)
        if "scheduler" in " ".join([each.name(), *each.cmdline()])
    ]
    if len(found) != 1:
        raise SystemExit(f"expected one scheduler, found {len(found)}")
    return found[0]


def _bytes_per_reading(loads: list[Any]) -> float:
    """Return the length of a line, from the recorder's own file."""
    from verl_profiler.probes import engine_state

    with recording("engine", {"engine_state": True}) as lines:
        reader = engine_state._Reader(_bytes_per_reading, None)
        for load in loads:
            reader.recorded.clear()
            reader._record(load)
    return fmean(len(line) for line in lines if b"engine_state" in line)


async def _measure(engine: Any, requests: int, tokens: int, readings: int) -> None:
    manager = engine.tokenizer_manager
    scheduler = _scheduler()

    def clocks() -> tuple[float, ...]:
        return sum(scheduler.cpu_times()[:2]), time.process_time(), time.monotonic()

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


def threads_s(pid: int) -> float:
    """Return the CPU time of a process and those below it, in seconds, to the nanosecond."""
    import psutil

    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for each in processes
        for task in Path(f"/proc/{each.pid}/task").iterdir()
    )


def _measure_messages(count: int) -> None:
    """Decode and sum messages as the subscriber does, and print the time of each and the bytes per second."""
    import msgspec

    from verl_profiler.probes import sglang_iterations
    from verl_profiler.recording import recorder
    from verl_profiler.recording.clock import now

    # The fields of SGLang's `ForwardPassMetrics` (sglang 0.5.12 and 0.5.23).
    scheduled = {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": 64,
        "sum_decode_kv_tokens": 81_920,
        "var_decode_kv_tokens": 71.25,
    }
    queued = {**scheduled, "num_prefill_requests": 3, "num_decode_requests": 1}
    message = msgspec.msgpack.encode(
        {
            "version": 1,
            "worker_id": "",
            "dp_rank": 0,
            "counter_id": 7,
            "wall_time": 0.0091,
            "scheduled_requests": scheduled,
            "queued_requests": queued,
        }
    )
    decoder = msgspec.msgpack.Decoder(sglang_iterations._Pass)
    with recording("engine", {"engine_iterations": True}) as lines:
        sums, at_ns = sglang_iterations.Sums(), now()
        begin = time.process_time()
        for _ in range(count):
            at_ns += 10_000_000
            sums.add(at_ns, decoder.decode(message))
        recorder.stop()
        spent = time.process_time() - begin
    size = fmean(len(line) for line in lines if b"engine_iterations" in line)
    print(f"{spent / count * 1e6:.1f} us of CPU per message, with writing of the rows")
    print(f"{size:.0f} B per row, at most 10 rows/s per rank: {10 * size:.0f} B/s")


class _Timer:
    """Adds up the time and number of a function's calls."""

    def __init__(self, holder: Any, name: str) -> None:
        self.spent_ns = self.calls = 0
        original = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent_ns += time.perf_counter_ns() - begin
                self.calls += 1

        setattr(holder, name, timed)

    @property
    def mean_s(self) -> float:
        return self.spent_ns / max(self.calls, 1) / 1e9


async def _measure_vllm(model: str, requests: int, tokens: int, rounds: int) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import async_llm

    from verl_profiler.instrumentation import placing
    from verl_profiler.probes import engine_state, select

    parameters = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=1.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def decode(engine: Any, name: str, number: int) -> None:
        prompt = {"prompt_token_ids": [1 + number] * 20}
        async for _ in engine.generate(prompt, parameters, name):
            pass

    async def measured(*, enabled: bool) -> tuple[float, float, float, float, float]:
        """Return length of an iteration, CPU of core and server per iteration, and reading's times."""
        with recording("engine", {"engine_state": enabled}):
            placing.install(select(["engine"]))
            own = _Timer(engine_state._Readings, "record")
            engine = async_llm.AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=model,
                    skip_tokenizer_init=True,
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=2048,
                    kv_cache_memory_bytes=256 << 20,
                    disable_log_stats=True,
                )
            )
            try:
                assert enabled == engine.log_stats
                await decode(engine, "first", 0)
                own.spent_ns = own.calls = 0
                both = _Timer(engine.logger_manager, "record") if enabled else own
                whole, here = threads_s(os.getpid()), time.process_time()
                begin = time.monotonic()
                await asyncio.gather(*(decode(engine, f"r{n}", n) for n in range(requests)))
                length = time.monotonic() - begin
                here = time.process_time() - here
                whole = threads_s(os.getpid()) - whole
            finally:
                engine.shutdown()
                placing.uninstall()
        return length / tokens, (whole - here) / tokens, here / tokens, own.mean_s, both.mean_s

    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for _ in range(rounds):
        for enabled in (False, True):
            found[enabled].append(await measured(enabled=enabled))
    off, on = (
        [median(each) for each in zip(*found[enabled], strict=True)] for enabled in (False, True)
    )
    print(
        f"iteration with {requests} requests: {off[0] * 1e3:.3f} ms without, {on[0] * 1e3:.3f} with"
    )
    print(f"CPU of the core per iteration: {off[1] * 1e3:.3f} ms without, {on[1] * 1e3:.3f} with")
    print(f"CPU of the server per iteration: {off[2] * 1e3:.3f} ms without, {on[2] * 1e3:.3f} with")
    print(f"reading, in the server: {on[3] * 1e6:.1f} us per iteration, {on[3] / on[0]:.3%} of it")
    print(f"all of vLLM's loggers: {on[4] * 1e6:.1f} us per iteration, {on[4] / on[0]:.3%} of it")
    for enabled, rows in found.items():
        for row in rows:
            print("with" if enabled else "without", *(f"{value * 1e6:.1f}" for value in row))


def main() -> None:
    """Start an engine, measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--readings", type=int, default=3_000)
    parser.add_argument("--engine", choices=("sglang", "vllm", "messages"), default="sglang")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.engine == "messages":
        _measure_messages(chosen.readings)
        return
    if chosen.engine == "vllm":
        with tempfile.TemporaryDirectory() as folder:
            # vLLM's attention on a CPU takes heads of 32.
            make_model(Path(folder), 2)
            asyncio.run(_measure_vllm(folder, chosen.requests, chosen.tokens, chosen.rounds))
        return
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        engine = sglang.Engine(model_path=folder, max_total_tokens=200_000, **SGLANG_ON_CPU)
        try:
            loop = asyncio.get_event_loop()
            loop.run_until_complete(
                _measure(engine, chosen.requests, chosen.tokens, chosen.readings)
            )
        finally:
            engine.shutdown()


if __name__ == "__main__":
    if "vllm" in sys.argv:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif "messages" not in sys.argv:
        start_for_sglang()
    main()
