"""The settings that a process needs in order to record, in one environment variable."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from verl_profiler.events.vocabulary import FAMILIES, Family
from verl_profiler.recording.clock import Anchor

# Where a run without a name is recorded.
UNNAMED_RUN = "logs/multiturn_log_dir"

# Smaller ones are none.
_LEAST_SHARE = 1e-9


def one_in(share: float) -> int:
    """Return N of the share 1/N that is nearest to `share`; 0 for none."""
    return round(1 / share) if share > _LEAST_SHARE else 0


class EventSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.events`: what is recorded.

    Args:
        enabled: False leaves every function of verl untouched.
        steps: Steps whose events are kept, counted from 1, 0 for before the first; None for all.
        exclude: Probe families that are not recorded; their probes are not installed.
        engine_timing: Ask SGLang or vLLM for its own queue, prefill and decode times.
        engine_state: Read the load of SGLang and vLLM engines twice a second.
        devices: Sample the host's devices, in one process per host.
        engine_iterations: Let SGLang publish each iteration, and record their sums.
        detail_share: The share of requests whose details (turns, calls, tools) are written, 0 to 1, taken
            as one in N; of each step and process also those of the slowest and last.
        max_gb: What the event files of one process may take, in 10^9 bytes, from 0.001; None for any size.
        ship_every_s: Events of nodes with disks of their own are brought to the driver's at this
            interval and at the end, 1 to 86400 s; None for never.
    """

    enabled: bool = True
    steps: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    exclude: tuple[Family, ...] = ()
    engine_timing: bool = False
    engine_state: bool = False
    devices: bool = True
    engine_iterations: bool = False
    detail_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    max_gb: Annotated[float, Meta(ge=0.001)] | None = None
    ship_every_s: Annotated[float, Meta(ge=1, le=86400)] | None = 60.0

    def active_families(self) -> frozenset[str]:
        """Return the names of the families that are recorded."""
        return frozenset(FAMILIES).difference(self.exclude) if self.enabled else frozenset()

    def holds_details(self) -> bool:
        """Return whether details wait until it is decided about them."""
        return self.max_gb is not None or one_in(self.detail_share) != 1


class StuckSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.stuck`: what is open for long.

    Args:
        after: Calls that are open for longer than this are written to `open/<name>.json`, 1 to 86400 s; None for
            never.
    """

    after: Annotated[float, Meta(ge=1, le=86400)] | None = 60.0


class WorkerConfig(msgspec.Struct, frozen=True):
    """What travels to the other processes in `VERL_PROFILER_SETTINGS`.

    Args:
        directory: The run directory, absolute.
        output_dir: `profiler.output_dir` as the user wrote it; `directory` may have a number more.
        events: See `EventSettings`.
        clock: The driver's anchor.
        capture_plan: `capture.plan.Plan`, encoded.
        captured_steps: Its steps.
        stuck: See `StuckSettings`.
        flush_interval_s: How often events reach the file; a kill loses those since.
        max_pending: Events held in memory at most; further ones are dropped and counted.
        device_interval_s: How often devices are sampled.
    """

    directory: str
    output_dir: str
    events: EventSettings
    clock: Anchor | None = None
    capture_plan: str | None = None
    captured_steps: tuple[int, ...] = ()
    stuck: StuckSettings = StuckSettings()
    flush_interval_s: float = 0.5
    max_pending: int = 200_000
    device_interval_s: float = 1.0

    def encode(self) -> str:
        """Return the one-line form."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> WorkerConfig:
        """Read the one-line form.

        It was checked where it was made; to check it by the annotations costs each process 3 ms.
        """
        fields = msgspec.json.decode(text)
        events, clock = fields["events"], fields.get("clock")
        if events["steps"] is not None:
            events["steps"] = tuple(events["steps"])
        events["exclude"] = tuple(events["exclude"])
        fields["events"] = EventSettings(**events)
        fields["clock"] = None if clock is None else Anchor(**clock)
        fields["captured_steps"] = tuple(fields["captured_steps"])
        fields["stuck"] = StuckSettings(**fields["stuck"])
        return cls(**fields)
