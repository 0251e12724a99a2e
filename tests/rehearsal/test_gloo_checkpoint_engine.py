"""The rehearsal's checkpoint engine: every receiver gets the sender's weights, whatever the buckets."""

import asyncio
import threading

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("_import_path")]


@pytest.mark.parametrize("bucket_size", [64, 200, 1 << 20])
def test_weights_arrive_in_buckets_of_any_size(bucket_size, monkeypatch):
    """Smaller than a tensor, smaller than all, and larger; the second rank of the trainer sends none."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("verl_profiler.rehearsal.gloo_checkpoint_engine")
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    weights = {
        "a": torch.arange(40, dtype=torch.float32).view(8, 5),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.arange(30),
    }
    actors = [module.GlooCheckpointEngine(bucket_size, is_master=first) for first in (True, False)]
    receivers = [module.GlooCheckpointEngine(bucket_size) for _ in range(2)]
    engines = [*actors, *receivers]
    metadata = [engine.prepare() for engine in engines]
    actor_arguments, receiver_arguments = module.GlooCheckpointEngine.build_topology(2, 2, metadata)
    received = {}

    async def receive(engine):
        return {name: value.clone() async for name, value in engine.receive_weights()}

    def run(engine, arguments, number):
        engine.init_process_group(**{name: each[number] for name, each in arguments.items()})
        if engine in actors:
            asyncio.run(engine.send_weights(iter(weights.items())))
        else:
            received[number] = asyncio.run(receive(engine))
        engine.finalize()

    threads = [
        threading.Thread(target=run, args=(engine, arguments, number))
        for group, arguments in ((actors, actor_arguments), (receivers, receiver_arguments))
        for number, engine in enumerate(group)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert {0, 1} == received.keys()
    for got in received.values():
        assert weights.keys() == got.keys()
        assert all(torch.equal(weights[name], got[name]) for name in weights)
