"""What TransferQueue tracing adds to a traced call, on the real TransferQueue, in one run.

    python benchmarks/bench_transfer_queue.py [--rounds N] [--json FILE]

A call fetches a batch, computes next to nothing and stores a result of the same size, through verl's
own bridge: the smallest work that a traced call can have.  Untraced and traced calls take turns, in blocks.
Two figures: the share of the traced calls' time that went by in the tracing, by its own clock reads,
and the median of the calls' time against the untraced ones next to them.  Lines go to a file, as a
Ray worker's do.
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
from datetime import datetime
from pathlib import Path

import ray
import torch
import transfer_queue as tq
import verl  # noqa: F401  its logging, and the bridge
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import transferqueue_utils as bridge

from verl_profiler import recorder
from verl_profiler.clock import now, take_anchor
from verl_profiler.recorder import Identity
from verl_profiler.settings import Carried, EventSettings
from verl_profiler.tq_tracing import lines, placement
from verl_profiler.tq_tracing.switches import Switches

# Rows and tokens a row; each token is 8 bytes going in and coming out.
SIZES = ((8, 512), (32, 2048), (128, 4096), (512, 8192))
BLOCK = 5
MODES = {
    "TRACE": Switches(trace=True),
    "TRACE + DETAIL": Switches(trace=True, detail=True),
    "TRACE + DETAIL, every 10th": Switches(trace=True, detail=True, sample_every=10),
    "metrics only": Switches(metrics=True),
}


def work(data):
    """Hand the tokens back under another name."""
    return TensorDict({"result": data["input_ids"]}, batch_size=data.batch_size)


def stored(rows, tokens):
    """Put a batch with tensors and text into the queue; return its metadata."""
    lengths = [tokens - row % 7 for row in range(rows)]
    ids = torch.nested.as_nested_tensor(
        [torch.arange(length) for length in lengths], layout=torch.jagged
    )
    fields = tu.get_tensordict({"input_ids": ids, "raw_prompt": ["What is 2 + 2?"] * rows})
    tags = [{"global_steps": 1, "status": "success"} for _ in range(rows)]
    keys = [f"{rows}x{tokens}_{row}" for row in range(rows)]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)


def timed(function, meta):
    """Return the nanoseconds of one call."""
    begin = now()
    function(meta)
    return now() - begin


def measure(meta, switches, rounds):
    """Return the median call, the tracing's share of the calls, and the ratio to untraced calls.

    Blocks of untraced and traced calls take turns; the first call of a block is not counted, since
    it starts the threads that a traced process has anyway.
    """
    plain = bridge.tqbridge()(work)
    bare, with_tracing, ratios, spent = [], [], [], 0
    active = recorder.active()
    for _ in range(rounds):
        plain(meta)
        before = [timed(plain, meta) for _ in range(BLOCK)]
        placement.install(switches, "benchmark", records=True)
        traced = bridge.tqbridge()(work)
        traced(meta)
        begin_ns = active.wrapper_ns
        during = [timed(traced, meta) for _ in range(BLOCK)]
        spent += active.wrapper_ns - begin_ns
        placement.uninstall()
        bare += before
        with_tracing += during
        ratios.append(statistics.median(during) / statistics.median(before))
    return {
        "bare_ms": statistics.median(bare) / 1e6,
        "traced_ms": statistics.median(with_tracing) / 1e6,
        "share": spent / sum(with_tracing),
        "spent_us": spent / len(with_tracing) / 1e3,
        "ratio": statistics.median(ratios),
    }


def main():
    """Measure every size and mode, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=8, help="blocks a row (default 8)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR")
    tq.init()
    with tempfile.TemporaryDirectory() as folder:
        handler = logging.FileHandler(Path(folder, "worker.err"))
        log = logging.getLogger(lines.NAME)
        log.addHandler(handler)
        log.propagate = False
        events = EventSettings(announce=False)
        recorder.start(Carried(folder, folder, events, take_anchor()), lambda: Identity("actor", 0))
        rows = []
        for size in SIZES:
            meta = stored(*size)
            megabytes = size[0] * size[1] * 8 / 2**20
            rows += [
                {"mode": mode, "mb": megabytes, **measure(meta, switches, args.rounds)}
                for mode, switches in MODES.items()
            ]
        recorder.stop()
        log.removeHandler(handler)
    print(
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs, TransferQueue {tq.__version__}, {args.rounds * BLOCK} calls a row\n"
    )
    print("| batch | mode | call, ms | in the tracing, µs | share | traced / untraced |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['mb']:.1f} MB | {row['mode']} | {row['bare_ms']:.1f} | {row['spent_us']:.0f} "
            f"| {row['share']:.2%} | {row['ratio']:.3f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    tq.close()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
