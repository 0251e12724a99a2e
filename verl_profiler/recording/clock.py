"""Monotonic time, and the anchor that places it on the wall clock.

Durations are differences of `now()`.  One anchor per process, fixed for its life, turns them into
timestamps, so the intervals of a process never contradict each other even if the wall clock is
set.  Processes of one boot share CLOCK_MONOTONIC; they use the driver's anchor and so share one
axis exactly.
"""

from __future__ import annotations

import time

import msgspec

# perf_counter and monotonic are the same clock on Linux.
now = time.perf_counter_ns


class Anchor(msgspec.Struct, frozen=True):
    """A pair of clock readings taken together.

    Args:
        boot_id: The kernel's id of this boot; empty where there is none.
        wall_ns: Nanoseconds since 1970.
        monotonic_ns: `now()` at that moment.
        uncertainty_ns: Half the time between the two reads around `wall_ns`.
        shared: True when the driver took it and this process runs in the same boot.
    """

    boot_id: str
    wall_ns: int
    monotonic_ns: int
    uncertainty_ns: int
    shared: bool = False


def boot_id() -> str:
    """Return the kernel's id of this boot, the same in all containers of a host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _both_clocks() -> tuple[int, int, int]:
    """Return how long it took to read both clocks, the wall clock and the monotonic clock, in ns."""
    before = now()
    wall = time.time_ns()
    after = now()
    return after - before, wall, (before + after) // 2


def take_anchor(tries: int = 32) -> Anchor:
    """Read both clocks `tries` times and keep the tightest pair."""
    best = _both_clocks()
    for _ in range(tries - 1):
        best = min(best, _both_clocks())
    width, wall, monotonic = best
    return Anchor(boot_id(), wall, monotonic, (width + 1) // 2)


def anchor_for_this_boot(driver: Anchor | None) -> Anchor:
    """Return the driver's anchor if this process runs in the same boot, else a fresh one."""
    if driver is not None and driver.boot_id and driver.boot_id == boot_id():
        shared = msgspec.structs.replace(driver, shared=True)
        # A container may have a time namespace of its own; then the driver's pair is wrong here.
        drift = (time.time_ns() - shared.wall_ns) - (now() - shared.monotonic_ns)
        if abs(drift) < 1_000_000_000:
            return shared
    return take_anchor()


class Timestamps:
    """Turns monotonic nanoseconds into ISO-8601 UTC text with microseconds."""

    def __init__(self, anchor: Anchor) -> None:
        self._offset_ns = anchor.wall_ns - anchor.monotonic_ns
        self._second = -1
        self._prefix = ""

    def microseconds(self, monotonic_ns: int) -> int:
        """Return microseconds since 1970, rounded down."""
        return (monotonic_ns + self._offset_ns) // 1000

    def text(self, microseconds: int) -> str:
        """Return for example `2026-11-21T02:33:22.123456+00:00`."""
        second, rest = divmod(microseconds, 1_000_000)
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second))
        return f"{self._prefix}{rest:06d}+00:00"
