"""What is measured: the table of all probes.

Nothing in this package imports verl, Ray, SGLang or torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from verl_profiler.instrumentation.probe import Probe

# The modules that hold `PROBES`, grouped by the part of verl that is watched.
_MODULES = (
    "trainer",
    "asynchronous",
    "replicas",
    "experimental",
    "rollout",
    "engine_calls",
    "engine",
    "engine_state",
    "reward",
    "workers",
    "weights",
    "weight_transfers",
    "transfer_queue",
)


def all_probes() -> list[Probe]:
    """Return every probe of the table."""
    return [
        probe
        for name in _MODULES
        for probe in importlib.import_module(f"verl_profiler.probes.{name}").PROBES
    ]


def select(families: Iterable[str]) -> list[Probe]:
    """Return the probes of the given families."""
    wanted = frozenset(families)
    return [probe for probe in all_probes() if probe.family in wanted]
