"""Drive the real classes of verl's asynchronous trainers with all probes on; report their events as JSON.

    python asynchronous_probes.py

`test_asynchronous_probes.py` reads the report.
"""

import asyncio
import sys
from types import SimpleNamespace

import probes_report

from verl_profiler import span
from verl_profiler.instrumentation import wrapping
from verl_profiler.recording import context


class Remote:
    """A method of an actor, run at once; its result can be awaited."""

    def __init__(self, answer):
        self.answer = answer

    async def remote(self, *args, **kwargs):
        return self.answer(*args, **kwargs)


def client_of(answers):
    """A client of verl's whose engine gives these answers."""
    from omegaconf import OmegaConf
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    outputs = iter(
        TokenOutput(
            token_ids=[7] * count, stop_reason=reason, extra_fields={"global_steps": version}
        )
        for count, reason, version in answers
    )
    server = SimpleNamespace(generate=Remote(lambda **_: next(outputs)))
    balancer = SimpleNamespace(
        require_acquire_fields=Remote(list),
        require_release_fields=Remote(list),
        acquire_server=Remote(lambda **_: ("server-0", server)),
        release_server=SimpleNamespace(remote=lambda **_: None),
    )
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"name": "x", "response_length": 64}}}
    )
    return llm_server.FullyAsyncLLMServerClient(config, balancer)


def generate(answers):
    """One generate call of a single-turn agent loop, whose engine gives these answers."""
    client = client_of(answers)
    request = context.Request(3)

    async def run():
        context.current_request.set(request)
        return await client.generate("r", prompt_ids=[1, 2], sampling_params={})

    output = asyncio.run(run())
    return [len(output.token_ids), request.turns, request.min_weight_version, request.attempts]


async def converse(client, conversation):
    """A framework without verl's agent loops: two generate calls, with a tool between them."""
    with span("task", request_id=conversation, uid="prompt", session=1):
        await client.generate("sticky", prompt_ids=[1, 2], sampling_params={})
        with span("look_up"):
            pass
        await client.generate("sticky", prompt_ids=[1, 2, 3], sampling_params={})


def framework():
    """One call that nobody names, and then two conversations at once, in a process without a step."""
    context.process.reset()
    client = client_of([(4, "completed", 6)] * 5)

    async def run():
        await client.generate("nobody's", prompt_ids=[1], sampling_params={})
        await asyncio.gather(converse(client, "first"), converse(client, "second"))
        return context.current_request.get() is None

    return asyncio.run(run())


def sample():
    """Let the real buffer evict a stale and a failed prompt, and hand over the other."""
    from verl.trainer.ppo.v1 import replay_buffer

    def prompt(status, step):
        return {"is_prompt": True, "status": status, "global_steps": step}

    def output(step, newest):
        return {
            "status": "success",
            "prompt_len": 4,
            "response_len": 6,
            "global_steps": step,
            "min_global_steps": step - 1,
            "max_global_steps": newest,
        }

    items = {
        "old": prompt("finished", 1),
        "old_0_0": output(1, 0),
        "old_1_0": output(1, 1),
        "good": prompt("finished", 2),
        "good_0_0": output(2, 2),
        "good_1_0": output(2, 1),
        "bad": prompt("failure", 3),
        "late": prompt("running", 3),
    }

    def clear(partition_id, keys):
        for key in keys:
            items.pop(key, None)

    replay_buffer.tq = SimpleNamespace(kv_list=lambda: {"train": dict(items)}, kv_clear=clear)
    refilled = []
    buffer = replay_buffer.ReplayBufferAsync(
        trainer_mode="separate_async",
        trainer_config={},
        max_off_policy_threshold=2,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=refilled.append,
    )
    buffer.sample(global_steps=3, partition_id="train", batch_size=1)
    return refilled


def replicas():
    """Switch a real separate trainer to rollout and back, with replicas that do nothing."""
    import ray
    from verl.checkpoint_engine import base
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    ray.get = lambda value: value
    workers = SimpleNamespace(world_size=4, update_weights=lambda **_: [])
    servers = [probes_report.Replica(0), probes_report.Replica(1)]
    balancer = SimpleNamespace(
        add_servers=SimpleNamespace(remote=lambda _: None),
        remove_servers=SimpleNamespace(remote=lambda _: None),
    )
    trainer = PPOTrainerSeparateAsync.__new__(PPOTrainerSeparateAsync)
    trainer.__dict__.update(
        global_steps=3,
        trainer_mode="separate_async",
        parameter_sync_step=2,
        local_trigger_step=1,
        hybrid_rollout_config=SimpleNamespace(enable_switch=False),
        timing_raw={},
        llm_server_manager=SimpleNamespace(
            rollout_replicas=servers, server_addresses=["a", "b"], server_handles=[1, 2]
        ),
        standalone_server_manager=SimpleNamespace(global_load_balancer=balancer),
    )
    context.process.hold_trainer(trainer)
    config = SimpleNamespace(backend="naive", custom_backend_module=None)
    trainer.checkpoint_manager = base.CheckpointEngineManager(config, workers, servers)
    trainer.switch_to_rollout()
    trainer.on_step_begin()
    return trainer


def main():
    directory = probes_report.begin("trainer")
    trainer = replicas()
    real_sleep = asyncio.sleep
    asyncio.sleep = lambda _: real_sleep(0)
    report = {
        "refilled": sample(),
        "aborted": generate([(3, "aborted", 1), (0, "aborted", 1), (2, "completed", 2)]),
        "whole": generate([(2, "completed", 2)]),
        "errors": dict(wrapping.status.errors),
        "trainer": trainer.global_steps,
        "framework": framework(),
    }
    probes_report.end(directory, report)


if __name__ == "__main__":
    sys.exit(main())
