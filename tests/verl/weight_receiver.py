"""What the scripts about checkpoint engines share: weights, a receiver's worker, and fake modules."""

import asyncio
import sys
import types

import torch
import wrapt

__all__ = ["Worker", "fake", "receive", "weights"]

# Bytes of each weight: three buckets of 64.
SIZES = (40, 24, 60, 8)


def fake(name, **attributes):
    """Let a module be imported that is not installed."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    # Nobody imports it, so its probes are placed now.
    wrapt.notify_module_loaded(module)


class Worker:
    """What `CheckpointEngineWorker.update_weights` reads of its worker, and the engine's adapter."""

    def __init__(self, engine):
        self.checkpoint_engine = engine
        self.server_adapter = self
        self.got = []

    async def update_weights(self, weights, **_):
        async for name, tensor in weights:
            self.got.append([name, tensor.flatten().tolist()])


def receive(worker):
    """Return the weights of a sync for step 2, by verl's own function."""
    from verl.checkpoint_engine.base import CheckpointEngineWorker

    asyncio.run(CheckpointEngineWorker.update_weights(worker, global_steps=2))
    return worker.got


def weights():
    """Return names and tensors."""
    return [(str(at), torch.full((size,), at, dtype=torch.uint8)) for at, size in enumerate(SIZES)]
