"""Read memory at regular times, in the processes that hold device memory, when asked to.

verl's own checkpoints lie around weight syncs and offloads only; a sample every second also shows
how full a device gets inside `update_actor` or during the rollout.  The writer thread takes the
samples, so no thread of the host's is held up.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler import context, memory_reading, recorder
from verl_profiler.clock import now

__all__ = ["begin"]


class _Sampler:
    def __init__(
        self, interval_s: float, device: int | None, replica_devices: Sequence[int] | None
    ) -> None:
        self.interval_ns = round(interval_s * 1e9)
        self.device = device
        self.replica_devices = replica_devices
        self.due_ns = 0

    def __call__(self) -> None:
        moment = now()
        if moment < self.due_ns:
            return
        self.due_ns = moment + self.interval_ns
        extra = {
            **memory_reading.device(self.device, self.replica_devices),
            **memory_reading.host(whole=True),
        }
        recorder.record("memory_sample", None, now(), extra, context.process.step)


def begin(replica_devices: Sequence[int] | None = None) -> None:
    """Sample from now on, if the settings ask for it; called by the memory probes.

    Args:
        replica_devices: See `memory_reading.device`.
    """
    active = recorder.active()
    if active is None or active.before_flush is not None:
        return
    interval_s = active.carried.memory_sample_interval_s
    if interval_s is not None:
        active.before_flush = _Sampler(interval_s, memory_reading.current_device(), replica_devices)
