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
CUDA error: device-side assert triggered\nsecret => device-side assert triggered
CUDA error: uncorrectable ECC error encountered\nsecret => uncorrectable ECC error encountered
NCCL WARN Cuda failure 'out of memory' secret => Cuda failure 'out of memory'
The server socket has failed to listen on any local network address. port: 18071, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use => port: 18071 | another process uses the port
The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use). secret => [::]:29500 | another process uses the port
The client socket has failed to connect to any network address of (10.0.0.1, 29500). secret => any network address | process group
[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895 secret => Connection closed by peer [127.0.0.1]:10895 | another rank ended
[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [192.168.70.92]:25266: Connection reset by peer => Connection reset by peer | another rank ended
The node with node id: 75b2 and address: 10.4.4.107 and node name: secret has been marked dead because the detector has missed too many heartbeats from it. => missed too many heartbeats | node died
(raylet) [worker_pool.cc:589] Some workers of the worker process(88) have not registered within the timeout. The process is still alive, secret => have not registered within the timeout | start
Failed to connect to GCS within 60 seconds. GCS may have been killed. secret => Failed to connect to GCS | head
Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False) secret => watchdog_timeout=300 | SGLang
Received sigquit from a child process. It usually means the child failed. secret => Received sigquit from a child process | its own traceback
DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. => killed by signal: Bus error | shared memory
DataLoader worker (pid(s) 3002, 3003) exited unexpectedly secret => exited unexpectedly
out of resource: shared memory, Required: 147456, Hardware limit: 101376. secret => Required: 147456, Hardware limit: 101376 | Triton
/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi secret => _ZN3c104cuda9SetDeviceEi | built for another version
No CUDA GPUs are available secret => No CUDA GPUs are available
Error in memory profiling. Initial free memory 70.1 GiB, current free memory 75.2 GiB. secret => memory profiling | others
We couldn't connect to 'https://huggingface.co' to load the files, secret => huggingface.co
where the task (actor ID: 9e, name=secret, pid=41, memory used=56.57GB) was running was 246.41GB / 251.54GB (0.979583), which exceeds the memory usage threshold of 0.95. secret => 246.41GB / 251.54GB | threshold of 0.95 | need not be the one that holds most
Memory on the node where the lease (name=secret, pid=2285, memory used=10.13GB) was running was 250.04GB / 251.54GB (0.994), which exceeds the memory usage threshold of 0.95. Top 10 memory users:\nPID MEM(GB) COMMAND\n1802 229.84 ray::TaskRunner.run\n2285 10.13 ray::AgentLoopWorker\n9 1.0 python secret => 1802 229.84 ray::TaskRunner.run | memory ran out
RPC call to sample_tokens timed out. secret => RPC call to sample_tokens timed out | does not answer
httpx.HTTPStatusError: Server error '503 Service Unavailable' for url 'http://secret' => 503 Service Unavailable | no engine
The actor is dead because all references to the actor were removed. secret => all references to the actor were removed | must hold a reference
Last State: Terminated, Reason: OOMKilled secret => OOMKilled | container
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
