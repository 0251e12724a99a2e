"""Names of the environment variables of this package, for processes that may need no more of it.

It imports nothing: a process that is not profiled, or not traced, reads this and nothing else.
"""

from __future__ import annotations

# The settings of a run, as `recording.worker_config.WorkerConfig` encodes them.
SETTINGS = "VERL_PROFILER_SETTINGS"
# "1" in a process that nsys started, "0" in one that such a process made without nsys.
UNDER_NSYS = "VERL_PROFILER_UNDER_NSYS"
# Any of these traces TransferQueue; `transfer_queue.switches` has the others.
TRANSFER_QUEUE_SWITCHES = ("TQ_TRACE_ENABLED", "TQ_TRACE_DETAIL_ENABLED")
# A tool's own: the library that takes NVTX ranges in this process.
NVTX_LIBRARY = "NVTX_INJECTION64_PATH"
# The directory of the caches that are not beside their run.
CACHE_HOME = "VERL_PROFILER_CACHE_HOME"
# How much it may hold, in 10^9 bytes.
CACHE_GB = "VERL_PROFILER_CACHE_GB"
# The folder of the rehearsal's model and prompts.
REHEARSAL_CACHE = "VERL_PROFILER_REHEARSAL_CACHE"
# Seconds between two polls of the replay buffer in a rehearsal.
REHEARSAL_POLL_INTERVAL = "VERL_PROFILER_REHEARSAL_POLL_INTERVAL_S"
