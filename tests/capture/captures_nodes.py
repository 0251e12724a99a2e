"""Two nodes with disks of their own, and a run that is captured on both; then a node without nsys.

    python captures_nodes.py FOLDER

The nodes are raylets on this machine, each in mount and host-name namespaces of its own: what is
written under FOLDER/logs on one of them is not on the others.  Run by test_captures_on_ray.py with a
real nsys on PATH; prints one line of JSON.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_profiler
from verl_profiler.capture import node_check, probes, session
from verl_profiler.capture.plan import decoded_plan
from verl_profiler.cli import main
from verl_profiler.errors import ConfigError
from verl_profiler.launch import prepare

STEPS = (1, 2)
RAY = str(Path(sys.executable).parent / "ray")


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
            AgentLoopWorker.options(
                name=f"agent_loop_worker_{number}_ab",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
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


def start_node(folder, host, address=None, path=None):
    """Start a node with its own host name and disk; without `address` the head, on this disk."""
    argv = [RAY, "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    argv += ["--object-store-memory=80000000", "--include-log-monitor=false"]
    if address is None:
        argv += ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    else:
        disk = f"hostname {host}; mount -t tmpfs none {folder}/logs"
        argv = [
            "unshare",
            "-mu",
            "bash",
            "-c",
            f"{disk}; exec {' '.join(argv)} --address={address}",
        ]
    # It ends with the namespace that this program runs in.
    with (folder / f"{host}.log").open("w") as log:
        subprocess.Popen(
            argv, stdout=log, stderr=log, env={**os.environ, "PATH": path or os.environ["PATH"]}
        )


def head_address(folder):
    """Wait for the head, and return its address."""
    file = folder / "ray" / "ray_current_cluster"
    for _ in range(600):
        # Ray creates the file before it writes the address.
        if file.exists() and (address := file.read_text().strip()):
            return address
        time.sleep(0.1)
    raise TimeoutError((folder / "head.log").read_text()[-2000:])


def wait_for(count):
    """Wait until so many nodes are alive; return them, the head first."""
    for _ in range(600):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) == count:
            return sorted(nodes, key=lambda node: "node:__internal_head__" not in node["Resources"])
        time.sleep(0.1)
    raise TimeoutError([node["NodeManagerHostname"] for node in ray.nodes()])


def config(folder, address):
    """Return the part of main_ppo's config that captures need."""
    return OmegaConf.create(
        {
            "trainer": {"profile_steps": list(STEPS), "nnodes": 2, "n_gpus_per_node": 1},
            "global_profiler": {"tool": None, "steps": None},
            "profiler": {
                "output_dir": f"{folder}/logs/run",
                "nsight": {"roles": {"agent_loop": True}},
            },
            "ray_kwargs": {"ray_init": {"address": address, "log_to_driver": False}},
        }
    )


def drive(folder):
    """Run, and print what was gathered and the check's message about the third node."""
    found = {}
    (folder / "logs").mkdir()
    os.environ.update({"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled"})
    start_node(folder, "head")
    address = head_address(folder)
    start_node(folder, "node-two", address)
    prepared = verl_profiler.prepare(config(folder, address))
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
    start_node(folder, "node-three", address, path)
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
