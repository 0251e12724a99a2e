"""A run on two Ray nodes with clocks of their own, made of namespaces; prints where it recorded.

    python clock_cluster.py FOLDER

The second node has a network, a host name and a boot id of its own, a monotonic clock that is
1000 s ahead, and (by `sitecustomize.py`) a wall clock that is 37 ms behind: another host, as far
as one machine can be one.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import verl_profiler
from verl_profiler.nodes import clock
from verl_profiler.nodes import thread as nodes
from verl_profiler.recording import recorder

AHEAD_NS = 1000 * 10**9
BEHIND_NS = 37_000_000
RAY = str(Path(sys.executable).parent / "ray")
SPACE = f"vpclock{os.getpid() % 10_000}"
# Another test, or what a killed one left, has another network.
_NETWORK = f"10.213.{os.getpid() % 250}"
OWN, OTHER, PORT = f"{_NETWORK}.1", f"{_NETWORK}.2", 6479
OTHER_HOST = f"""
mount --bind {{boot}} /proc/sys/kernel/random/boot_id
hostname {SPACE}
exec "$@"
"""


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin detects its role; it never imports verl."""

    async def work(self, ahead_ns):
        """Record spans that say when they began by the driver's clock."""
        from verl_profiler import span

        for _ in range(20):
            async with span("looked", true_ns=time.perf_counter_ns() - ahead_ns):
                time.sleep(0.01)


@contextlib.contextmanager
def other_host(folder):
    """Join a network namespace to this one; give the words that run a program on the other host."""
    boot = folder / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    (folder / "sitecustomize.py").write_text(
        f"import time\n_time_ns = time.time_ns\ntime.time_ns = lambda: _time_ns() - {BEHIND_NS}\n"
    )
    link = ["ip", "link", "add", SPACE, "type", "veth", "peer", "name", "host", "netns", SPACE]
    inside = ["ip", "netns", "exec", SPACE]
    try:
        for command in (
            ["ip", "netns", "add", SPACE],
            link,
            ["ip", "addr", "add", f"{OWN}/30", "dev", SPACE],
            ["ip", "link", "set", SPACE, "up"],
            [*inside, "ip", "addr", "add", f"{OTHER}/30", "dev", "host"],
            [*inside, "ip", "link", "set", "host", "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        path = f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', '')}"
        namespaces = ["unshare", "-m", "-u", "-T", "--monotonic", str(AHEAD_NS // 10**9)]
        script = OTHER_HOST.format(boot=boot)
        yield [*inside, "env", path, *namespaces, "sh", "-ec", script, "sh"]
    finally:
        subprocess.run(["ip", "link", "del", SPACE], check=False)
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


@contextlib.contextmanager
def node(folder, *words, inside=()):
    """Run a raylet, and at the end everything that it started."""
    process = subprocess.Popen(
        [*inside, RAY, "start", "--block", "--num-cpus=1", *words],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(holds, seconds=120):
    """Wait for something that takes other processes a while."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(holds)
        time.sleep(0.05)


def listens():
    """Whether the head takes connections."""
    with contextlib.suppress(OSError), socket.create_connection((OWN, PORT), timeout=1):
        return True
    return False


def compared(times):
    """Whether the other clock was compared so often."""
    peers = clock.account().get("clock_exchange", {}).get("peers", [])
    return bool(peers) and len(peers[0]["samples"]) >= times


def record(folder):
    """Be a driver of a run on both nodes."""
    nodes._FIRST_S = (0.0, *[0.3] * 100)
    config = OmegaConf.create(
        {
            "profiler": {
                "output_dir": str(folder / "run"),
                "transfer_queue": {"trace": False},
            },
            "ray_kwargs": {"ray_init": {"address": f"{OWN}:{PORT}", "log_to_driver": False}},
        }
    )
    verl_profiler.prepare(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    wait_until(lambda: sum(each["Alive"] for each in ray.nodes()) == 2)
    actors = {
        each["NodeManagerAddress"]: AgentLoopWorker.options(
            name=f"agent_loop_worker_{number}_ab",
            scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False),
        ).remote()
        for number, each in enumerate(ray.nodes())
    }
    ahead = {OWN: 0, OTHER: AHEAD_NS}
    ray.get([actor.work.remote(ahead[address]) for address, actor in actors.items()])
    wait_until(lambda: compared(8))
    free = ray.available_resources()["CPU"]
    directory = recorder.active().directory
    ray.shutdown()
    # Some more comparisons would be due.
    time.sleep(0.7)
    return {
        "directory": str(directory),
        "free_cpus": free,
        "connected_again": ray.is_initialized(),
        "running": nodes._thread.is_alive(),
    }


def main():
    """Start both nodes, record, stop."""
    import json

    folder = Path(sys.argv[1])
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(other_host(folder))
        # In the default folder the address would outlive the cluster, and the next `ray.init` of
        # this machine fail.  Ray's sockets have no room for a long path.
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="clock-"))
        head = ["--head", f"--node-ip-address={OWN}", f"--port={PORT}", f"--temp-dir={temporary}"]
        stack.enter_context(node(folder, *head, "--include-dashboard=false"))
        wait_until(listens)
        words = [f"--address={OWN}:{PORT}", f"--node-ip-address={OTHER}"]
        stack.enter_context(node(folder, *words, inside=inside))
        print("RESULTS " + json.dumps(record(folder)), flush=True)


if __name__ == "__main__":
    main()
