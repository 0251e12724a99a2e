"""What is captured, by which tool, in which processes: the settings, and the plan made of them.

`profiler.nsight` and the Nsight guide's keys become one `Plan` in the driver; it travels to every
process with the other settings, and each process reads there what to start and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec

__all__ = [
    "CAPTURE_RANGE",
    "ROLES",
    "NsightSettings",
    "Plan",
    "RoleCapture",
    "as_text",
    "carried_plan",
    "words_of",
]

# The range that nsys waits for with capture-range=nvtx.
CAPTURE_RANGE = "capture"

# Keys of `profiler.nsight.roles` → the roles of the processes that they stand for.
ROLES: dict[str, tuple[str, ...]] = {
    "trainer": ("trainer",),
    "workers": ("actor", "critic", "ref"),
    "agent_loop": ("agent_loop",),
    "engine": ("engine",),
    "reward": ("reward",),
    "transfer_queue": ("tq_controller", "tq_storage"),
}

_Chosen = bool | tuple[int, ...]
_Options = dict[str, str | int | float | bool]

RoleChoice = msgspec.defstruct(
    "RoleChoice",
    [(role, _Chosen, role in ("trainer", "workers")) for role in ROLES],
    frozen=True,
    forbid_unknown_fields=True,
)
RoleOptions = msgspec.defstruct(
    "RoleOptions",
    [(role, _Options, msgspec.field(default_factory=dict)) for role in ("all", *ROLES)],
    frozen=True,
    forbid_unknown_fields=True,
)


class NsightSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.nsight`: how the steps of `trainer.profile_steps` are captured.

    Args:
        tool: `nsys` or `torch`; None for that of `global_profiler.tool`, and nsys without one.
        on_missing: What to do when a node cannot capture: `error` ends the command before training,
            `warn` trains without captures.
        nvtx: Ranges of our events: `auto` in processes that a tool watches, `on` or `off`.
        roles: Who is captured: true, false, or a list of ranks.
        options: nsys options beside verl's, for all roles and per role.
        directory: Where the tool writes on each node; None for the run directory.
        collect_timeout_s: How long the command waits at its end for reports that are being written.
    """

    tool: Literal["nsys", "torch"] | None = None
    on_missing: Literal["error", "warn"] = "error"
    nvtx: Literal["auto", "on", "off"] = "auto"
    roles: RoleChoice = RoleChoice()  # type: ignore[valid-type]
    options: RoleOptions = RoleOptions()  # type: ignore[valid-type]
    directory: str | None = None
    collect_timeout_s: float = 60.0


class RoleCapture(msgspec.Struct, frozen=True):
    """One role of the plan.

    Args:
        ranks: Its ranks, or None for all of them.
        options: nsys options, as Ray takes them; empty for the torch profiler.
    """

    ranks: tuple[int, ...] | None
    options: dict[str, str] = {}

    def has(self, rank: int | None) -> bool:
        """Whether the process of this rank is captured; one without a rank only with all."""
        return self.ranks is None or rank in self.ranks

    def waits_for(self) -> str | None:
        """Return what starts a capture: `nvtx`, `cudaProfilerApi`, or None for the whole life."""
        return self.options.get("capture-range")


class Plan(msgspec.Struct, frozen=True):
    """Everything that a process must know about captures.

    Args:
        tool: `nsys` or `torch`.
        steps: Steps of verl's own count, from 1.
        discrete: One capture per task of the workers instead of one per step.
        directory: Where the tool writes on each node, absolute.
        journal: Where each process writes down its captures; in the run directory.
        on_missing: See `NsightSettings`.
        roles: Role of a process → its capture.
        collect_timeout_s: See `NsightSettings`.
        umask: The driver's, for processes that nsys starts without one.
    """

    tool: Literal["nsys", "torch"]
    steps: tuple[int, ...]
    discrete: bool
    directory: str
    journal: str
    on_missing: Literal["error", "warn"]
    roles: dict[str, RoleCapture]
    collect_timeout_s: float = 60.0
    umask: int = 0o022

    def of(self, role: str, rank: int | None) -> RoleCapture | None:
        """Return the capture of this process, or None if it is not captured."""
        capture = self.roles.get(role)
        return capture if capture is not None and capture.has(rank) else None

    def encode(self) -> str:
        """Return the form that travels in `Carried.capture_plan`."""
        return msgspec.json.encode(self).decode()


@lru_cache(4)
def carried_plan(text: str | None) -> Plan | None:
    """Read the plan that travels in `Carried.capture_plan`; the same object for the same text."""
    return None if text is None else msgspec.json.decode(text, type=Plan)


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as Ray wants them: text, and lower-case true and false; None is left out."""
    return {
        str(key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in options.items()
        if value is not None
    }


def words_of(options: Mapping[str, str]) -> list[str]:
    """Return options as words of a command line, the way Ray writes them."""
    words = []
    for key, value in options.items():
        words += [f"--{key}={value}"] if len(key) > 1 else [f"-{key}", value]
    return words
