"""What needs a real Ray cluster of several nodes, on one; prints a line of JSON for test_on_ray.py.

    python on_one_cluster.py FOLDER

node-two and node-three have disks of their own, node-four shares the driver's and has clocks of its own.
A driver records on all of them, and node-three is killed in the middle.  A second driver leaves events on
node-two, and `collect --ray` gathers them.  Then actors fail, a run is read by tasks, and actors are
created under a stand-in for nsys.
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

import ray
import reading_cluster
from omegaconf import OmegaConf
from ray_nodes import (
    AHEAD_NS,
    at,
    config,
    nodes_by_host,
    start_head,
    start_node,
    until,
    wait_for,
)

import verl_profiler
from verl_profiler.capture import actor_placement, node_check
from verl_profiler.capture.actor_placement import hook_creation
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.cli import main
from verl_profiler.launch import prepare
from verl_profiler.nodes import clock
from verl_profiler.nodes import thread as ship
from verl_profiler.recording import recorder
from verl_profiler.recording.open_calls import failure_of

SPANS = 200
HOSTS = ("node-two", "node-three", "node-four")
NSYS = """#!/bin/bash
# Logs its arguments, then runs the program as nsys would.
echo "$@" >> {log}
[ "$1" = --version ] && {{ echo "NVIDIA Nsight Systems version 2025.1"; exit 0; }}
shift
while [ $# -gt 0 ]; do case "$1" in --*=*) shift;; -?) shift 2;; *) break;; esac; done
WATCHED=1 exec "$@"
"""


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin detects its role; it never imports verl."""

    def arrived(self):
        """Return what of the driver's settings is here, and of the user's own."""
        return {
            "plugin": "verl_profiler.plugin" in sys.modules,
            "settings": "VERL_PROFILER_SETTINGS" in os.environ,
            "tracing": os.environ.get("TQ_TRACE_ENABLED"),
            "users": [os.environ.get(name) for name in ("MINE", "USERS_HOOK_RAN")],
            "verl": "verl" in sys.modules,
        }

    async def work(self, step, spans=SPANS, ahead_ns=0):
        """Record events of a step, and return the process's name and how many it wrote."""
        from verl_profiler import log_manager

        for number in range(spans):
            # It begins 1 ms before it is logged, by the driver's clock.
            begin = time.perf_counter_ns() - ahead_ns - 10**6
            extra = {"number": number, "true_ns": begin}
            log_manager.log(None, event="looked", duration=0.001, extra=extra, step=step)
        active = recorder.active()
        while active.waiting():
            time.sleep(0.01)
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


def files_on(node_id, run):
    """Return the files of a run on a node."""
    return ray.get(files_of.options(**at(node_id)).remote(str(run)))


def workers_on(nodes, hosts=HOSTS):
    """Start an agent-loop worker on each of these hosts."""
    return [
        AgentLoopWorker.options(name=f"agent_loop_worker_{number}_ab", **at(nodes[host])).remote()
        for number, host in enumerate(hosts)
    ]


def visit_each_second():
    """Have the nodes visited each second, from the beginning on."""
    ship._FIRST_S = ()
    ship.LIGHT_S = 1.0


def size(path):
    """Return the size of a file, 0 without one."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def shipping_of(run):
    """Return the nodes of `shipping.json`, by host."""
    with contextlib.suppress(OSError, ValueError):
        nodes = json.loads((run / "shipping.json").read_text())["nodes"]
        return {node["host"]: node for node in nodes}
    return {}


def wait_for_visits():
    """Wait until no node is being visited."""
    until(lambda: not any(node.busy for node in ship._thread.nodes._nodes.values()))


def ship_no_more():
    """Have the next shipments of events in an hour; clocks and headers go on."""
    # As a power cut would find it: no time to ship more.
    ship._thread._every_s = 3600.0
    time.sleep(2.0)
    wait_for_visits()


def compared(times):
    """Whether the other clock was compared so often."""
    peers = clock.account().get("clock_exchange", {}).get("peers", [])
    return bool(peers) and len(peers[0]["samples"]) >= times


def first_driver(folder, address, found):
    """Run on three nodes; kill one of them; end."""
    visit_each_second()
    run = folder / "logs" / "run"
    runtime_env = {"env_vars": {"MINE": "yes"}}
    runtime_env["worker_process_setup_hook"] = "users_hook.hook"
    profiler = {"events": {"ship_every_s": 1.0}, "transfer_queue": {"trace": True}}
    prepared = verl_profiler.prepare(config(folder, address, "run", runtime_env, profiler=profiler))
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    processes = {}
    for host in HOSTS:
        # One after the other: they choose names for their sockets in one folder.
        shares = host == "node-four"
        processes[host] = start_node(folder, host, address, own_disk=not shares, own_clocks=shares)
        try:
            wait_for(len(processes) + 1)
        except TimeoutError as error:
            raise TimeoutError((folder / f"{host}.log").read_text()[-2000:]) from error
    nodes = nodes_by_host()
    two, three, four = workers = workers_on(nodes)
    found["arrived"] = ray.get([worker.arrived.remote() for worker in workers])
    ray.get([two.work.remote(1), three.work.remote(1), four.work.remote(1, ahead_ns=AHEAD_NS)])
    file = run / "step_1" / "worker_0.jsonl"
    # While the run goes on.
    sizes = [until(lambda: size(file))]
    for _ in range(2):
        ray.get(two.work.remote(1))
        sizes.append(until(lambda: size(file) > sizes[-1] and size(file)))
    found["sizes"] = sizes
    until(lambda: size(run / "step_1" / "worker_1.jsonl"))
    # More than one piece.
    ray.get(two.work.remote(2, 40_000))
    ship_no_more()
    name, written = ray.get(three.work.remote(2))
    found["three"] = {"name": name, "written": written}
    # A light round brings its header.
    header = run / "processes" / f"{name}.json"
    until(lambda: json.loads(header.read_text())["written_events"] >= written)
    found["cpus"] = [each()["CPU"] for each in (ray.available_resources, ray.cluster_resources)]
    # All of its processes at once.
    os.killpg(processes["node-three"].pid, signal.SIGKILL)
    until(lambda: shipping_of(run).get("node-three", {}).get("state") == "left")
    until(lambda: compared(8))
    ray.get([two.stop.remote(), four.stop.remote()])
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        prepare.end(failed=False)
    found["printed"] = printed.getvalue()
    found["there"] = files_on(nodes["node-two"], run)
    found["shipping"] = shipping_of(run)
    (head,) = {*nodes} - {*HOSTS}
    found["disks"] = files_on(nodes["node-four"], run) == files_on(nodes[head], run)
    ray.shutdown()


def second_driver(folder, address):
    """Ship once, let a node write more, leave Ray, and be killed."""
    visit_each_second()
    run = folder / "logs" / "killed"
    prepared = verl_profiler.prepare(
        config(folder, address, "killed", profiler={"events": {"ship_every_s": 1.0}})
    )
    ray.init(**OmegaConf.to_container(prepared.ray_kwargs.ray_init))
    (worker,) = workers_on(nodes_by_host(), HOSTS[:1])
    ray.get(worker.work.remote(1))
    until(lambda: size(run / "step_1" / "worker_0.jsonl"))
    ship_no_more()
    ray.get(worker.work.remote(2))
    _, written = ray.get(worker.work.remote(1))
    # Between two visits: Ray may exit a process of which a thread calls it while it shuts down.
    ship.LIGHT_S = 3.0
    time.sleep(1.2)
    wait_for_visits()
    ray.shutdown()
    # Another visit would be due.
    time.sleep(3.5)
    found = {"connected": ray.is_initialized(), "visits": ship._thread.is_alive()}
    print(json.dumps({"written": written, **found}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(title):
    """Whether a process of this namespace has a title that begins so."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(title):
                return True
    return False


def gather(folder, address, found):
    """Gather what the second driver left."""
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
    # Ray ends the processes of a driver that left, and these write their last lines.
    until(lambda: not is_running(b"ray::AgentLoopWorker"), 60)
    run = folder / "logs" / "killed"
    found["second"] = json.loads(done.stdout.splitlines()[-1])
    found["killed_before"] = size(run / "step_2" / "worker_0.jsonl")
    os.environ["RAY_ADDRESS"] = address
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found["status"] = main(["collect", "--ray", str(run)])
    found["collected"] = printed.getvalue()
    ray.init(address=address, log_to_driver=False)
    found["killed_there"] = files_on(nodes_by_host()["node-two"], run)


@ray.remote(num_cpus=0)
class Failing:
    """Fails, or is killed."""

    def place(self):
        """Return what a failure should name."""
        return os.getpid(), ray.util.get_node_ip_address()

    def fail(self, _prompt):
        """Raise something of the user's."""
        raise ValueError("my secret")

    def ask(self, other):
        """Fail in a task of a task."""
        return ray.get(other.fail.remote("my secret"))

    def die(self):
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)


def fail(found):
    """Note what is recorded of failures: of a task in a task, and of an actor that was killed."""
    inner, outer = Failing.remote(), Failing.remote()
    found["failing"] = ray.get(inner.place.remote())
    found["failures"] = []
    for call in (lambda: outer.ask.remote(inner), inner.die.remote):
        try:
            ray.get(call())
        except Exception as error:
            found["failures"].append(failure_of(error))


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
        """Return whether the stand-in started this process, and its interpreter."""
        return bool(os.environ.get("WATCHED")), sys.executable


class TaskRunner(Seen):
    """Makes the others, as verl's TaskRunner does."""

    def make(self, folder):
        """Return which children run under the stand-in."""
        hook_creation(make_plan(folder))
        engine = ray.remote(Seen)
        # As verl does it on CUDA, for every rank.
        verls = {"env_vars": {"RANK": "0", "WG_PREFIX": "x"}, "nsight": {"t": "nvtx"}}
        handles = {
            "engine 0": engine.options(name="sglang_server_0_0").remote(),
            "engine 1": engine.options(name="sglang_server_1_0").remote(),
            "nameless": ray.remote(Seen).remote(),
            "worker": ray.remote(Seen).options(runtime_env=verls).remote(),
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


def place(folder, found):
    """Note which processes run under the stand-in for nsys, and what the check of the nodes reports."""
    plan = make_plan(folder)
    found["problems"] = [problems for problems, _ in node_check._check_each(plan).values()]
    hook_creation(plan, lambda: True)
    runner = ray.remote(TaskRunner).remote()
    found["watched"] = {"trainer": ray.get(runner.watched.remote(), timeout=120)}
    children, found["reached"] = ray.get(runner.make.remote(str(folder)), timeout=200)
    found["watched"] |= children


def drive(folder):
    """Do all of it."""
    found = {}
    (folder / "logs").mkdir()
    tools = folder / "bin"
    tools.mkdir()
    # A `python` that cannot be the right one: captured processes must not take it.
    for name, text in (("nsys", NSYS.format(log=folder / "log")), ("python", "#!/bin/sh\nexit 3")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    # With Ray's own priority, others of this machine would get all of the time.
    priority = {"RAY_worker_niceness": "0"}
    os.environ.update({"VERL_PLATFORM": "cpu", "RAY_AUTH_MODE": "disabled", **priority})
    address = start_head(folder)
    first_driver(folder, address, found)
    gather(folder, address, found)
    fail(found)
    found["read"] = reading_cluster.read(Path(os.environ["RUN_TO_READ"]), raylets=2, few=True)
    place(folder, found)
    ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        second_driver(Path(sys.argv[1]), sys.argv[2])
    else:
        drive(Path(sys.argv[1]))
