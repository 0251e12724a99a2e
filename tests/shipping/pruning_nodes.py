"""A run with `keep_steps` on nodes with disks of their own; prints one line of JSON.

    python pruning_nodes.py FOLDER

The trainer, on the driver's node, decides which steps are kept; node-two and node-three have disks of
their own and follow.  node-three gets the last decision, and is killed before its process follows it.
Run by test_pruning_on_ray.py, in namespaces as shipping_nodes.py.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path

import captures_nodes
import ray
import shipping_nodes
from omegaconf import OmegaConf
from shipping_nodes import at, end_node, files_of, shipping_of, start_node, until

import verl_profiler
from verl_profiler.launch import prepare, ship
from verl_profiler.recording import recorder

STEPS = 13
SLOW = 3
SPANS = 50


def written():
    while recorder.active().waiting():
        time.sleep(0.01)
    # The next flush prunes.
    time.sleep(0.3)


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin detects its role."""

    def work(self, step, name):
        """Record requests of a step."""
        from verl_profiler import log_manager

        for number in range(SPANS):
            extra = {"request_id": f"{name}-{step}-{number}"}
            log_manager.log(None, event="request_start", extra=extra, step=step)
            log_manager.log(None, event="looked", duration=0.001, extra=extra, step=step)
            extra |= {"turns": 1, "prompt_tokens": 3, "response_tokens": 5}
            log_manager.log(None, event="request", duration=0.002, extra=extra, step=step)
        written()
        return recorder.active().name

    def stop(self):
        recorder.stop("exit")


@ray.remote(num_cpus=0)
class TaskRunner:
    """Named as verl's: the process that decides."""

    def end(self, step):
        from verl_profiler import log_manager

        log_manager.log(None, event="step", duration=9.0 if step == SLOW else 1.0, step=step)
        written()

    def stop(self):
        recorder.stop("exit")


def decided(there):
    """Return up to which step a `retention.json` decides."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((there / "retention.json").read_text())["until"]
    return -1


def drive(folder):
    (folder / "logs").mkdir()
    os.environ.update({"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled"})
    ship.LIGHT_S = 1.0
    captures_nodes.start_node(folder, "head")
    address = captures_nodes.head_address(folder)
    run, found = folder / "logs" / "run", {}
    config = shipping_nodes.config(folder, address, "run", 1.0)
    keep = {"keep_steps": {"first": 1, "last": 5, "slow": 1}}
    config = OmegaConf.merge(config, {"profiler": {"events": keep}})
    prepared = verl_profiler.prepare(config)
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    processes = {}
    for host in ("node-two", "node-three"):
        processes[host] = start_node(folder, host, address)
        alive = captures_nodes.wait_for(len(processes) + 1)
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in alive}
    here = next(each for host, each in nodes.items() if host not in processes)
    trainer = TaskRunner.options(**at(here)).remote()
    two, three = workers = [
        AgentLoopWorker.options(name=f"agent_loop_worker_{number}_ab", **at(nodes[host])).remote()
        for number, host in enumerate(processes)
    ]

    def files(host):
        return ray.get(files_of.options(**at(nodes[host])).remote(str(run)))

    def step(number, members):
        names = ray.get([each.work.remote(number, f"w{i}") for i, each in enumerate(members)])
        ray.get(trainer.end.remote(number))
        return names

    for number in range(1, STEPS):
        found["names"] = step(number, workers)
    # 2, 4, 5, 6 and 7 are over, and neither the first nor the slowest.
    found["until"] = decided(run)
    # Each process reads the decision when it begins a step.
    for host in processes:
        until(lambda host=host: "retention.json" in files(host))
    time.sleep(3)
    step(STEPS, workers)
    for each in found["names"]:
        until(lambda each=each: not list(run.glob(f"step_[24567]/{each}.jsonl")))
        until(lambda each=each: (run / f"step_{STEPS}" / f"{each}.jsonl").exists())
    found["three_pruned"] = sorted(files("node-three"))
    # The decision that step 8 is over, too, reaches node-three, whose process begins no other step.
    digest = hashlib.sha256((run / "retention.json").read_bytes()).hexdigest()
    until(lambda: files("node-three").get("retention.json") == digest)
    found["decided_there"] = decided(run)
    found["three_before"] = sorted(files("node-three"))
    end_node(processes["node-three"])
    until(lambda: shipping_of(run).get("node-three", {}).get("state") == "left")
    ray.get(two.work.remote(STEPS + 1, "w0"))
    until(lambda: not (run / "step_8" / f"{found['names'][0]}.jsonl").exists())
    ray.get([two.stop.remote(), trainer.stop.remote()])
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        prepare.end(failed=False)
    found["printed"] = printed.getvalue()
    found["two"] = files("node-two")
    ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
