"""A driver on a real Ray cluster with a stand-in for nsys; prints who was started under it.

Run by test_captures_on_ray.py in a process of its own, with a folder as the argument.
"""

import json
import os
import sys
from pathlib import Path

import ray

from verl_profiler.capture import actor_placement, node_check
from verl_profiler.capture.actor_placement import hook_creation
from verl_profiler.capture.plan import Plan, RoleCapture

STAND_IN = """#!/bin/bash
# Logs its arguments, then runs the program as nsys would.
echo "$@" >> {log}
[ "$1" = --version ] && {{ echo "NVIDIA Nsight Systems version 2025.1"; exit 0; }}
shift
while [ $# -gt 0 ]; do case "$1" in --*=*) shift;; -?) shift 2;; *) break;; esac; done
WATCHED=1 exec "$@"
"""


def make_plan(folder):
    """Return a plan for the trainer and engine 1."""

    def options(role):
        return {"trace": "nvtx", "capture-range": "nvtx", "o": f"{folder}/raw/{role}_%h_%p"}

    roles = {
        "trainer": RoleCapture(None, options("trainer")),
        "engine": RoleCapture((1,), options("engine")),
    }
    return Plan("nsys", (1,), False, f"{folder}/raw", f"{folder}/j", roles)


class Seen:
    """Reports how its process was started."""

    def watched(self):
        """Whether the stand-in started this process, and with which interpreter."""
        return bool(os.environ.get("WATCHED")), sys.executable


class TaskRunner(Seen):
    """Makes the others, as verl's TaskRunner does."""

    def make(self, folder):
        """Return which children run under the stand-in."""
        hook_creation(make_plan(folder))
        engine = ray.remote(Seen)
        handles = {
            "engine 0": engine.options(name="sglang_server_0_0").remote(),
            "engine 1": engine.options(name="sglang_server_1_0").remote(),
            "nameless": ray.remote(Seen).remote(),
            # As verl does it on CUDA, for every rank.
            "worker": ray.remote(Seen)
            .options(
                runtime_env={"env_vars": {"RANK": "0", "WG_PREFIX": "x"}, "nsight": {"t": "nvtx"}}
            )
            .remote(),
        }
        found = {name: ray.get(handle.watched.remote()) for name, handle in handles.items()}
        task = ray.remote(lambda: (bool(os.environ.get("WATCHED")), sys.executable))
        found["task"] = ray.get(task.remote())
        # As the trainer calls actors that it may have lost.
        reached = {}
        for role, rank, reference in actor_placement.captured_actors:
            reached[f"{role} {rank}"] = ray.get(reference().__ray_call__.remote(_pid)) is not None
        return found, reached


def _pid(_instance):
    return os.getpid()


def main(folder):
    """Print, as one line of JSON, which processes ran under nsys, and the node's problems."""
    folder = Path(folder)
    tools = folder / "bin"
    tools.mkdir()
    (tools / "nsys").write_text(STAND_IN.format(log=folder / "log"))
    (tools / "nsys").chmod(0o755)
    # A `python` that cannot be the right one: captured processes must not take it.
    (tools / "python").write_text("#!/bin/bash\nexit 3\n")
    (tools / "python").chmod(0o755)
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    plan = make_plan(folder)
    reports = node_check._probe_nodes(plan)
    problems = [node_check.problems_of(report, plan) for report in reports.values()]
    hook_creation(plan, lambda: True)
    runner = ray.remote(TaskRunner).remote()
    found = {"trainer": ray.get(runner.watched.remote(), timeout=120)}
    children, reached = ray.get(runner.make.remote(str(folder)), timeout=200)
    print(json.dumps({"watched": {**found, **children}, "reached": reached, "problems": problems}))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
