"""A driver like verl's: prepare the config, `ray.init` from it, actors on every node.

    python injection_driver.py OUTPUT_DIR [ADDRESS] [hook]

Prints one line of JSON: what each actor's process found.
"""

import json
import os
import sys
import time

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_profiler


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin knows its role; it never imports verl."""

    async def look(self):
        from verl_profiler import span
        from verl_profiler.recording import recorder

        async with span("looked"):
            pass
        active = recorder.active()
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "plugin": "verl_profiler.plugin" in sys.modules,
            "settings": "VERL_PROFILER_SETTINGS" in os.environ,
            "recording": active is not None,
            "tracing": os.environ.get("TQ_TRACE_ENABLED"),
            "users_variable": os.environ.get("MINE"),
            "users_hook": os.environ.get("USERS_HOOK_RAN"),
            "verl": "verl" in sys.modules,
        }


def main():
    """Start everything and look."""
    output_dir, address, *rest = [*sys.argv[1:], ""]
    ray_init = {"runtime_env": {"env_vars": {"MINE": "yes"}}, "log_to_driver": False}
    if address and address != "local":
        ray_init["address"] = address
    else:
        ray_init.update(num_cpus=4, include_dashboard=False, address="local")
    if "hook" in rest:
        ray_init["runtime_env"]["worker_process_setup_hook"] = "injection_hook.hook"
    config = OmegaConf.create(
        {
            "profiler": {
                "output_dir": output_dir,
                "transfer_queue": {"trace": True},
            },
            "ray_kwargs": {"ray_init": ray_init},
        }
    )
    verl_profiler.prepare(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    actors = [
        AgentLoopWorker.options(
            name=f"agent_loop_worker_{number}_ab",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for number, node in enumerate(ray.nodes())
        if node["Alive"]
    ]
    found = ray.get([actor.look.remote() for actor in actors])
    print("FOUND " + json.dumps(found), flush=True)
    directory = json.loads(os.environ["VERL_PROFILER_SETTINGS"])["directory"]
    for _ in range(1200):
        if all(os.path.exists(f"{directory}/step_0/worker_{n}.jsonl") for n in range(len(actors))):
            break
        time.sleep(0.05)
    ray.shutdown()


main()
