"""Sync weights over the rehearsal's checkpoint engine with all probes on; report their events as JSON.

    python weight_probes.py

Two receivers are processes of their own, with verl's real worker and an adapter that is a fake: it
iterates over the weights as verl's do, and loads nothing.  `test_weight_probes.py` reads the report.
"""

import asyncio
import json
import sys

import probes_report
import torch

from verl_profiler.recording import context

BUCKET = 64
# As many buckets as weights; and one weight that needs three.
SYNCS = {1: [16] * 99 + [48], 2: [16, 4]}


def engine(**arguments):
    from verl_profiler.rehearsal import gloo_checkpoint_engine

    gloo_checkpoint_engine.ray.util.get_node_ip_address = lambda: "127.0.0.1"
    return gloo_checkpoint_engine.GlooCheckpointEngine(BUCKET, **arguments)


class Adapter:
    """A fake: no engine behind it."""

    async def update_weights(self, weights, global_steps=None, **_kwargs):
        from verl.workers.rollout.utils import ensure_async_iterator

        self.sizes = [value.nbytes async for _, value in ensure_async_iterator(weights)]


def send():
    # Before there are threads of a recorder.
    receivers = [probes_report.forked(receive, rank) for rank in (1, 2)]
    directory = probes_report.begin("actor")
    context.process.step = 1
    sender, idle = engine(is_master=True), engine()
    for step, sizes in SYNCS.items():
        address = sender.prepare()
        for receiver in receivers:
            print(json.dumps([step, address]), file=receiver.stdin, flush=True)
        sender.init_process_group(0, 3, address)
        idle.init_process_group(-1, 3, address)
        weights = {f"weight_{place}": torch.ones(size) for place, size in enumerate(sizes)}
        context.process.step = step
        asyncio.run(sender.send_weights(iter(weights.items()), global_steps=step))
        asyncio.run(idle.send_weights(iter(weights.items()), global_steps=step))
        for receiver in receivers:
            receiver.stdout.readline()
        sender.finalize()
    received = [probes_report.report_of(each) for each in receivers]
    probes_report.end(directory, {"receivers": received})


def receive(rank):
    from verl.checkpoint_engine.base import CheckpointEngineWorker

    directory = probes_report.begin("rollout")
    worker = CheckpointEngineWorker.__new__(CheckpointEngineWorker)
    worker.checkpoint_engine, worker.server_adapter = engine(), Adapter()
    received = []
    for _ in SYNCS:
        step, address = json.loads(sys.stdin.readline())
        worker.checkpoint_engine.init_process_group(rank, 3, tuple(address))
        asyncio.run(worker.update_weights(global_steps=step))
        worker.checkpoint_engine.finalize()
        received.append(worker.server_adapter.sizes)
        print("done", flush=True)
    probes_report.end(directory, {"received": received})


if __name__ == "__main__":
    send()
