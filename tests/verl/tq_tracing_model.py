"""What the workers of `tq_tracing_driver` compute, in a module of its own as verl's workers are."""

import asyncio
import hashlib

import torch
from tensordict import TensorDict
from verl.utils.transferqueue_utils import tqbridge


def digest(data):
    """Return a TensorDict as text: every tensor by its bytes, everything else by its value."""
    found = {}
    for key, value in sorted(data.items()):
        known = hashlib.sha256()
        if isinstance(value, torch.Tensor):
            for part in value.unbind() if value.is_nested else [value]:
                known.update(f"{part.dtype} {list(part.shape)}".encode())
                known.update(part.contiguous().numpy())
        else:
            known.update(repr(value.tolist() if hasattr(value, "tolist") else value.data).encode())
        found[key] = known.hexdigest()
    return found


def lengthened(ids, number):
    """Return a nested tensor of floats as long as `ids`."""
    parts = [torch.full((len(row),), float(number)) for row in ids.unbind()]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


class Model:
    """Methods as `@register` makes them."""

    def __init__(self):
        self.seen = []

    @tqbridge()
    def compute_log_prob(self, data):
        self.seen.append(digest(data))
        return TensorDict({"log_probs": lengthened(data["input_ids"], 1)}, batch_size=len(data))

    @tqbridge()
    async def infer_batch(self, data):
        self.seen.append(digest(data))
        await asyncio.sleep(0.01)
        return TensorDict({"values": lengthened(data["input_ids"], 2)}, batch_size=len(data))

    @tqbridge()
    def update_actor(self, data):
        self.seen.append(digest(data))
        return {"loss": 1.0}

    @tqbridge()
    def broken(self, data):
        raise ValueError(f"{len(data)} rows")
