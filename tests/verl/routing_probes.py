"""Let verl's load balancer choose replicas with all probes on; report the events as JSON.

    python routing_probes.py

`test_routing_probes.py` reads the report.
"""

import sys

import probes_report


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
    directory = probes_report.begin("load_balancer")
    chosen, same = choose()
    probes_report.end(directory, {"chosen": chosen, "same": same})


if __name__ == "__main__":
    sys.exit(main())
