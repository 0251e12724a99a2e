"""A run on nodes with disks of their own, whose events come to the driver's; prints one line of JSON.

    python shipping_nodes.py FOLDER

The nodes are raylets on this machine, each in mount and host-name namespaces of its own
(tests/capture/captures_nodes.py): node-two and node-three have disks of their own, node-four shares the
driver's.  node-three is killed in the middle of the run.  Then a second driver is killed, and
`collect --ray` gathers what it left.  Run by test_shipping_on_ray.py.
"""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import captures_nodes
import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_profiler
from verl_profiler.cli import main
from verl_profiler.launch import prepare
from verl_profiler.nodes import thread as ship
from verl_profiler.recording import recorder

SPANS = 200


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin detects its role."""

    async def work(self, step, spans=SPANS):
        """Record events of a step, and return the process's name and how many it wrote."""
        from verl_profiler import log_manager

        for number in range(spans):
            log_manager.log(
                None, event="looked", duration=0.001, extra={"number": number}, step=step
            )
        while recorder.active().waiting():
            time.sleep(0.01)
        active = recorder.active()
        return active.name, active.account()["events"]

    def stop(self):
        """Write what is left, the header too."""
        recorder.stop("exit")


@ray.remote(num_cpus=0, max_retries=0)
def files_of(directory):
    """Return the files of a run on this node, by name, with their digests."""
    root = Path(directory)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def at(node_id):
    """Return the options of what runs on a node."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def config(folder, address, name, every_s):
    """Return the part of main_ppo's config that recording needs."""
    return OmegaConf.create(
        {
            "profiler": {
                "output_dir": f"{folder}/logs/{name}",
                "events": {"ship_every_s": every_s},
            },
            "ray_kwargs": {"ray_init": {"address": address, "log_to_driver": False}},
        }
    )


def until(holds, seconds=150):
    """Wait until something is true; return it."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > end:
            raise TimeoutError(holds)
        time.sleep(0.05)
    return value


def size(path):
    """Return the size of a file, 0 without one."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def shipping_of(run):
    """Return the nodes of `shipping.json`, by host."""
    with contextlib.suppress(OSError, ValueError):
        return {
            node["host"]: node for node in json.loads((run / "shipping.json").read_text())["nodes"]
        }
    return {}


def end_node(process):
    """Kill a node as a power cut would: all of its processes at once."""
    os.killpg(process.pid, signal.SIGKILL)


def start_node(folder, host, address, *, own_disk=True):
    """Start a node in a process group of its own; return its process."""
    disk = f"mount -t tmpfs none {folder}/logs; " if own_disk else ""
    start = f"{captures_nodes.RAY} start --block --num-cpus=1 --disable-usage-stats"
    start += f" --object-store-memory=80000000 --include-log-monitor=false --address={address}"
    inside = f"hostname {host}; {disk}exec {start}"
    # With a process namespace of its own, no process survives its first one.
    argv = ["unshare", "-mupf", "--kill-child", "--mount-proc", "bash", "-c", inside]
    with (folder / f"{host}.log").open("w") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)


def first_driver(folder, address, found):
    """Run on three nodes; kill one of them; end."""
    run = folder / "logs" / "run"
    prepared = verl_profiler.prepare(config(folder, address, "run", 1.0))
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    processes = {}
    for host in ("node-two", "node-three", "node-four"):
        # One after the other: they choose names for their sockets in one folder.
        processes[host] = start_node(folder, host, address, own_disk=host != "node-four")
        try:
            alive = captures_nodes.wait_for(len(processes) + 1)
        except TimeoutError as error:
            raise TimeoutError((folder / f"{host}.log").read_text()[-2000:]) from error
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in alive}
    workers = {
        host: AgentLoopWorker.options(
            name=f"agent_loop_worker_{number}_ab", **at(nodes[host])
        ).remote()
        for number, host in enumerate(("node-two", "node-three", "node-four"))
    }
    two, three, four = workers.values()
    ray.get([worker.work.remote(1) for worker in workers.values()])
    file = run / "step_1" / "worker_0.jsonl"
    # While the run goes on.
    sizes = [until(lambda: size(file))]
    for _ in range(2):
        ray.get(two.work.remote(1))
        sizes.append(until(lambda: size(file) > sizes[-1] and size(file)))
    found["sizes"] = sizes
    until(lambda: size(run / "step_1" / "worker_1.jsonl"))
    # More than one piece.
    ray.get(two.work.remote(2, 70_000))
    # Whoever ships now has no time to ship more before the node dies.
    ship._thread._every_s = 3600.0
    time.sleep(2.5)
    until(lambda: not any(node.busy for node in ship._thread.nodes._nodes.values()))
    name, written = ray.get(three.work.remote(2))
    found["three"] = {"name": name, "written": written}
    # A light round brings its header.
    until(
        lambda: (
            json.loads((run / "processes" / f"{name}.json").read_text())["written_events"]
            >= written
        )
    )
    end_node(processes["node-three"])
    until(lambda: shipping_of(run).get("node-three", {}).get("state") == "left")
    ray.get([two.stop.remote(), four.stop.remote()])
    found["before"] = size(run / "step_2" / "worker_0.jsonl")
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        prepare.end(failed=False)
    found["printed"] = printed.getvalue()
    found["there"] = ray.get(files_of.options(**at(nodes["node-two"])).remote(str(run)))
    found["shipping"] = shipping_of(run)
    found["disks"] = ray.get(
        files_of.options(**at(nodes["node-four"])).remote(str(run))
    ) == ray.get(
        files_of.options(**at(next(n for h, n in nodes.items() if h not in workers))).remote(
            str(run)
        )
    )
    ray.shutdown()


def second_driver(folder, address):
    """Ship once, let a node write more, and be killed."""
    run = folder / "logs" / "killed"
    prepared = verl_profiler.prepare(config(folder, address, "killed", 1.0))
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    worker = AgentLoopWorker.options(
        name="agent_loop_worker_0_cd", **at(nodes["node-two"])
    ).remote()
    ray.get(worker.work.remote(1))
    until(lambda: size(run / "step_1" / "worker_0.jsonl"))
    ship._thread._ended.set()
    ship._thread.join()
    ray.get(worker.work.remote(2))
    print(json.dumps(ray.get(worker.work.remote(1))), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def drive(folder):
    """Run both."""
    found = {}
    (folder / "logs").mkdir()
    os.environ.update({"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled"})
    ship.LIGHT_S = 1.0
    captures_nodes.start_node(folder, "head")
    address = captures_nodes.head_address(folder)
    first_driver(folder, address, found)
    done = subprocess.run(
        [sys.executable, __file__, str(folder), address],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")},
    )
    if done.returncode != -signal.SIGKILL:
        raise RuntimeError(done.stdout + done.stderr)
    # Ray ends the processes of a driver that died, and these write their last lines.
    time.sleep(10)
    run = folder / "logs" / "killed"
    found["killed"] = json.loads(done.stdout.splitlines()[-1])
    found["killed_before"] = size(run / "step_2" / "worker_0.jsonl")
    os.environ["RAY_ADDRESS"] = address
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found["status"] = main(["collect", "--ray", str(run)])
    found["collected"] = printed.getvalue()
    ray.init(address=address, log_to_driver=False)
    node = next(n for n in ray.nodes() if n["NodeManagerHostname"] == "node-two" and n["Alive"])
    found["killed_there"] = ray.get(files_of.options(**at(node["NodeID"])).remote(str(run)))
    ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ship.LIGHT_S = 1.0
        second_driver(Path(sys.argv[1]), sys.argv[2])
    else:
        drive(Path(sys.argv[1]))
