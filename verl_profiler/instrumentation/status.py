"""What became of the probes in this process, and the warnings about them."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import Counter

import msgspec

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording.complaints import announce

# What a hook may raise; values of the host's may raise anything from `__str__` or `__len__`.
# KeyboardInterrupt and SystemExit are not among them: a signal handler of the host's raises them
# wherever the thread is.
FAILURES = (Exception, asyncio.CancelledError)


class Status(msgspec.Struct, eq=False):
    """What became of the probes in this process."""

    installed: dict[str, list[str]] = msgspec.field(default_factory=dict[str, list[str]])
    missed: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    hits: Counter[str] = msgspec.field(default_factory=Counter[str])
    errors: Counter[str] = msgspec.field(default_factory=Counter[str])

    def clear(self) -> None:
        """Forget everything; when the probes are taken off."""
        for account in (self.installed, self.missed, self.hits, self.errors):
            account.clear()


status = Status()


def missed(probe: Probe, reason: str) -> None:
    """Note that a probe is not placed, or not in full; the first reason is printed."""
    if probe.name in status.missed:
        return
    status.missed[probe.name] = (
        reason if probe.lost is None else f"{reason}; {probe.lost} is not recorded"
    )
    announce(
        f"WARNING probe {probe.name!r}: {reason}. Training is not affected; "
        f"{probe.lost or 'this measurement'} will be missing. (target-changed)"
    )


def failed(probe: Probe, error: BaseException) -> None:
    """Count a failure of a probe's own; the first one is printed."""
    status.errors[probe.name] += 1
    if status.errors[probe.name] > 1:
        return
    # At the recursion limit, or with an exception whose text cannot be had, this fails too.
    with contextlib.suppress(*FAILURES):
        lines = "".join(traceback.format_exception(error)).rstrip()
        announce(
            f"WARNING probe {probe.name!r} failed; training is not affected, further failures "
            f"are only counted. (probe-failed)\n{lines}"
        )
