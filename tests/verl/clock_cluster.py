"""Two raylets on one machine, whose clocks a driver compares as it does on a cluster.

    python clock_cluster.py

Prints what the driver's header would say.  The driver takes itself for another boot, since both
raylets are on its own kernel, so the truth is that no clock is ahead.
"""

import json
import sys
import threading
import time

import ray
from ray.cluster_utils import Cluster

from verl_profiler import clock_exchange


def main():
    """Start the cluster, compare clocks for some seconds, stop."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address)
        clock_exchange.boot_id = lambda: "the driver's"
        clock_exchange._FIRST_S = (0.0, 1.0, 1.0, 1.0, 1.0)
        before = ray.available_resources()
        clock_exchange.start(ray)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = clock_exchange.account().get("clock_exchange", {"peers": []})["peers"]
            # Two nodes, and both say the same boot.
            if found and len(found[0]["samples"]) >= 8:
                break
            time.sleep(0.2)
        actors = ray._private.state.actors().values()
        held = {name: ray.available_resources().get(name) == before[name] for name in ("CPU",)}
        clock_exchange.stop()
        running = [t.name for t in threading.enumerate() if "clock exchange" in t.name]
        result = {
            "exchange": clock_exchange.account(),
            "actors": len(actors),
            "cpus_untouched": held["CPU"],
            "running": running,
        }
        print("RESULTS " + json.dumps(result), flush=True)
        ray.shutdown()
    finally:
        cluster.shutdown()


main()
sys.exit(0)
