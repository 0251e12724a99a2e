"""One batch through the optional TransferQueue of verl 0.7.0 (0.1.5.dev3) or 0.6.1 (0.0.1.dev0).

A worker's real `@register` method fetches it, computes, and stores the result; a failing one too.
What is traced comes from the environment.  Prints one line of JSON: what training saw.
"""

import inspect
import json
import os
import time

os.environ["TRANSFER_QUEUE_ENABLE"] = "1"

import hydra
import ray
import torch
import transfer_queue as tq
import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import transferqueue_utils

ROWS, TOKENS, STEP = 8, 4096, 3
MULTIPLE = not hasattr(tq, "SimpleStorageUnit")  # the first release: several controllers


def start_queue():
    """Start controller and two storage units; return what a client needs to find them."""
    if MULTIPLE:
        units = {n: tq.TransferQueueStorageSimpleUnit.remote(storage_size=ROWS) for n in range(2)}
        controllers = {
            0: tq.TransferQueueController.remote(
                num_storage_units=2, global_batch_size=ROWS, num_global_batch=2, num_n_samples=1
            )
        }
        found = [tq.process_zmq_server_info(each) for each in (controllers, units)]
        ray.get([unit.register_controller_info.remote(found[0]) for unit in units.values()])
        return [*found, (controllers, units)]
    units = {n: tq.SimpleStorageUnit.remote(storage_unit_size=ROWS) for n in range(2)}
    controller = tq.TransferQueueController.remote()
    found = {
        "controller_info": tq.process_zmq_server_info(controller),
        "storage_unit_infos": tq.process_zmq_server_info(units),
        "storage_backend": "AsyncSimpleStorageManager",
        "num_data_storage_units": 2,
    }
    config = OmegaConf.create({}, flags={"allow_objects": True})
    config.update(found)
    return [config, (controller, units)]


@ray.remote(num_cpus=0)
class Rank:
    """A worker process of verl."""

    def __init__(self, places):
        transferqueue_utils.create_transferqueue_client("worker", *places)
        from tq_optional_model import Worker  # by reference, as verl's workers

        self.worker = Worker()

    def call(self, method, meta):
        return getattr(self.worker, method)(meta)

    def seen(self):
        return self.worker.seen, os.environ.get("TQ_TRACE_ENABLED")


def main():
    """One step."""
    with hydra.initialize(version_base=None):
        hydra.compose()
    ray.init("local", num_cpus=6, include_dashboard=False, logging_level="ERROR")
    *places, keep = start_queue()
    rank = Rank.remote(places)
    client = transferqueue_utils.create_transferqueue_client("trainer", *places)
    client = client or transferqueue_utils.get_transferqueue_client()
    version = {"global_step": STEP} if MULTIPLE else {"partition_id": f"train_{STEP}"}

    def do(method, **arguments):
        wanted = inspect.signature(getattr(client, method)).parameters
        given = {**arguments, **version}
        run = transferqueue_utils._run_async_in_temp_loop
        return run(getattr(client, method), **{k: v for k, v in given.items() if k in wanted})

    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
    do("async_put", data=TensorDict({"input_ids": ids}, batch_size=ROWS))
    meta = do(
        "async_get_meta",
        data_fields=["input_ids"],
        batch_size=ROWS,
        get_n_samples=False,
        task_name="compute_log_prob",
    )
    meta.set_extra_info("temperature", 0.5)
    result = ray.get(rank.call.remote("compute_log_prob", meta))
    meta.set_extra_info("trace_id", "mine")
    ray.get(rank.call.remote("compute_log_prob", meta))
    failures = []
    try:
        ray.get(rank.call.remote("broken", meta))
    except ValueError as error:
        failures.append(type(error.cause).__name__)
    seen, switch = ray.get(rank.seen.remote())
    report = {
        "versions": [verl.__version__, tq.__version__],
        "training": [seen, sorted(result.field_names), sorted(result.extra_info), failures],
        "switch": switch,
    }
    print("FOUND " + json.dumps(report), flush=True)
    time.sleep(1.5)
    del keep
    ray.shutdown()


main()
