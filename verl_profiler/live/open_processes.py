"""What is known of the processes of a run that may be stuck: from their small files, and from this host.

Nothing is written, locked or requested from the run.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler import units
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.open_files import EVIDENCE_FOLDER, FOLDER
from verl_profiler.reading.descriptions import Evidence, Opened, described, instant
from verl_profiler.reading.discovery import as_text, described_run
from verl_profiler.reading.problems import Problems
from verl_profiler.units import seconds

# Functions of such modules wait for other ranks.
_COLLECTIVES = ("torch.distributed.",)
# Functions of such modules wait for an answer of another process.
_CALLS = (
    "aiohttp.", "asyncio.", "grpc.", "http.", "httpcore.", "httpx.", "multiprocessing.connection",
    "ray.", "requests.", "selectors", "socket", "ssl", "urllib", "zmq.",
)  # fmt: skip
# Innermost functions that wait for what another call, which is not on record, must do.
_LOCKS = {
    "asyncio.locks:Semaphore.acquire": "a semaphore",
    "asyncio.locks:Lock.acquire": "a lock",
    "asyncio.locks:Condition.wait": "a condition",
    "asyncio.locks:Event.wait": "an event",
    "asyncio.queues:Queue.get": "an item of a queue",
    "asyncio.queues:Queue.put": "room in a queue",
    "threading:Semaphore.acquire": "a semaphore",
    "threading:Condition.wait": "another thread",
    "queue:Queue.get": "an item of a queue",
    "queue:Queue.put": "room in a queue",
}
_PYTHONS = ("asyncio.", "concurrent.", "ray.")
# Threads whose innermost function is in such a module wait for work.
_IDLE = ("threading:", "queue:", "selectors:", "socketserver:", "asyncio.", "concurrent.", "ray.")
_SHOWN = 3
_GONE = "no longer exists"
_STATES = {
    b"T": "is stopped (SIGSTOP)",
    b"t": "is held by a debugger",
    b"Z": "has died",
    b"X": "has died",
    b"D": "waits for a disk or a driver, in the kernel",
}
_HANG = re.compile(r"[0-9]{1,3}")


@dataclass
class Link:
    """One thing that waits for the next one.

    Args:
        process: The process, or processes, that it is in.
        what: What it is: a phase, requests, calls.
        open_s: How long it is open, the longest of them.
        at: The function in which it stands; None where that is not on record.
        step: verl's global step.
        depth: How many things wait for it, one in the other; 0 for the trainer's phase.
    """

    process: str
    what: str
    open_s: float | None = None
    at: str | None = None
    step: int | None = None
    depth: int = 0


@dataclass
class Verdict:
    """What is known of a run.

    Args:
        state: `stuck`, `failed`, `silent`, `running`, `ended` or `killed`; see docs/stuck.md.
        summary: One sentence.
        at: The last sign of life of the run, ISO-8601.
        chain: Who waits for whom, the trainer first.
        culprit: What the chain ends in; None unless the run is stuck, failed or silent.
        confidence: `high`, `medium` or `low`; None without a culprit.
        evidence: The functions that the culprit is in, the innermost last.
        silent: Processes without a sign of life, and since when.
        unknown: What could not be determined.
        facts: What else was found: of ranks and engines, a line each.
        details: Lines of the evidence by process.
    """

    state: str
    summary: str
    at: str | None = None
    chain: list[Link] = field(default_factory=list[Link])
    culprit: str | None = None
    confidence: str | None = None
    evidence: list[str] = field(default_factory=list[str])
    silent: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    facts: list[str] = field(default_factory=list[str])
    details: list[str] = field(default_factory=list[str])

    @property
    def is_alarm(self) -> bool:
        """Whether somebody should look at the run."""
        return self.state in ("stuck", "failed", "silent")


@dataclass
class Process:
    """A process: its header, and what it has open for long.

    Args:
        heard_s: Its last sign of life, seconds since 1970.
        silent_s: How long it has had none, if the others have; else 0.
        evidence: What it wrote when the run was found to be stuck; empty without.
    """

    name: str
    role: str
    header: Mapping[str, Any]
    open: Mapping[str, Any]
    heard_s: float | None
    ended: bool
    silent_s: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def rows(self, kind: str) -> list[Mapping[str, Any]]:
        """Return what it has open of a kind: `phases`, `requests`, `calls`, `blocked_loops`, `threads`."""
        return parts(self.open, kind)


def part(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at a key; empty where there is none."""
    return content.get(key) or {}


def parts(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list at a key."""
    return [row for row in content.get(key) or () if row]


def texts(content: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of the list at a key."""
    return [str(each) for each in content.get(key) or () if each is not None]


def most_frequent_stack(evidence: Mapping[str, Any]) -> list[str]:
    """Return the functions in which most tasks of a process stand, Python's own left out."""
    found: list[str] = []
    most = 0
    for row in parts(part(evidence, "stacks"), "tasks"):
        stack = [each for each in texts(row, "stack") if not each.startswith(_PYTHONS)]
        if stack and (row.get("tasks") or 0) > most:
            found, most = stack, row.get("tasks") or 0
    return found


def busy_threads(evidence: Mapping[str, Any]) -> list[str]:
    """Return the innermost functions of threads that do not just wait for work, the most frequent first."""
    stacks = [texts(row, "stack") for row in parts(part(evidence, "stacks"), "threads")]
    ends = Counter(stack[-1] for stack in stacks if stack and not stack[-1].startswith(_IDLE))
    return [place for place, _ in ends.most_common()]


def since(row: Mapping[str, Any], otherwise: float) -> float:
    """Return when it began, in seconds since 1970."""
    moment = instant(row.get("since"))
    return otherwise if moment is None else moment.timestamp()


def identity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names the request of a row."""
    extra = mapping_or_empty(row.get("extra"))
    return {
        key: extra[key]
        for key in ("request_id", "sample", "session", "validate")
        if extra.get(key) is not None
    }


def is_of(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a row is of the request with this identity."""
    extra = mapping_or_empty(row.get("extra"))
    if "request_id" in wanted and extra.get("request_id") is not None:
        return bool(extra["request_id"] == wanted["request_id"])
    keys = [key for key in ("sample", "session") if extra.get(key) is not None]
    return bool(keys) and all(extra[key] == wanted.get(key) for key in keys)


def grouped(
    pairs: Iterable[tuple[Process, Mapping[str, Any]]],
) -> dict[str, list[tuple[Process, Mapping[str, Any]]]]:
    """Return processes and rows by the function that they are in."""
    groups: dict[str, list[tuple[Process, Mapping[str, Any]]]] = {}
    for each, row in pairs:
        groups.setdefault(place(row), []).append((each, row))
    return groups


def place(row: Mapping[str, Any]) -> str:
    """Write where it stands."""
    at, user = row.get("at"), row.get("user")
    if at is None:
        return "an unknown place"
    return f"{at}, called by {user}" if user else str(at)


def standing(row: Mapping[str, Any]) -> str:
    """Write where it stands, and what kind of lock or queue it waits for."""
    stack = row.get("stack") or ()
    innermost = str(stack[-1]).rpartition(":")[0] if stack else ""
    awaited = _LOCKS.get(innermost)
    if awaited is None:
        return place(row)
    return f"{place(row)}, which waits for {awaited}"


def in_collective(row: Mapping[str, Any]) -> bool:
    """Whether it waits for other ranks."""
    return str(row.get("at")).startswith(_COLLECTIVES)


def calls_another(row: Mapping[str, Any]) -> bool:
    """Whether it waits for the answer of another process."""
    return str(row.get("at")).startswith(_CALLS)


def phase_text(row: Mapping[str, Any]) -> str:
    """Write a phase: `gen of step 3`."""
    step = row.get("step")
    return f"{row.get('event')} of step {step}" if step is not None else str(row.get("event"))


def age_text(row: Mapping[str, Any]) -> str:
    """Write the usual length of a phase, after a comma; empty if it is not known."""
    usual_s = row.get("usual_s")
    return "" if usual_s is None else f", usually {seconds(usual_s)}"


def some(names: Sequence[str]) -> str:
    """Write the first few of some names."""
    return units.some(names, _SHOWN)


def clock_text(at_s: float) -> str:
    """Write a time, in UTC."""
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")


def state_of(header: Mapping[str, Any]) -> str | None:
    """Return what this host shows of a silent process; None of one of another host or boot.

    Args:
        header: Of the process.
    """
    boot = mapping_or_empty(header.get("clock")).get("boot_id")
    pid = header.get("pid")
    if header.get("host") != socket.gethostname() or not boot or type(pid) is not int:
        return None
    try:
        own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if own not in boot:
        return None
    if not os.path.exists(f"/proc/{pid}"):
        return _GONE
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    alive = "is alive but its profiler thread does not run"
    return _STATES.get(status[0] if status else b"", alive)


def is_alive(header: Mapping[str, Any]) -> bool:
    """Whether the process is on this host and runs, or could run."""
    return state_of(header) not in (None, _GONE, "has died")


def free_bytes(directory: Path) -> int | None:
    """Return what a process without privileges may still write there; None if that is not known."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


class ProcessFiles:
    """The small files of a run directory.

    Args:
        directory: The run.

    Attributes:
        damaged: Problems found in run.json and the headers at the last read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[str] = []

    def headers(self) -> dict[str, dict[str, Any]]:
        """Return the current headers of all processes by name, and record problems in them."""
        self.damaged = []
        return described_run(self.directory, self.damaged).headers

    def open_files(self) -> dict[str, dict[str, Any]]:
        """Return what each process has open for long, by name; see docs/stuck.md."""
        return self._described(FOLDER, Opened)

    def evidence(self) -> dict[str, dict[str, Any]]:
        """Return the evidence of the last hang that was found, by process; see docs/stuck.md."""
        numbers = [
            int(each.name)
            for each in (self.directory / EVIDENCE_FOLDER).glob("*")
            if _HANG.fullmatch(each.name)
        ]
        if not numbers:
            return {}
        return self._described(f"{EVIDENCE_FOLDER}/{max(numbers)}", Evidence)

    def _described(self, folder: str, kind: Any) -> dict[str, dict[str, Any]]:
        faults = Problems()
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.directory / folder).glob("*.json")):
            shown = f"{folder}/{as_text(path.name)}"
            content = described(path, shown, kind, faults)
            if content is not None:
                found[as_text(path.stem)] = content
        self.damaged += faults.sentences()
        return found
