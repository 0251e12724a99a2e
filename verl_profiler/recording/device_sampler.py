"""Sample all devices of a host at regular times, in one process of the run per host.

Processes that hold devices compete for an abstract Unix socket whose name comes from the run directory.
The kernel gives it to one, and releases it when that process ends, however it ends; another one takes
over within `Waits.retry_s`.  No file is locked: run directories are on network file systems.  The name is
one per network namespace, so containers on one host elect one each.

A thread takes the samples, so that neither the host nor a slow driver is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

from verl_profiler.recording import context, devices, recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import announce
from verl_profiler.recording.devices import Device
from verl_profiler.recording.process_header import add_part

# A device that does not change gets a line this often, so that it differs from one that is not sampled.
LONGEST_S = 10.0
# Processes that hold devices.
_ROLES = frozenset({"actor", "critic", "ref", "rm", "rollout", "engine"})
# The lowest rank of a host is first: each rank waits so long, workers at most so long, then engines.
_PER_RANK_S, _WORKERS_S = 0.05, 2.0
# Smaller changes are noise.
_NOISE = {"power_w": 5, "temperature_c": 2}
# Time on a core, as a share of the time until the next reading.
_SHARE = 1 / 50


class Waits(NamedTuple):
    """How long a process waits, in seconds."""

    # How often the others try to take over; how often a process's role is looked for at its start.
    retry_s: float = 2.0
    identity_s: float = 0.25
    # A reading that a driver in trouble holds up must not hold up the end of the process.
    end_s: float = 1.0


_sampler: _Sampler | None = None
# What this process samples or sampled, for its header.
_sampled: dict[str, Any] = {}


class _Sampler(threading.Thread):
    def __init__(self, active: recorder.Recorder, waits: Waits) -> None:
        super().__init__(name="verl-profiler devices", daemon=True)
        self.active = active
        self.waits = waits
        self.interval_s = active.config.device_interval_s
        self.ended = threading.Event()
        self.elected: socket.socket | None = None
        self.devices: list[Device] = []
        # By device: the fields last recorded, and when.
        self.recorded: dict[int, tuple[dict[str, Any], int]] = {}
        # By device: when it was read last, recorded or not.
        self.read_ns: dict[int, int] = {}
        self.period_ns = round(self.interval_s * 1e9)

    def run(self) -> None:
        try:
            if self.wait_for_role() and self.wait_for_election():
                self.sample()
        except Exception as error:  # noqa: BLE001  training goes on with or without readings
            announce(f"WARNING devices are no longer sampled: {error!r} (device-sampling-failed)")
        finally:
            self.release()

    def wait_for_role(self) -> bool:
        """Wait until it is known who this process is, and its turn; whether it holds devices."""
        while (identity := self.active.identity) is None:
            if self.ended.wait(self.waits.identity_s):
                return False
        if identity.role not in _ROLES:
            return False
        delay_s = min(_PER_RANK_S * (identity.rank or 0), _WORKERS_S)
        if identity.role == "engine":
            delay_s += _WORKERS_S
        return not self.ended.wait(delay_s)

    def wait_for_election(self) -> bool:
        """Wait until no other process of the run samples on this host; whether there are devices."""
        while not self.ended.is_set():
            if self.claim():
                begin_ns = time.thread_time_ns()
                self.devices = devices.open_devices()
                if self.devices:
                    _sampled["device_sampling"] = {
                        "library": devices.LIBRARY,
                        "interval_s": self.interval_s,
                        "devices": [device.facts for device in self.devices],
                    }
                self.active.wrapper_cpu_ns += time.thread_time_ns() - begin_ns
                return bool(self.devices)
            self.ended.wait(self.waits.retry_s)
        return False

    def claim(self) -> bool:
        elected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            elected.bind(_address(self.active.config.directory))
        except OSError as error:
            elected.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self.elected = elected
        return True

    def release(self) -> None:
        elected, self.elected = self.elected, None
        if elected is not None:
            elected.close()

    def sample(self) -> None:
        due_ns = now()
        while not self.ended.wait(max(0, due_ns - now()) / 1e9):
            begin_ns = time.thread_time_ns()
            for device in list(self.devices):
                self.read(device)
            spent_ns = time.thread_time_ns() - begin_ns
            self.active.wrapper_cpu_ns += spent_ns
            if not self.devices:
                return
            # Samples that were missed are not made up for.
            self.period_ns = round(max(self.interval_s, spent_ns / 1e9 / _SHARE) * 1e9)
            due_ns = max(due_ns, now() - self.period_ns) + self.period_ns

    def read(self, device: Device) -> None:
        """Record a device's reading, unless nothing changed."""
        try:
            fields = device.read()
        except Exception as error:  # noqa: BLE001  a device that is lost: the host will fail on it
            self.devices.remove(device)
            announce(f"WARNING device {device.index} is no longer sampled: {error!r} (device-lost)")
            return
        at_ns = now()
        last, last_ns = self.recorded.get(device.index, ({}, 0))
        gap_ns = at_ns - self.read_ns.get(device.index, at_ns)
        self.read_ns[device.index] = at_ns
        late = gap_ns > 2 * self.period_ns
        if not late and at_ns - last_ns < LONGEST_S * 1e9 and not _differs(fields, last):
            return
        self.recorded[device.index] = fields, at_ns
        extra = {"device": device.index, **fields}
        if late:
            # Another thread held the interpreter: what was read before holds for no time of this.
            extra["gap_s"] = round(gap_ns / 1e9, 3)
        recorder.record("device", None, at_ns, extra, context.process.step)


def _differs(fields: dict[str, Any], last: dict[str, Any]) -> bool:
    if fields.keys() != last.keys():
        return True
    return any(
        value != last[name] if name not in _NOISE else abs(value - last[name]) > _NOISE[name]
        for name, value in fields.items()
    )


def _address(directory: str) -> str:
    # Of the processes of a run few have devices, and it takes a tenth of the plugin's import.
    import hashlib

    digest = hashlib.sha256(directory.encode()).hexdigest()[:24]
    return f"\0verl-profiler-devices-{digest}"


def begin(waits: Waits = Waits()) -> None:  # noqa: B008  immutable
    """Sample from now on if the settings ask for it, a library is installed and it is this process's turn."""
    global _sampler
    active = recorder.active()
    add_part(account)
    if active is None or _sampler is not None or not active.config.events.devices:
        return
    if not sys.platform.startswith("linux") or not devices.is_importable():
        return
    _sampled.clear()
    _sampler = _Sampler(active, waits)
    recorder.before_stop(_end)
    recorder.after_fork(_forget)
    _sampler.start()


def account() -> dict[str, Any]:
    """Return what belongs into the header of this process: its devices, and those that it samples."""
    used = devices.used_devices()
    return {**({"devices": used} if used else {}), **_sampled}


def _end() -> None:
    global _sampler
    sampler, _sampler = _sampler, None
    if sampler is not None:
        sampler.ended.set()
        sampler.join(sampler.waits.end_s)


def _forget() -> None:
    """In a forked child: the socket is the parent's, and must not outlive it."""
    global _sampler
    sampler, _sampler = _sampler, None
    _sampled.clear()
    if sampler is not None and sampler.elected is not None:
        with contextlib.suppress(OSError):
            sampler.elected.close()
