"""What several benchmarks share: pairs of measurements in turn, and a recorder of this process.

Needs nothing but the package: `gpu_check.py` runs on machines without the packages of the others.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["alternating", "config", "ratio", "recording"]


def alternating(measure: Callable[[bool], float], pairs: int) -> list[tuple[float, float]]:
    """Measure without and with something, in pairs of random order; return the pairs."""
    source = random.Random(1)
    found: list[tuple[float, float]] = []
    for _ in range(pairs):
        spent = {enabled: measure(enabled) for enabled in source.sample((False, True), 2)}
        found.append((spent[False], spent[True]))
    return found


def ratio(pairs: list[tuple[float, float]]) -> str:
    """Return the median of with / without in words, with its 95 % bootstrap interval."""
    ratios = [on / off for off, on in pairs]
    source = random.Random(0)
    drawn = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return (
        f"with / without: median {median(ratios):.4f}, 95 % bootstrap interval {drawn[250]:.4f} to "
        f"{drawn[9750]:.4f}, {len(ratios)} pairs"
    )


def config(folder: str, events: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return the settings of a process that records into this folder.

    Args:
        folder: The run directory.
        events: Fields of `EventSettings`.
        **settings: Fields of `WorkerConfig`.
    """
    from verl_profiler.recording.clock import take_anchor
    from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

    return WorkerConfig(folder, folder, EventSettings(**events or {}), take_anchor(), **settings)


@contextlib.contextmanager
def recording(
    role: str, events: dict[str, Any] | None = None, **settings: Any
) -> Iterator[list[bytes]]:
    """Record in this process, as `config` has it; the list has all lines after the block."""
    from verl_profiler.recording import recorder
    from verl_profiler.recording.identity import Identity

    lines: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder.start(config(folder, events, **settings), lambda: Identity(role, 0))
        try:
            yield lines
        finally:
            recorder.stop()
            for file in Path(folder).rglob("*.jsonl"):
                lines += file.read_bytes().splitlines(keepends=True)
