"""What is captured, by which tool, in which processes: the settings, and the plan made from them.

`profiler.nsight` and the Nsight guide's keys become one `Plan` in the driver.  Every process gets it
with the other settings and reads from it what to start and when.  The umask of captures' files, which nsys
has cleared, is the driver's.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path

import msgspec

from verl_profiler.capture import tools
from verl_profiler.environ import UNDER_NSYS

# Keys of `profiler.nsight.roles` → roles of the processes.
ROLES: dict[str, tuple[str, ...]] = {
    "trainer": ("trainer",),
    "workers": ("actor", "critic", "ref"),
    "agent_loop": ("agent_loop",),
    "engine": ("engine",),
    "reward": ("reward",),
    "transfer_queue": ("tq_controller", "tq_storage"),
}

_Chosen = bool | tuple[int, ...]


class RoleChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.nsight.roles`: for each role, whether it is captured, or its ranks."""

    trainer: _Chosen = True
    workers: _Chosen = True
    agent_loop: _Chosen = False
    engine: _Chosen = False
    reward: _Chosen = False
    transfer_queue: _Chosen = False


class NsightSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.nsight`: how the steps of `trainer.profile_steps` are captured.

    Args:
        tool: A module of `capture.tools`; None for `global_profiler.tool`, or nsys if that is null.
        roles: Which roles are captured: true, false, or a list of ranks.
        options: nsys options in addition to verl's, for all roles.
        directory: Where the tool writes on each node; None for the run directory.

    Raises:
        ValueError: If there is no such tool.
    """

    tool: str | None = None
    roles: RoleChoice = RoleChoice()
    options: dict[str, str | int | float | bool] = {}
    directory: str | None = None

    def __post_init__(self) -> None:
        """Check the tool."""
        if self.tool is not None and self.tool not in tools.names():
            raise ValueError(f"tool is {self.tool!r}, not one of {', '.join(tools.names())}")


class RoleCapture(msgspec.Struct, frozen=True):
    """One role of the plan.

    Args:
        ranks: Its ranks, or None for all of them.
        options: What the tool is started with; empty for one that runs inside the process.
    """

    ranks: tuple[int, ...] | None
    options: dict[str, str] = {}

    def has(self, rank: int | None) -> bool:
        """Whether the process of this rank is captured; one without a rank only with all."""
        return self.ranks is None or rank in self.ranks


class Plan(msgspec.Struct, frozen=True):
    """What every process needs for captures.

    Args:
        tool: Name of the capture tool.
        steps: Steps of verl's own count, from 1.
        discrete: One capture per task of the workers instead of one per step.
        directory: Where the tool writes on each node, absolute.
        journal: Folder of the run directory in which each process lists its captures.
        roles: Role of a process → its capture.
        umask: The driver's, for processes that nsys starts without one.
    """

    tool: str
    steps: tuple[int, ...]
    discrete: bool
    directory: str
    journal: str
    roles: dict[str, RoleCapture]
    umask: int = 0o022

    def of(self, role: str, rank: int | None) -> RoleCapture | None:
        """Return the capture of this process, or None if it is not captured."""
        capture = self.roles.get(role)
        return capture if capture is not None and capture.has(rank) else None

    def encode(self) -> str:
        """Return the form that travels in `WorkerConfig.capture_plan`."""
        return msgspec.json.encode(self).decode()


@lru_cache(4)
def decoded_plan(text: str | None) -> Plan | None:
    """Read the plan that travels in `WorkerConfig.capture_plan`; the same object for the same text."""
    return None if text is None else msgspec.json.decode(text, type=Plan)


def raw_directory(run: Path, directory: str | None, cwd: str = "") -> Path:
    """Return where the tool of a run writes; each run has a folder of its own there.

    Args:
        run: The run directory.
        directory: `profiler.nsight.directory`.
        cwd: Where the run was launched; "" for here.
    """
    if directory is None:
        return run / "nsight" / "raw"
    return Path(os.path.abspath(os.path.join(cwd, os.path.expanduser(directory)))) / run.name


def umask() -> int:
    """Return the umask of this process."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    # Other threads may create files meanwhile; those are then for the owner alone.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def restore_umask(mask: int) -> None:
    """Set the umask of this process if nsys, which starts programs without one, cleared it."""
    if os.environ.get(UNDER_NSYS) == "1" and umask() == 0:
        os.umask(mask)


def restrict(path: str | os.PathLike[str]) -> None:
    """Apply the umask to a file that a tool wrote; files of other users stay as they are."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode & 0o7777
        if mode & umask():
            os.chmod(path, mode & ~umask())
