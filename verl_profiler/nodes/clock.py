"""Compare the clocks of a cluster's nodes with the driver's.

The remote clock was read between request and reply, whatever the two delays were; the intersection of
these intervals over a burst of calls is kept in the driver's header.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_profiler.recording.clock import boot_id, now
from verl_profiler.recording.process_header import add_part

_BURST = 48
_KEPT = 128
# Nodes whose samples are kept; autoscaling clusters have new ones every hour.
_PEERS = 256
# Two clocks drift apart by at most one nanosecond in this many: the limit of kernel corrections.
_DRIFT_NS = 2000

# By the other node's boot id: host and (own monotonic ns, other minus own ns, bound ns).
_samples: dict[str, dict[str, Any]] = {}


def exchange(ask: Callable[[], int], tries: int = _BURST) -> list[int]:
    """Sample another clock several times, and intersect the bounds of its offset.

    A fast request and a fast reply bound the offset from either side; they need not belong to the
    same sample.

    Args:
        ask: Returns that clock's monotonic nanoseconds.
        tries: How many samples to take.

    Returns:
        Own monotonic ns, other minus own ns, bound of that difference's error ns.
    """
    samples: list[tuple[int, int, int]] = []
    for _ in range(tries):
        sent = now()
        remote = ask()
        samples.append((sent, remote, now()))
    sent, remote, received = min(samples, key=lambda each: each[2] - each[0])
    at = (sent + received) // 2
    least, most = remote - received, remote - sent
    limits = [
        (remote - received - drift, remote - sent + drift)
        for sent, remote, received in samples
        for drift in [max(abs(at - sent), abs(received - at)) // _DRIFT_NS + 1]
    ]
    lower, upper = max(least, *(low for low, _ in limits)), min(most, *(up for _, up in limits))
    if lower <= upper:
        least, most = lower, upper
    # Half a nanosecond may be lost to rounding.
    return [at, (least + most) // 2, (most - least + 1) // 2 + 1]


def begin() -> None:
    """Forget the samples of an earlier run of this process; the header has those that come."""
    _samples.clear()
    add_part(account)


def account() -> dict[str, Any]:
    """Return the header's part; empty if no clocks were compared."""
    if not _samples:
        return {}
    peers = [{"boot_id": boot, **about} for boot, about in sorted(_samples.items())]
    return {"clock_exchange": {"boot_id": boot_id(), "peers": peers}}


def keep(boot: str, host: str, sample: list[int]) -> None:
    """Keep a sample of a node; the longer a run, the fewer of its middle."""
    about = _samples.setdefault(boot, {"host": host, "samples": []})
    # A new list, since the writer thread may be encoding the old one.
    kept = [*about["samples"], sample]
    about["samples"] = kept if len(kept) <= _KEPT else [kept[0], *kept[1:-1:2], kept[-1]]
    if len(_samples) > _PEERS:
        del _samples[min(_samples, key=lambda each: _samples[each]["samples"][-1][0])]
