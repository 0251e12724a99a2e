"""A small run on the real TransferQueue: rollouts put, workers behind verl's bridge compute, the driver trains.

    python tq_tracing_driver.py

Two raylets that have none of this process's environment, as on a cluster that runs already.  What
is switched on comes from the environment alone.  Prints one line of JSON: what training saw.
"""

import asyncio
import json
import os
import time

OURS = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TQ_")}

from ray.cluster_utils import Cluster  # noqa: E402  the raylets start without our variables

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "include_dashboard": False})
cluster.add_node(num_cpus=4)
os.environ.update(OURS)

import hydra  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import transfer_queue as tq  # noqa: E402
from tq_tracing_model import Model, digest  # noqa: E402  brings verl, and with it the plugin
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.tracking import Tracking  # noqa: E402

SAMPLES, STEP = 12, 3


@ray.remote(num_cpus=0)
class Rollout:
    """As an agent-loop worker: puts every finished sample with its tags."""

    def __init__(self):
        import verl  # noqa: F401

        tq.init()

    async def generate(self, uids, length):
        async def one(uid):
            await asyncio.sleep(0.005)
            ids = torch.arange(length).repeat(1, 1) + len(uid)
            # A quarter of the tensor's bytes.
            prompt = uid.ljust(2 * length, ".")
            fields = tu.get_tensordict(
                {"input_ids": ids, "raw_prompt": [prompt], "reward_model": [{"gt": uid}]}
            )
            tag = {"status": "success", "global_steps": STEP, "seq_len": length}
            await tq.async_kv_batch_put(
                keys=[f"{uid}_0_0"], fields=fields, tags=[tag], partition_id="train"
            )

        await asyncio.gather(*map(one, uids))


@ray.remote(num_cpus=0)
class Worker:
    """A rank; the model's methods run as verl's do, beside its event loop."""

    def __init__(self):
        self.model = Model()

    def call(self, method, meta):
        done = getattr(self.model, method)(meta)
        return asyncio.run(done) if asyncio.iscoroutine(done) else done

    def seen(self):
        return self.model.seen, os.environ.get("TQ_TRACE_ENABLED"), os.getpid()


def main():
    """Two steps of one batch; the report at the end."""
    with hydra.initialize(version_base=None):  # as verl's commands; loads the plugin before 0.9
        hydra.compose()
    length = 2**20 // 8 // SAMPLES
    ray.init(address=cluster.address, logging_level="ERROR")
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    rollouts = [Rollout.options(scheduling_strategy="SPREAD").remote() for _ in range(2)]
    workers = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(2)]
    uids = [f"uid{number}" for number in range(SAMPLES)]
    ray.get([r.generate.remote(uids[n::2], length) for n, r in enumerate(rollouts)])
    stored = tq.kv_list("train")["train"]
    keys = sorted(stored)
    batch = KVBatchMeta(
        keys=keys,
        tags=[stored[key] for key in keys],
        partition_id="train",
        fields=["input_ids", "raw_prompt", "reward_model"],
        extra_info={"temperature": 0.5},
    )
    returned = []
    for method in ("compute_log_prob", "infer_batch", "update_actor"):
        results = ray.get(
            [w.call.remote(method, c) for w, c in zip(workers, batch.chunk(2), strict=True)]
        )
        if method != "update_actor":
            merged = KVBatchMeta.concat(results)
            returned.append((merged.keys, merged.tags, sorted(merged.fields), merged.extra_info))
    failures = []
    try:
        ray.get(workers[0].call.remote("broken", batch))
    except ValueError as error:
        failures.append(type(error.cause).__name__ if hasattr(error, "cause") else "ValueError")
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    logger = Tracking("project", "experiment", ["console"])
    logged = []
    logger.logger["console"] = type(
        "Logger", (), {"log": lambda self, data, step: logged.append(data)}
    )()
    time.sleep(3)
    for step in (STEP, STEP, STEP + 1):
        logger.log(data={"loss": 1.0}, step=step)
    if hasattr(logger, "finish"):  # verl before 0.9 leaves it to the collector
        logger.finish()
    seen = ray.get([worker.seen.remote() for worker in workers])
    report = {
        "training": [[found for found, _, _ in seen], returned, digest(data), failures],
        "tags": [stored[key] for key in keys],
        "switches": [switch for _, switch, _ in seen],
        "pids": [pid for *_, pid in seen],
        "nodes": len({node["NodeID"] for node in ray.nodes()}),
        "logged": logged,
    }
    print("FOUND " + json.dumps(report), flush=True)
    # Ray prints the workers' last lines a little later.
    time.sleep(1.5)
    tq.close()
    ray.shutdown()
    cluster.shutdown()


main()
