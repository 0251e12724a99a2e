"""A Ray cluster of one node with actors that hang, that died and that live; prints what is on record of them.

python ray_actors.py
"""

import contextlib
import json
import os
import time

import ray

from verl_profiler.recording import ray_view


@ray.remote(num_cpus=0)
class Busy:
    def wait(self):
        time.sleep(300)

    def pid(self):
        return os.getpid()


@ray.remote(num_cpus=0)
class Dying:
    def die(self):
        os._exit(1)


def main():
    before = ray_view.ray_actors() | ray_view.ray_calls(4)
    ray.init(address="local", num_cpus=2, logging_level="ERROR")
    busy, dying = Busy.remote(), Dying.remote()
    pid = ray.get(busy.pid.remote())
    calls = [busy.wait.remote() for _ in range(3)]
    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(dying.die.remote())
    found = {}
    # What workers report of their calls takes a second to arrive.
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = ray_view.ray_actors()
        try:
            found |= ray_view.ray_calls(4)
        except Exception as error:
            found["calls_error"] = type(error).__name__
        if found["not_alive"] and sum(row["calls"] for row in found.get("calls", ())) >= 3:
            break
        time.sleep(0.5)
    print(
        "FOUND " + json.dumps({"before": before, "found": found, "pid": pid, "calls": len(calls)})
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
