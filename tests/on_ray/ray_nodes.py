"""Ray nodes that are namespaces of this machine, with host names, disks and clocks of their own."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RAY = str(Path(sys.executable).parent / "ray")
# The clocks of a node that has its own: monotonic and wall.
AHEAD_NS = 1000 * 10**9
BEHIND_NS = 37_000_000


def _started(folder, host, argv, **environment):
    with (folder / f"{host}.log").open("w") as log:
        return subprocess.Popen(
            argv,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _ray_start(*words):
    argv = [_RAY, "start", "--block", "--num-cpus=1", "--disable-usage-stats", *words]
    return [*argv, "--object-store-memory=80000000", "--include-log-monitor=false"]


def start_head(folder):
    """Start the head on this disk; return its address."""
    head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    # An autoscaler takes 3 s of CPU to start.
    head.append("--no-monitor")
    # It ends with the namespace that the script runs in.
    _started(folder, "head", _ray_start(*head))
    return _head_address(folder)


def start_node(folder, host, address, *, own_disk=True, own_clocks=False, **environment):
    """Start a node in a process group of its own; return its process.

    What is written under FOLDER/logs on a node with a disk of its own is not on the others.  Own clocks
    are a boot id, a monotonic clock that is ahead, and (by `sitecustomize.py`) a wall clock that is behind.
    """
    inside = [f"hostname {host}"]
    # With a process namespace of its own, no process survives its first one.
    spaces = ["-mupf", "--kill-child", "--mount-proc"]
    if own_disk:
        inside.append(f"mount -t tmpfs none {folder}/logs")
    if own_clocks:
        place = folder / host
        place.mkdir()
        (place / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (place / "sitecustomize.py").write_text(
            "import time\n_time_ns = time.time_ns\n"
            f"time.time_ns = lambda: _time_ns() - {BEHIND_NS}\n"
        )
        inside.append(f"mount --bind {place}/boot_id /proc/sys/kernel/random/boot_id")
        spaces += ["-T", "--monotonic", str(AHEAD_NS // 10**9)]
        environment["PYTHONPATH"] = f"{place}:{os.environ.get('PYTHONPATH', '')}"
    inside.append("exec " + " ".join(_ray_start(f"--address={address}")))
    return _started(
        folder, host, ["unshare", *spaces, "bash", "-ec", "; ".join(inside)], **environment
    )


def _head_address(folder):
    """Wait for the head, and return its address."""
    file = folder / "ray" / "ray_current_cluster"
    try:
        # Ray creates the file before it writes the address.
        return until(lambda: file.exists() and file.read_text().strip(), 60)
    except TimeoutError as error:
        raise TimeoutError((folder / "head.log").read_text()[-2000:]) from error


def until(holds, seconds=150):
    """Wait until something is true; return it."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > end:
            raise TimeoutError(holds)
        time.sleep(0.05)
    return value


def wait_for(count):
    """Wait until so many nodes are alive; return them, the head first."""

    def alive():
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return len(nodes) == count and nodes

    return sorted(until(alive), key=lambda node: "node:__internal_head__" not in node["Resources"])


def nodes_by_host():
    """Return the ids of the nodes that are alive, by host."""
    return {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def at(node_id):
    """Return the options of what runs on a node."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def config(folder, address, name, runtime_env=None, **more):
    """Return the part of main_ppo's config that recording needs."""
    profiler = {"output_dir": f"{folder}/logs/{name}", **more.pop("profiler")}
    ray_init = {"address": address, "log_to_driver": False}
    if runtime_env:
        ray_init["runtime_env"] = runtime_env
    return OmegaConf.create({"profiler": profiler, "ray_kwargs": {"ray_init": ray_init}, **more})
