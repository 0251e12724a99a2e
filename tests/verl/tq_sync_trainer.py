"""Named in VERL_USE_EXTERNAL_MODULES: verl 0.8's main_ppo_sync with one batch in place of training.

The command, its config, `run_ppo`, TaskRunner and PPOTrainer's methods are verl's; only the models and
the loop around them are not there.
"""

import asyncio
import sys
import types

import ray

ROWS, STEP = 4, 3


def init(self, config, **_mappings):
    """Keep what `TaskRunner.run` and the methods below ask for."""
    self.config, self.global_steps = config, STEP
    self.replay_buffer = types.SimpleNamespace(close=lambda: None)


def fit(self):
    """Put a batch, let the real `_compute_values` handle it, log the step."""
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict
    from tq_tracing_model import Model
    from verl.utils.tracking import Tracking

    nested = {
        "input_ids": [torch.arange(10 + row) for row in range(ROWS)],
        "response_mask": [torch.ones(4 + row, dtype=torch.int64) for row in range(ROWS)],
    }
    fields = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name, rows in nested.items()
    }
    batch = tq.kv_batch_put(
        keys=[f"uid{row}_0_0" for row in range(ROWS)],
        partition_id="train",
        fields=TensorDict(fields, batch_size=ROWS),
        tags=[{"global_steps": STEP, "status": "success"} for _ in range(ROWS)],
    )
    batch.fields = ["input_ids"]
    model = Model()

    def infer_batch(batch):
        asyncio.run(model.infer_batch(batch))
        return types.SimpleNamespace(futures=[])

    self.critic_wg = types.SimpleNamespace(infer_batch=infer_batch)
    self._compute_values(batch, {})
    stored = tq.kv_batch_get(batch.keys, "train", select_fields=["values"])["values"]
    print("FOUND", [len(row) for row in stored.unbind()], flush=True)
    Tracking("project", "experiment", ["console"]).log(data={"loss": 1.0}, step=STEP)


original = ray.init


def init_ray(*args, **kwargs):
    """Take the models out of the trainer that the command has defined."""
    trainer = getattr(sys.modules["__main__"], "PPOTrainer", None)
    if trainer is not None:
        trainer.__init__, trainer.fit, trainer.init_workers = init, fit, lambda self: None
    return original(*args, **kwargs)


ray.init = init_ray
