"""Let verl's load balancer choose replicas with all probes on; report the events as JSON.

    python routing_probes.py

`test_routing_probes.py` reads the report.
"""

import json
import sys
import tempfile
from pathlib import Path

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.probes import all_probes
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig


def choose():
    """Return the servers that verl chose, call by call."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    balancer = GlobalRequestLoadBalancer({"east": "actor", "west": "actor"})
    chosen = [balancer.acquire_server(request)[0] for request in ("one", "two", "one")]
    balancer.release_server(chosen[1])
    chosen += [balancer.acquire_server(request)[0] for request in ("one", "three")]
    balancer.remove_servers(["east", "west"])
    try:
        balancer.acquire_server("four")
    except RuntimeError:
        chosen.append(None)
    by_hash = GlobalRequestLoadBalancer({"east": "", "west": ""}, full_determinism=True)
    server = by_hash.acquire_server("five")[0]
    numbers = (number for number in range(1000) if hash(str(number)) % 2 == hash("five") % 2)
    same = str(next(numbers))
    return [*chosen, server, by_hash.acquire_server(same)[0]], same


def main():
    directory = tempfile.mkdtemp()
    settings = WorkerConfig(directory, take_anchor(), EventSettings(flush_interval_s=0.1))
    recorder.start(settings, lambda: Identity("load_balancer", 0), dict)
    placing.install(all_probes())
    chosen, same = choose()
    report = {"chosen": chosen, "same": same, "errors": dict(wrapping.status.errors)}
    recorder.stop()
    report["events"] = [
        json.loads(line)
        for path in sorted(Path(directory).glob("step_*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
