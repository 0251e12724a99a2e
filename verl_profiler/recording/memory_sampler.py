"""Sample memory at regular intervals, in the processes that hold device memory, if enabled.

verl's own checkpoints are around weight syncs and offloads only; a sample every second also shows
how full a device gets inside `update_actor` or during the rollout.  A thread of its own takes the
samples, so that neither the host nor a slow disk is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from verl_profiler.recording import context, device_memory, recorder
from verl_profiler.recording.clock import now

__all__ = ["begin"]

# A reading that a driver in trouble holds up must not hold up the end of the process.
_PATIENCE_S = 1.0

_sampler: _Sampler | None = None


class _Sampler(threading.Thread):
    def __init__(
        self, interval_s: float, device: int | None, replica_devices: Sequence[int] | None
    ) -> None:
        super().__init__(name="verl-profiler memory", daemon=True)
        self.interval_ns = round(interval_s * 1e9)
        self.device = device
        self.replica_devices = replica_devices
        self.ended = threading.Event()

    def run(self) -> None:
        due_ns = now()
        while not self.ended.wait(max(0, due_ns - now()) / 1e9):
            self.sample()
            # Samples that were missed are not made up for.
            due_ns = max(due_ns, now() - self.interval_ns) + self.interval_ns

    def sample(self) -> None:
        extra = {
            **device_memory.device(self.device, self.replica_devices),
            **device_memory.host(whole=True),
        }
        recorder.record("memory_sample", None, now(), extra, context.process.step)


def begin(replica_devices: Sequence[int] | None = None) -> None:
    """Sample from now on, if the settings ask for it; called by the memory probes.

    Args:
        replica_devices: See `device_memory.device`.
    """
    global _sampler
    active = recorder.active()
    if active is None or _sampler is not None:
        return
    interval_s = active.config.memory_sample_interval_s
    if interval_s is not None:
        _sampler = _Sampler(interval_s, device_memory.current_device(), replica_devices)
        recorder.before_stop(_end)
        recorder.after_fork(_forget)
        _sampler.start()


def _end() -> None:
    sampler = _sampler
    _forget()
    if sampler is not None:
        sampler.ended.set()
        sampler.join(_PATIENCE_S)


def _forget() -> None:
    global _sampler
    _sampler = None
