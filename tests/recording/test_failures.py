"""What is taken from exceptions: types, processes and known causes, never the users' words."""

import pytest

from verl_profiler.events.failure_texts import reason_in
from verl_profiler.recording.open_calls import failure_of

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


# What a library writes, and what is taken of it and added; nothing that is called secret.
WRITTEN = r"""
No available memory for the cache blocks. Try increasing `gpu_memory_utilization`: secret => No available memory for the cache blocks | gpu_memory_utilization
Not enough memory. Please try to increase --mem-fraction-static. secret => --mem-fraction-static | gpu_memory_utilization
CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=104 secret => CUresult error: 2 | device memory ran out
[torch_memory_saver.cpp] CUresult error result=2 file=csrc/core.cpp func=resume line=9 => device memory ran out when the engine woke up
NPU out of memory. Tried to allocate 512.00 MiB (NPU 3; secret) => NPU out of memory
HIP out of memory. Tried to allocate 1.10 GiB. secret => HIP out of memory
ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in secret => stuck for 600 seconds | NCCL
[unbound_buffer.cc:78] Timed out waiting 900000ms for send operation to complete secret => 900000ms for send | gloo
wait timeout after 600000ms, keys: /worker/c10d/0//cpu//7 secret => keys: /worker/c10d/0//cpu//7 | did not arrive
Timed out after 601 seconds waiting for clients. 15/16 clients joined. => 15/16 clients joined
NCCL error in: ../torch/NCCLUtils.hpp:317, unhandled system error (secret) => NCCLUtils.hpp:317, unhandled system error
NCCL error in: /x.cpp:94, unhandled cuda error\nCuda failure 2 'out of memory' => Cuda failure 2 'out of memory' | NCCL
EngineCore encountered an issue. See stack trace (above) for the root cause. secret => EngineCore encountered an issue | its own traceback
Failed to put object 00ffee in object store because it is full. Object size is secret => because it is full | object store
The actor died because its node has died. Node Id: secret => its node has died
health check failed due to missing too many heartbeats secret => missing too many heartbeats | node died
3 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers secret => 3 Workers | memory monitor
Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code None. The worker may have exceeded K8s pod memory limits. secret => SYSTEM_ERROR | exceeded K8s pod memory limits.
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=1800000) ran for 1800081 milliseconds before timing out. secret => OpType=ALLREDUCE | ran for 1800081 milliseconds
[Errno 24] Too many open files: '/data/secret' => Too many open files | ulimit -n
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling secret => CUBLAS_STATUS_ALLOC
"""


@pytest.mark.parametrize("line", WRITTEN.strip().splitlines())
def test_what_libraries_write_about_failures_is_known(line):
    """With what it means where they do not state it, and nothing of the rest of the message."""
    message, _, parts = line.replace(r"\n", "\n").partition(" => ")
    reason = reason_in(message)

    assert reason is not None
    assert all(part in reason for part in parts.split(" | "))
    assert "secret" not in reason


def test_an_exception_that_cannot_be_written_has_its_type():
    """Whatever its `__str__` does."""

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert {"error": "Odd"} == failure_of(Odd())
