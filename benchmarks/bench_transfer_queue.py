"""What TransferQueue tracing adds to a traced call, on the real TransferQueue, in one run.

    python benchmarks/bench_transfer_queue.py [--rounds N] [--max-mb MB] [--json FILE]

A call fetches a batch, computes next to nothing and stores a result of the same size, through verl's
own bridge: the smallest work that a traced call can have.  Untraced and traced calls take turns, in blocks.
Two figures: the share of the traced calls' time that went by in the tracing, by its own clock reads,
and the median of the calls' time against the untraced ones next to them.  Lines go to a file, as a
Ray worker's do.

First, without Ray: the processor time of the same wrappers around functions that hand over a batch
which is there already.  Nothing else runs then, so nothing is waited for.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import ray
import torch
import transfer_queue as tq
import verl  # noqa: F401  its logging, and the bridge
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import transferqueue_utils as bridge

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import now, take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig
from verl_profiler.transfer_queue import calls, lines
from verl_profiler.transfer_queue import probes as tracing
from verl_profiler.transfer_queue.switches import Switches

# Rows and tokens a row; each token is 8 bytes going in and coming out.
SIZES = (
    (8, 512),
    (32, 2048),
    (128, 4096),
    (256, 8192),
    (512, 8192),
    (1024, 16384),
    (1024, 131072),
)
# Calls of a block; larger batches take seconds.
BLOCK, BLOCK_OF_LARGE, LARGE_MB = 5, 2, 100
MODES = {
    "TRACE": Switches(trace=True),
    "TRACE + DETAIL": Switches(trace=True, detail=True),
    "TRACE + DETAIL, every 10th": Switches(trace=True, detail=True, sample_every=10),
}
MODES_OF_LARGE = ("TRACE", "TRACE + DETAIL")
ROWS, CALLS, REPEATS = (64, 1024), 100, 7


def work(data):
    """Hand the tokens back under another name."""
    return TensorDict({"result": data["input_ids"]}, batch_size=data.batch_size)


def samples(rows, tokens):
    """Return a batch with tensors and text, its keys and its tags."""
    lengths = [tokens - row % 7 for row in range(rows)]
    ids = torch.nested.as_nested_tensor(
        [torch.arange(length) for length in lengths], layout=torch.jagged
    )
    fields = tu.get_tensordict({"input_ids": ids, "raw_prompt": ["What is 2 + 2?"] * rows})
    tags = [{"global_steps": 1, "status": "success"} for _ in range(rows)]
    return fields, [f"{rows}x{tokens}_{row}" for row in range(rows)], tags


def timed(function, meta):
    """Return the nanoseconds of one call."""
    begin = now()
    function(meta)
    return now() - begin


def measure(meta, switches, rounds, block):
    """Return the median call, the tracing's share of the calls, and the ratio to untraced calls.

    Blocks of untraced and traced calls take turns; the first call of a block is not counted, since
    it starts the threads that a traced process has anyway.
    """
    plain = bridge.tqbridge()(work)
    bare, with_tracing, ratios, spent = [], [], [], 0
    active = recorder.active()
    for _ in range(rounds):
        plain(meta)
        before = [timed(plain, meta) for _ in range(block)]
        calls.start(switches, "benchmark", records=True)
        placing.install(tracing.with_tracing(()))
        traced = bridge.tqbridge()(work)
        traced(meta)
        begin_ns = active.wrapper_ns
        during = [timed(traced, meta) for _ in range(block)]
        spent += active.wrapper_ns - begin_ns
        placing.uninstall()
        calls.stop()
        bare += before
        with_tracing += during
        ratios.append(statistics.median(during) / statistics.median(before))
    return {
        "calls": len(with_tracing),
        "bare_ms": statistics.median(bare) / 1e6,
        "traced_ms": statistics.median(with_tracing) / 1e6,
        "share": spent / sum(with_tracing),
        "spent_us": spent / len(with_tracing) / 1e3,
        "ratio": statistics.median(ratios),
    }


def finish(coroutine):
    """Return what a coroutine that waits for nothing returns; no loop is needed."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the coroutine waits")


def alone(data, wrap):
    """Return a bridged call whose client has the batch at hand, each part wrapped by `wrap`."""

    async def get(_client, _metadata):
        return data

    async def put(_client, _data, metadata):
        return metadata

    get = wrap(get, tracing.begin_client_call, "GET")
    put = wrap(put, tracing.begin_client_call, "PUT")
    compute = wrap(work, tracing.begin_compute)

    def call(meta):
        return finish(put(None, compute(finish(get(None, meta))), meta))

    return wrap(call, tracing.begin_function, "work", True, False)


def traced(function, *begin):
    """Return the function with a trace around it."""
    return wrapping.wrap(tracing.traced(function.__name__, *begin), function)


def processor_times(rows, switches):
    """Return the microseconds of processor time a traced call takes more, in its thread and in all."""
    data, keys, tags = samples(rows, 20)
    meta = tq.KVBatchMeta(keys=keys, tags=tags, partition_id="train")
    calls.start(switches, "benchmark", records=True)
    found = {}
    for name, wrap in (("bare", lambda function, *_begin: function), ("traced", traced)):
        call = alone(data, wrap)
        runs = []
        for _ in range(REPEATS):
            call(meta)
            begin = time.thread_time_ns(), time.process_time_ns()
            for _ in range(CALLS):
                call(meta)
            thread = time.thread_time_ns() - begin[0]
            time.sleep(0.2)  # the threads that write lines and events catch up
            runs.append((thread, time.process_time_ns() - begin[1]))
        found[name] = [statistics.median(each) / CALLS / 1e3 for each in zip(*runs, strict=True)]
    calls.stop()
    return [traced - bare for traced, bare in zip(found["traced"], found["bare"], strict=True)]


def measure_alone():
    """Print the table of processor times."""
    rows = []
    print("| samples | mode | in the caller's thread, µs | in all threads, µs |")
    print("| --- | --- | --- | --- |")
    for count in ROWS:
        for mode, switches in MODES.items():
            thread, process = processor_times(count, switches)
            print(f"| {count} | {mode} | {thread:.0f} | {process:.0f} |", flush=True)
            rows.append({"rows": count, "mode": mode, "thread_us": thread, "process_us": process})
    print()
    return rows


def measure_queue(rounds, max_mb):
    """Print the table of calls on the real TransferQueue."""
    print("| batch | calls | mode | call, ms | in the tracing, µs | share | traced / untraced |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for size in SIZES:
        megabytes = size[0] * size[1] * 8 / 2**20
        if megabytes > max_mb:
            continue
        large = megabytes > LARGE_MB
        fields, keys, tags = samples(*size)
        meta = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
        del fields
        for mode in MODES_OF_LARGE if large else MODES:
            block = BLOCK_OF_LARGE if large else BLOCK
            row = measure(meta, MODES[mode], 1 if large else rounds, block)
            print(
                f"| {megabytes:.1f} MB | {row['calls']} | {mode} | {row['bare_ms']:.1f} "
                f"| {row['spent_us']:.0f} | {row['share']:.2%} | {row['ratio']:.3f} |",
                flush=True,
            )
            rows.append({"mode": mode, "mb": megabytes, **row})
        tq.kv_clear(keys=keys, partition_id="train")
    return rows


def main():
    """Measure every size and mode, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=8, help="blocks a row (default 8)")
    parser.add_argument(
        "--max-mb", type=float, default=200, help="leave larger batches out (default 200)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    print(
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, TransferQueue {tq.__version__}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        handler = logging.FileHandler(Path(folder, "worker.err"))
        log = logging.getLogger(lines.NAME)
        log.addHandler(handler)
        log.propagate = False
        events = EventSettings()
        recorder.start(
            WorkerConfig(folder, folder, events, take_anchor()), lambda: Identity("actor", 0)
        )
        found = {"alone": measure_alone()}
        ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR")
        tq.init()
        found["queue"] = measure_queue(args.rounds, args.max_mb)
        recorder.stop()
        log.removeHandler(handler)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    tq.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
