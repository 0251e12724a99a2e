"""A Ray cluster of two nodes, whose clocks a driver compares as it does in a run.

    python clock_cluster.py ADDRESS [OTHER_ADDRESS]

With two addresses the second node lives in a network namespace and in a time namespace of its own,
in which the monotonic clock is 1000 s ahead: another host, as far as one machine can be one.  With
one it is a second raylet, whose clock is the driver's.  Prints what the driver found.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray

from verl_profiler import clock_exchange

RAY = str(Path(sys.executable).parent / "ray")
SPACE = f"vpclock{os.getpid() % 10_000}"
PORT = 6479


@contextlib.contextmanager
def other_host(own, other):
    """Make a network namespace that is joined to this one."""
    run = ["ip", "netns", "exec", SPACE, "ip"]
    commands = [
        ["ip", "netns", "add", SPACE],
        ["ip", "link", "add", SPACE, "type", "veth", "peer", "name", "host", "netns", SPACE],
        ["ip", "addr", "add", f"{own}/30", "dev", SPACE],
        ["ip", "link", "set", SPACE, "up"],
        [*run, "addr", "add", f"{other}/30", "dev", "host"],
        [*run, "link", "set", "host", "up"],
        [*run, "link", "set", "lo", "up"],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield ["ip", "netns", "exec", SPACE, "unshare", "-T", "--monotonic", "1000"]
    finally:
        subprocess.run(["ip", "link", "del", SPACE], check=False)
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


@contextlib.contextmanager
def node(*words, inside=()):
    """Run a raylet, and at the end everything that it started."""
    process = subprocess.Popen(
        [*inside, RAY, "start", "--block", "--num-cpus=1", *words],
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def compared(address):
    """Compare clocks with both nodes some times; return what was found."""
    for _ in range(60):
        with contextlib.suppress(ConnectionError, RuntimeError):
            ray.init(address=address)
            break
        time.sleep(1)
    while len([each for each in ray.nodes() if each["Alive"]]) < 2:
        time.sleep(0.5)
    # All nodes are of one boot here: tell them apart by their actor.
    asked = clock_exchange._asked
    clock_exchange._asked = lambda ray, peer: ((peer._actor_id.hex(), ""), asked(ray, peer)[1])
    clock_exchange._FIRST_S = (0.0, *[1.0] * 20)
    cpus = ray.available_resources()["CPU"]
    clock_exchange.start(ray)
    deadline = time.monotonic() + 150
    peers = []
    while time.monotonic() < deadline and (
        len(peers) < 2 or min(len(peer["samples"]) for peer in peers) < 6
    ):
        time.sleep(0.2)
        peers = clock_exchange.account().get("clock_exchange", {}).get("peers", [])
    left = ray.available_resources()["CPU"]
    clock_exchange.stop()
    running = [each.name for each in threading.enumerate() if "clock exchange" in each.name]
    ray.shutdown()
    return {"peers": peers, "cpus_untouched": cpus == left, "running": running}


def main():
    """Start both nodes, compare, stop."""
    own, other = [*sys.argv[1:], None][:2]
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(other_host(own, other)) if other else ()
        head = ["--head", f"--node-ip-address={own}", f"--port={PORT}"]
        stack.enter_context(node(*head, "--include-dashboard=false"))
        time.sleep(5)
        address = f"{own}:{PORT}"
        stack.enter_context(
            node(f"--address={address}", f"--node-ip-address={other or own}", inside=inside)
        )
        print("RESULTS " + json.dumps(compared(address)), flush=True)


main()
