"""Known reasons of failures in the texts of Ray, torch, the engines and the operating system.

Messages of exceptions may hold prompts, so nothing is taken from them but what these write themselves, in
forms that are known.
"""

from __future__ import annotations

import re

_LIMIT = 300
# Forms, the more specific ones first, and what they mean where they do not state it themselves.
_REASONS = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        # ray/src/ray/core_worker, raylet/worker_pool.cc.
        (
            (
                r"(?:Worker exit type: [A-Z_]+ Worker exit detail: )?Worker exits? unexpectedly\. "
                r"Worker exits with an exit code \w{1,20}\.(?: The worker may have exceeded K8s pod memory "
                r"limits\.)?"
            ),
            "",
        ),
        (r"Worker exit type: [A-Z_]+ Worker exit detail: [^\n]{1,200}?(?=\. |\n|$)", ""),
        # ray/src/ray/raylet: the memory monitor, the object store, lost nodes.
        (
            r"[0-9.]+GB / [0-9.]+GB \([0-9.]+\), which exceeds the memory usage threshold of [0-9.]*[0-9]",
            "the host's memory ran out; Ray ended a worker, not the one that holds most",
        ),
        (
            r"[0-9]+ Workers \(tasks / actors\) killed due to memory pressure \(OOM\)",
            "by Ray's memory monitor",
        ),
        (r"Failed to put object [\w. ]{1,120}? because it is full", "Ray's object store"),
        (r"object store is full", "of Ray"),
        (r"because its node has died", "of an actor of Ray"),
        (
            r"(?:health check failed due to missing|the detector has missed) too many heartbeats",
            "the node died",
        ),
        (
            r"Some workers [\w ()]{0,60}have not registered within the timeout",
            "Ray's worker processes hang or crash at their start",
        ),
        (
            r"Failed to connect to GCS(?: within [0-9]+ seconds)?",
            "Ray's head node is gone or cannot be reached",
        ),
        # Device memory: torch on each kind of device, the engines, torch_memory_saver.
        (r"\b[A-Z]{2,5} out of memory\. Tried to allocate [0-9.]+ [KMGT]iB", ""),
        (
            r"No available memory for the cache blocks",
            "the KV cache does not fit: raise rollout.gpu_memory_utilization",
        ),
        (
            (
                r"larger than the (?:available KV cache memory|maximum number of tokens that can be "
                r"stored in KV cache) \([0-9.,]+(?: [KMGT]iB)?\)"
            ),
            "raise rollout.gpu_memory_utilization, or lower rollout.max_model_len",
        ),
        (
            (
                r"Free memory on device[^\n]{0,20} \([0-9.]+/[0-9.]+ [KMGT]iB\) on startup is less than "
                r"desired GPU memory utilization \([0-9.]+, [0-9.]+ [KMGT]iB\)"
            ),
            "others use the device, or lower rollout.gpu_memory_utilization",
        ),
        (
            r"Error in memory profiling\. Initial free memory [0-9.]+ [KMGT]iB, current free memory [0-9.]+ [KMGT]iB",
            "vLLM: others release memory of the device while it starts",
        ),
        (
            r"Not enough memory\. Please try to increase --mem-fraction-static",
            "rollout.gpu_memory_utilization",
        ),
        (
            (
                r"CUresult error:? (?:result=)?2\b(?: \([a-z ]{1,40}\))? {1,4}file=[\w./-]{1,100} "
                r"func=\w*resume\w*"
            ),
            "device memory ran out when the engine woke up",
        ),
        (
            (
                r"CUresult error:? (?:result=)?2\b(?: \([a-z ]{1,40}\))?(?: {1,4}file=[\w./-]{1,100} "
                r"func=\w{1,60})?"
            ),
            "device memory ran out",
        ),
        (r"CUresult error:? (?:result=)?[0-9]+(?: {1,4}file=[\w./-]{1,100} func=\w{1,60})?", ""),
        # Collectives: NCCL in c10d, its heartbeat, gloo, the store of start-up.
        (
            (
                r"(?:\[(?:PG [^\]\n]{1,80} )?Rank [0-9]{1,6}\] )?Watchdog caught collective operation timeout: "
                r"WorkNCCL\((?:[^()\n]|\([^()\n]{0,20}\)){1,300}\)(?: ran for [0-9]+ milliseconds)?"
            ),
            "",
        ),
        (
            r"watchdog got stuck for [0-9]+ seconds without making progress",
            "heartbeat of NCCL: a collective or a CUDA call hangs",
        ),
        (r"(?:Cuda|HIP) failure (?:[0-9]+ )?'[a-z ]{1,80}'", "in NCCL"),
        (r"NCCL error in: [\w./+-]{1,200}:[0-9]+, [a-z ]{1,80}", ""),
        (
            r"Timed out waiting [0-9]+ms for (?:recv|send) operation to complete",
            "gloo: another rank did not answer",
        ),
        (
            (
                r"gloo/transport/tcp/\w+\.cc:[0-9]+\] (?:Connection closed by peer \[[0-9a-f.:]{2,45}\]:[0-9]+"
                r"|\w+ error \[[0-9a-f.:]{2,45}\]:[0-9]+: Connection reset by peer)"
            ),
            "another rank ended: its own failure is elsewhere in the console",
        ),
        (
            (
                r"server socket has failed to listen on any local network address\. ?(?:port: [0-9]+"
                r"|The server socket has failed to bind to \S{1,60}:[0-9]+)"
            ),
            "another process uses the port",
        ),
        (
            r"client socket has failed to connect to any network address",
            "the first rank of a process group is not there",
        ),
        (
            r"wait timeout after [0-9]+ms, keys: [\w/:.-]{1,150}",
            "a rank did not arrive at the start of a process group (TCPStore)",
        ),
        (
            r"Timed out after [0-9]+ seconds waiting for clients\. [0-9]+/[0-9]+ clients joined",
            "ranks did not arrive at the start of a process group (TCPStore)",
        ),
        # Engines.
        (
            r"RPC call to \w{1,60} timed out",
            "vLLM: a worker of the engine does not answer",
        ),
        (
            r"Server error '503 Service Unavailable' for url 'http\S{1,100}'",
            "the router has no engine: look for the end of one before",
        ),
        (
            r"all references to the actor were removed",
            "Ray ended it; what uses it later must hold a reference to it",
        ),
        (
            r"EngineCore encountered an issue|Engine core initialization failed",
            "vLLM's engine core died; its own traceback is before this in the console",
        ),
        (
            r"(?:Scheduler|Detokenizer\w*|Tokenizer\w*) watchdog timeout \(self\.watchdog_timeout=[0-9.]+(?:, self\.soft=\w+)?\)",
            "SGLang: a forward pass or a collective hangs",
        ),
        (
            r"Received sigquit from a child process",
            "SGLang's scheduler died; its own traceback is before this in the console",
        ),
        (
            r"out of resource: shared memory, Required: [0-9]+, Hardware limit: [0-9]+",
            "a Triton kernel is too large for this device",
        ),
        # Hydra, which prints no exception, and the scheduler of jobs.
        (r"Could not override '[\w.@/-]{1,200}'", "Hydra: the config has no such key"),
        (
            (
                r"\*\*\* (?:JOB|STEP) [\w.+]{1,30} (?:ON \S{1,80} )?CANCELLED AT \S{1,30}"
                r"(?: DUE TO [A-Z ]{1,40}[A-Z])?"
            ),
            "Slurm",
        ),
        (r"[Dd]etected [0-9]+ oom[-_]kill events?", "Slurm: the memory of the job ran out"),
        (r"^(?:\S{1,200}: line [0-9]{1,6}: +[0-9]{1,9} )?Killed\b", "by SIGKILL"),
        (r"\bOOMKilled\b", "the memory of the container ran out"),
        # The operating system, CUDA, data.
        (
            r"DataLoader worker \(pid [0-9]+\) is killed by signal: Bus error",
            "shared memory ran out: a larger /dev/shm, or a smaller data.dataloader_num_workers",
        ),
        (
            r"DataLoader worker \(pid(?:\(s\))? [0-9, ]+\) (?:is killed by signal: \w{1,20}|exited unexpectedly)",
            "",
        ),
        (
            r"undefined symbol: _Z\w{1,200}",
            "a compiled package was built for another version of torch",
        ),
        (
            r"We couldn't connect to 'https://[\w.-]{1,100}' to load",
            "no network, and no copy in the cache",
        ),
        (r"No CUDA GPUs are available", ""),
        (r"Segmentation fault(?: \(core dumped\))?", ""),
        (r"No space left on device", ""),
        (r"Disk quota exceeded", ""),
        (r"Too many open files", "see ulimit -n"),
        (r"Cannot allocate memory", "of the host"),
        (r"CUDA error: (?:(?:[a-z -]|ECC|NVLink|MMU){1,80}|CUBLAS_STATUS_[A-Z_]{1,40})", ""),
    )
)


def reason_in(message: str) -> str | None:
    """Return the known reason that a message has; None if it has none."""
    text, meaning = text_and_meaning(message)
    return f"{text} ({meaning})" if meaning else text or None


def text_and_meaning(message: str) -> tuple[str, str]:
    """Return the text of a message by which its reason is known, and what that means; empty if there is none."""
    for pattern, meaning in _REASONS:
        match = pattern.search(message)
        if match is not None:
            # Lone surrogates cannot be encoded.
            return match[0][:_LIMIT].encode("utf-8", "backslashreplace").decode(), meaning
    return "", ""
