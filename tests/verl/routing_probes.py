"""Let verl's load balancer choose replicas with all probes on; report the events as JSON.

    python routing_probes.py [SHARE]

SHARE is that of the requests with details.  `test_routing_probes.py` reads the report.
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
    chosen += [server, by_hash.acquire_server(same)[0]]
    alone = GlobalRequestLoadBalancer({"east": ""})
    chosen += [alone.acquire_server(request)[0] for request in ("six", "six")]
    alone.add_servers({"west": ""})
    alone.remove_servers(["east"])
    alone.add_servers({"south": ""})
    # Its replica is gone: it is chosen anew, among the least loaded.
    chosen += [alone.acquire_server(request)[0] for request in ("six", "seven", "seven")]
    return chosen, same


def main():
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    directory = probes_report.begin("load_balancer", detail_share=share)
    chosen, same = choose()
    probes_report.end(directory, {"chosen": chosen, "same": same})


if __name__ == "__main__":
    sys.exit(main())
