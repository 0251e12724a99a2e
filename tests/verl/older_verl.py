"""Drive the real classes of verl 0.8.0 with all probes on; report their events as JSON.

    PYTHONPATH=FOLDER python older_verl.py

FOLDER holds the `verl` of 0.8.0.  What is faked: servers, worker groups, models and TransferQueue around them.
`test_older_verl.py` reads the report.
"""

import asyncio
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import probes_report

from verl_profiler.recording import context


class Remote:
    """A method of an actor, run at once; its result can be awaited."""

    def __init__(self, answer):
        self.answer = answer

    async def remote(self, *args, **kwargs):
        return self.answer(*args, **kwargs)


def client_of(cls, answers, asked):
    """Return a client whose engine gives these answers, and keeps the ids that it is asked with."""
    from verl.workers.rollout.replica import TokenOutput

    outputs = iter(answers)

    def generate(request_id, **_):
        asked.append(request_id)
        count, reason = next(outputs)
        return TokenOutput(
            token_ids=[7] * count, stop_reason=reason, extra_fields={"global_steps": 4}
        )

    server = SimpleNamespace(generate=Remote(generate))
    balancer = SimpleNamespace(
        acquire_server=Remote(lambda **_: ("server-0", server)),
        release_server=SimpleNamespace(remote=lambda **_: None),
    )
    config = SimpleNamespace(async_training=SimpleNamespace(partial_rollout=True))
    return cls(config, balancer)


def generate():
    """Two calls of one client, and one of the asynchronous one, whose first attempt is aborted."""
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncLLMServerClient
    from verl.workers.rollout.llm_server import LLMServerClient

    plain, repeated = [], []
    once = client_of(LLMServerClient, [(3, "completed"), (2, "completed")], plain)
    again = client_of(FullyAsyncLLMServerClient, [(1, "aborted"), (2, "completed")], repeated)

    async def run():
        context.current_request.set(context.Request(3))
        for client in (once, once, again):
            await client.generate("r", prompt_ids=[1, 2], sampling_params={})

    asyncio.run(run())
    return {"plain": plain, "repeated": repeated}


def choose():
    """Let the load balancer, which `@ray.remote` decorates, choose."""
    from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer

    balancer = GlobalRequestLoadBalancer.__ray_metadata__.modified_class({"east": "", "west": ""})
    return [balancer.acquire_server(request)[0] for request in ("one", "two", "one")]


def train():
    """Two steps of `main_ppo_sync`, by verl's own `fit`, `step` and replay buffer."""
    import numpy as np
    from omegaconf import OmegaConf
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.trainer import main_ppo_sync
    from verl.workers.rollout.replica import RolloutMode

    main_ppo_sync.tq = SimpleNamespace(kv_clear=lambda **_: None)
    trainer = main_ppo_sync.PPOTrainer.__new__(main_ppo_sync.PPOTrainer)
    buffer = main_ppo_sync.ReplayBuffer.__new__(main_ppo_sync.ReplayBuffer)
    buffer.partitions, buffer.lock, buffer.poll_interval = defaultdict(dict), threading.Lock(), 0.01

    def dispatch(batch):
        tags = {"global_steps": batch["global_steps"], "status": "success"}
        buffer.add("train", {f"{uid}_0_0": tags for uid in batch["uid"]})

    settings = {
        "trainer": {
            "project_name": "p",
            "experiment_name": "e",
            "logger": ["console"],
            "val_before_train": False,
            "total_epochs": 1,
            "save_freq": -1,
            "test_freq": -1,
            "critic_warmup": 0,
        },
        "global_profiler": {"steps": None},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"rollout": {"n": 1, "temperature": 1.0}},
    }
    vars(trainer).update(
        config=OmegaConf.create(settings),
        replay_buffer=buffer,
        async_rollout_manager=SimpleNamespace(generate_sequences=dispatch),
        checkpoint_manager=SimpleNamespace(update_weights=dict, sleep_replicas=dict),
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=[]),
        train_dataloader=[
            {"raw_prompt": np.array(["a", "b"], dtype=object)},
            {"raw_prompt": np.array(["c", "d"], dtype=object)},
        ],
        total_training_steps=2,
        global_steps=0,
        use_critic=False,
        use_reference_policy=False,
        _dump_executor=SimpleNamespace(_shutdown=False),
    )
    for name in (
        "_load_checkpoint",
        "_start_profiling",
        "_stop_profiling",
        "_shutdown_dump_executor",
    ):
        vars(trainer)[name] = dict
    for name in ("_balance_batch", "_compute_old_log_prob", "_compute_advantage", "_update_actor"):
        vars(trainer)[name] = lambda batch, metrics: batch
    trainer._compute_metrics = lambda batch, metrics, *_, **__: metrics.update(loss=0.5)
    trainer.fit()
    made_of = SimpleNamespace(backend="naive", custom_backend_module=None)
    replica = SimpleNamespace(replica_rank=0, world_size=2, rollout_mode=RolloutMode.HYBRID)
    CheckpointEngineManager(made_of, SimpleNamespace(world_size=4), [replica])


def main():
    directory = probes_report.begin("trainer")
    report = {"chosen": choose(), "asked": generate()}
    train()
    import verl

    probes_report.end(directory, {**report, "version": verl.__version__})


if __name__ == "__main__":
    sys.exit(main())
