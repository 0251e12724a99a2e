"""What a process has to know in order to record; carried to each one in an environment variable."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_profiler.events.vocabulary import FAMILIES
from verl_profiler.recording.clock import Anchor

__all__ = ["Carried", "EventSettings"]

_FAMILY_SWITCHES = msgspec.defstruct(
    "Families",
    [(family, bool, True) for family in FAMILIES],
    frozen=True,
    forbid_unknown_fields=True,
)


class EventSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.events`: what is recorded.

    Args:
        enabled: False leaves every function of verl untouched.
        steps: Steps whose events are kept; None for all.
        families: One switch per probe family; a family that is off is not installed.
        flush_interval_s: How often events reach the file; a kill loses what came since.
        max_pending: Events held in memory at most; further ones are dropped and counted.
        lag_threshold_s: An event loop that is late by this much is recorded.
        engine_timing: Ask SGLang or vLLM for its own queue, prefill and decode times.
        announce: Print one line per process.
        clock_exchange: Compare the clocks of a cluster's nodes.
    """

    enabled: bool = True
    steps: tuple[int, ...] | None = None
    families: _FAMILY_SWITCHES = _FAMILY_SWITCHES()  # type: ignore[valid-type]
    flush_interval_s: float = 0.5
    max_pending: int = 200_000
    lag_threshold_s: float = 0.02
    engine_timing: bool = False
    announce: bool = True
    clock_exchange: bool = True

    def active_families(self) -> frozenset[str]:
        """Return the names of the families that are switched on."""
        if not self.enabled:
            return frozenset()
        return frozenset(name for name in FAMILIES if getattr(self.families, name))


class Carried(msgspec.Struct, frozen=True):
    """What travels to the other processes in `VERL_PROFILER_SETTINGS`.

    Args:
        directory: The run directory, absolute.
        output_dir: `profiler.output_dir` as the user wrote it; `directory` may have a number more.
        events: See `EventSettings`.
        clock: The driver's anchor.
        memory_sample_interval_s: `profiler.memory_saver.sample_interval_s`.
        capture_tool: What captures, `nsys` or `torch`; None for nothing.
        capture_plan: `capture.plan.Plan`, encoded.
        nvtx: `profiler.nsight.nvtx`: where our events open ranges.
        record_command: `profiler.record_command`: whether headers hold paths.
    """

    directory: str
    output_dir: str
    events: EventSettings
    clock: Anchor | None = None
    memory_sample_interval_s: float | None = None
    capture_tool: str | None = None
    capture_plan: str | None = None
    nvtx: Literal["auto", "on", "off"] = "auto"
    record_command: bool = True

    def encode(self) -> str:
        """Return the one-line form."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Carried:
        """Read the one-line form."""
        return msgspec.json.decode(text, type=cls)
