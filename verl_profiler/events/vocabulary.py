"""The event files: names, fields, units and layout.  Imported by both halves.

A run directory holds `run.json`, `processes/<name>.json` (one header per process) and
`step_<N>/<name>.jsonl` (the events).  `docs/events.md` shows each of them in full.

`EVENTS` is the whole vocabulary, from `fields.md`.  A name that is not in it is either a timer of
verl's trainer (family `trainer`, parent `step`) or an event of the user's own code (family `user`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

FORMAT_VERSION = 1

RUN_FILE = "run.json"

# The domain of all our NVTX ranges.
NVTX_DOMAIN = "verl_profiler"

# The loggers of verl to which a profile can be published.
TRACKERS = ("wandb", "tensorboard", "mlflow")

# Agent-loop workers keep the file name of the original logger: `worker_<rank>.jsonl`.
WORKER_ROLE = "agent_loop"

# These compute inside their event loops, which therefore stall by design.
COMPUTING_ROLES = ("actor", "critic", "ref", "rollout")

# Probe families, the names in `profiler.events.exclude`.
Family = Literal[
    "trainer",
    "rollout",
    "engine",
    "reward",
    "workers",
    "weights",
    "memory",
    "transfer_queue",
    "event_loop",
]
FAMILIES: tuple[Family, ...] = get_args(Family)

# Event-loop stalls of at least this length are recorded.
LAG_THRESHOLD_S = 0.02

# verl's own timing names, in the order in which a step runs them.
PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "update_weights",
    "testing",
)


class Event(msgspec.Struct, frozen=True):
    """One entry of the vocabulary.

    Args:
        family: The probe family that records it; `profiler` for the profiler's own accounts, `devices`
            for samples of devices, which need no probe.
        parent: The event that contains it, or None at the top.
        doc: One sentence.
        instant: True when the line has no `duration_sec`.
    """

    family: str
    parent: str | None
    doc: str
    instant: bool = False


# Of events and fields.
TABLES = Path(__file__).with_name("fields.md")


@functools.cache
def contract(path: Path) -> dict[str, list[list[str]]]:
    """Return the tables of a Markdown file by their headings: of each row its cells."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = found[line.removeprefix("## ")] = []
        elif line.startswith("| `"):
            rows.append(line[2:-2].split(" | "))
    return found


def _event(named: str, family: str, parent: str, doc: str) -> tuple[str, Event]:
    _, name, rest = named.split("`")
    return name, Event(family, parent.strip("`") or None, doc, instant=bool(rest))


EVENTS: dict[str, Event] = dict(_event(*row) for row in contract(TABLES)["Events"])


def depth(event: str) -> int:
    """Count the events that contain this one."""
    known = EVENTS.get(event)
    return 0 if known is None or known.parent is None else 1 + depth(known.parent)


_STEP_FOLDER = re.compile(r"step_([0-9]{1,18})")


def step_folder(step: int) -> str:
    """Name the folder of a step's events: `step_12`."""
    return f"step_{step}"


def step_of_folder(name: str) -> int | None:
    """Return the step of a folder with this name; None if it is no folder of a step."""
    match = _STEP_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


def process_name(role: str, rank: int | None, host: str, pid: int) -> str:
    """Name a process's files: `worker_0`, `actor_1`, `engine_0`, or by host and pid without a rank."""
    if rank is None:
        return f"{role}_{host}_{pid}"
    return f"{'worker' if role == WORKER_ROLE else role}_{rank}"
