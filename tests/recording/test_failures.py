"""What is taken from exceptions: types, processes and known causes, never the users' words."""

import os
import signal
import time

import pytest

from verl_profiler.recording.failures import failure_of

# As ray 2.55 writes it for an actor that got SIGKILL.
DIED = (
    "The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: create_colocated_worker_cls_fused.<locals>.FusedWorker\n"
    "\tactor_id: 3131\n\tpid: 88\n\tname: AbCd12FusedWorker_0:1\n\tnamespace: 0a-b\n\tip: 10.0.0.7\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are "
    "some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called."
)
EXIT = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2"
)


class ActorDiedError(Exception):
    """Has the name of Ray's."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("my secret prompt"), {"error": "ValueError"}),
        (
            ActorDiedError(DIED),
            {"error": "ActorDiedError", "pid": 88, "ip": "10.0.0.7", "reason": EXIT},
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.1 GiB"),
            {
                "error": "RuntimeError",
                "reason": "CUDA out of memory. Tried to allocate 2.50 GiB",
            },
        ),
        (
            OSError(28, "No space left on device", "/data/my-user/ckpt"),
            {"error": "OSError", "reason": "No space left on device"},
        ),
        (KeyboardInterrupt(), {"error": "KeyboardInterrupt"}),
    ],
)
def test_types_and_known_causes_are_taken(error, expected):
    """No message as such, and no path."""
    assert expected == failure_of(error)


def test_an_exception_that_cannot_be_written_has_its_type():
    """Whatever its `__str__` does."""

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert {"error": "Odd"} == failure_of(Odd())


@pytest.mark.ray
def test_rays_own_exceptions_name_the_process(monkeypatch):
    """Of a task in a task, the inner one; of an actor that was killed, the actor."""
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote(num_cpus=0)
        class Actor:
            def pid(self):
                return os.getpid()

            def fail(self, _prompt):
                raise ValueError("my secret")

            def ask(self, other):
                return ray.get(other.fail.remote("my secret"))

            def wait(self):
                time.sleep(60)

        inner, outer = Actor.remote(), Actor.remote()
        pid = ray.get(inner.pid.remote())
        with pytest.raises(ValueError, match="my secret") as failed:
            ray.get(outer.ask.remote(inner))
        waiting = inner.wait.remote()
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError) as died:
            ray.get(waiting)
        ip = ray.util.get_node_ip_address()
    finally:
        ray.shutdown()

    assert {"error": "ValueError", "pid": pid, "ip": ip} == failure_of(failed.value)
    found = failure_of(died.value)
    assert ("ActorDiedError", pid, ip) == (found["error"], found["pid"], found["ip"])
    assert found["reason"].startswith("Worker exit type: SYSTEM_ERROR Worker exit detail: ")
