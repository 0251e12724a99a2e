"""Two nodes with disks of their own, and a run that is captured on both; then a node without nsys.

    python captures_nodes.py FOLDER

Run by test_on_ray.py with a real nsys on PATH; prints one line of JSON.
"""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray_nodes import at, config, start_head, start_node, wait_for

import verl_profiler
from verl_profiler.capture import node_check, probes, session
from verl_profiler.capture.plan import decoded_plan
from verl_profiler.cli import main
from verl_profiler.errors import ConfigError
from verl_profiler.launch import prepare

STEPS = (1, 2)


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that it is captured as one."""

    async def work(self):
        from verl_profiler import span

        async with span("looked"):
            pass
        return socket.gethostname()


@ray.remote(num_cpus=0)
class TaskRunner:
    """Makes a worker on each node, and captures the steps as verl's trainer does."""

    def run(self, nodes):
        """Return on which host each worker was."""
        workers = [
            AgentLoopWorker.options(name=f"agent_loop_worker_{number}_ab", **at(node)).remote()
            for number, node in enumerate(nodes)
        ]
        hosts = ray.get([worker.work.remote() for worker in workers])
        for step in STEPS:
            session.start(step=step)
            probes._call_actors(session.start, step)
            ray.get([worker.work.remote() for worker in workers])
            session.stop()
            probes._call_actors(session.stop)
        return hosts


def drive(folder):
    """Run, and print what was gathered and the check's message about the third node."""
    found = {}
    (folder / "logs").mkdir()
    os.environ.update({"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled"})
    address = start_head(folder)
    start_node(folder, "node-two", address)
    captured = {
        "trainer": {"profile_steps": list(STEPS), "nnodes": 2, "n_gpus_per_node": 1},
        "global_profiler": {"tool": None, "steps": None},
        "profiler": {"nsight": {"roles": {"agent_loop": True}}},
    }
    prepared = verl_profiler.prepare(config(folder, address, "run", **captured))
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    nodes = wait_for(2)
    runner = TaskRunner.remote()
    found["hosts"] = ray.get(runner.run.remote([node["NodeID"] for node in nodes]))
    plan = decoded_plan(prepare.recorder.active().config.capture_plan)
    run = folder / "logs" / "run"
    prepare.end(failed=False)
    # All that is on PATH, but no nsys.
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(f for f in folders if not shutil.which("nsys", path=f))
    start_node(folder, "node-three", address, PATH=path)
    wait_for(3)
    try:
        node_check.check_nodes(plan)
    except ConfigError as error:
        found["refused"] = str(error)
    ray.shutdown()
    # As after a run that died: a report that is on the second node's disk alone.
    lost = list((run / "nsight").glob("agent_loop_1.step2.*"))
    for path in lost:
        path.unlink()
    os.environ["RAY_ADDRESS"] = address
    found["status"] = main(["collect", "--ray", str(run)])
    found["back"] = len(lost) == 2 and all(path.exists() for path in lost)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
