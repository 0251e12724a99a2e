"""Receive weights with verl's Kimi checkpoint engine with all probes on; report their events as JSON.

    python kimi_probes.py

The engine, and the generator that receives, are verl's own; the library below (`checkpoint_engine`) is a
fake: two ranks that receive have a share of the weights each, and the other one's broadcasts return at once.
"""

import types
from types import SimpleNamespace

import probes_report
import torch
from weight_receiver import Worker, fake, receive, weights

from verl_profiler.recording import context

BUCKET = 72
# The rank that runs here, and the one whose broadcasts come from the fake.
OWN, OTHER = 2, 3


def buckets_of(weights):
    """Return buckets of whole weights: (rank that reads it, owner, bucket), for both ranks in turn."""
    found = []
    for place, at in enumerate(range(0, len(weights), 2)):
        items = [
            SimpleNamespace(name=name, shape=each.shape, dtype=each.dtype, aligned_size=each.nbytes)
            for name, each in weights[at : at + 2]
        ]
        data = torch.cat([each for _, each in weights[at : at + 2]])
        bucket = SimpleNamespace(size=data.nbytes, items=items, data=data)
        found.append(((OWN, OTHER)[place % 2], 0, bucket))
    return found


def named(items, offset=0):
    found = []
    for each in items:
        found.append(
            {"name": each.name, "shape": each.shape, "dtype": each.dtype, "offset": offset}
        )
        offset += each.aligned_size
    return found


def main():
    directory = probes_report.begin("rollout")
    context.process.step = 2
    given = weights()
    buckets = buckets_of(given)

    def broadcast(buffer, src, group):
        if src != OWN:
            (data,) = (each.data for rank, _, each in buckets if rank == src)
            buffer.copy_(data)

    ignore = lambda *_, **__: None
    distributed = {
        "barrier": ignore, "is_initialized": lambda: True, "broadcast": broadcast
    }  # fmt: skip
    fake("checkpoint_engine")
    fake("checkpoint_engine.distributed", **distributed)
    fake(
        "checkpoint_engine.ps", H2DBucket=object, ParameterMeta=object, ParameterServer=object,
        _gen_h2d_buckets=lambda *_: buckets, _to_named_tensor=named,
    )  # fmt: skip
    from verl.checkpoint_engine import kimi_checkpoint_engine as of_verl

    store = SimpleNamespace(register_named_tensors=ignore, unregister_named_tensors=ignore)
    module = SimpleNamespace(empty_cache=ignore, synchronize=ignore)
    server = SimpleNamespace(
        _current_global_parameter_metas=[1], _p2p_store=store, _rank=OWN, gather_metas=ignore,
        _local_rdma_devices={}, _remote_rdma_devices={},
        device_manager=SimpleNamespace(device_type="cpu", device_module=module),
        _copy_to_buffer=lambda _name, bucket, buffer, _owner: buffer[: bucket.size].copy_(bucket.data),
    )  # fmt: skip
    server.receive_tensor = types.MethodType(of_verl.receive_tensor, server)
    engine = of_verl.KIMICheckpointEngine(BUCKET)
    engine.__dict__.update(
        rank=OWN, parameter_server=server, rollout_group=0, rollout_ranks=[OWN, OTHER]
    )
    got = receive(Worker(engine))
    probes_report.end(directory, {"got": got, "wanted": [[n, t.tolist()] for n, t in given]})


if __name__ == "__main__":
    main()
