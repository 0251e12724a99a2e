"""Why a run does not go on: who waits for whom, down to what waits for nobody.

From the headers, which show up to when each process wrote, and from what each process has open for long.
No event file is read: the answer takes as long for a run of weeks as for a short one.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.events.open_files import stuck_after_s
from verl_profiler.events.vocabulary import COMPUTING_ROLES, WORKER_ROLE
from verl_profiler.reading.descriptions import instant
from verl_profiler.units import counted, seconds

__all__ = ["Link", "Verdict", "verdict"]

# Without a sign of life for so long, beside processes that have them.
_SILENCE_S = 10.0
_FLUSHES = 20
# The run as a whole goes on if any of its processes wrote so lately.
_ALIVE_S = 30.0
# Functions of such modules wait for other ranks.
_COLLECTIVES = ("torch.distributed.",)
_CONTAINERS = ("request", "agent_loop", "postprocess", "turn")
_SHOWN = 3


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
        state: `stuck`, `running`, `ended` or `killed`.
        summary: One sentence.
        at: The last sign of life of the run, ISO-8601.
        chain: Who waits for whom, the trainer first.
        culprit: What the chain ends in; None unless the run is stuck.
        confidence: `high`, `medium` or `low`; None unless the run is stuck.
        evidence: The functions that the culprit is in, the innermost last.
        silent: Processes without a sign of life, and since when.
        unknown: What could not be determined.
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


@dataclass
class _Process:
    name: str
    role: str
    header: Mapping[str, Any]
    open: Mapping[str, Any]
    heard_s: float | None
    ended: bool
    silent_s: float = 0.0

    def rows(self, kind: str) -> list[Mapping[str, Any]]:
        return [row for row in self.open.get(kind) or () if row]


def verdict(
    headers: Mapping[str, Mapping[str, Any]],
    opened: Mapping[str, Mapping[str, Any]],
    now: datetime | None = None,
) -> Verdict:
    """Explain what a run waits for.

    Args:
        headers: Of its processes, by name, as `Run.headers` returns them.
        opened: What they have open for long, as `Run.open_files` returns it.
        now: The present.
    """
    processes = [_process(name, header, opened.get(name) or {}) for name, header in headers.items()]
    known = [each.heard_s for each in processes if each.heard_s is not None]
    if not known:
        return Verdict("running", "No process has written a header yet.")
    last_s = max(known)
    now_s = (now or datetime.now(timezone.utc)).timestamp()
    goes_on = now_s - last_s < _ALIVE_S
    if goes_on:
        last_s = max(last_s, now_s)
    at = _clock(last_s)
    for each in processes:
        if not each.ended and each.heard_s is not None:
            limit_s = max(_SILENCE_S, _FLUSHES * (each.header.get("flush_interval_s") or 0.5))
            each.silent_s = silent if (silent := last_s - each.heard_s) > limit_s else 0.0
    trainers = [each for each in processes if each.role == "trainer"]
    waiting = [(each, row) for each in trainers for row in each.rows("phases")]
    stuck = [
        (each, row)
        for each, row in waiting
        if last_s - _since(row, last_s)
        > stuck_after_s(row.get("usual_s"), each.open.get("after_s") or 60.0)
    ]
    silent = [each for each in processes if each.silent_s]
    over = bool(trainers) and all(each.ended for each in trainers)
    if over and not any(each.open for each in trainers):
        return Verdict("ended", "The trainer ended.", at)
    quiet = [_silence(each) for each in silent]
    if not stuck and not any(each.role == "trainer" for each in silent):
        state = "running" if goes_on else "killed"
        text = "No phase has taken far longer than usual."
        if waiting:
            _, row = waiting[-1]
            text = f"{_phase(row)} has taken {seconds(last_s - _since(row, last_s))} so far{_usually(row)}."
        if state == "killed":
            text = f"The run was killed; it had not been stuck. {text}"
        return Verdict(state, text, at, silent=quiet)
    found = _Search(processes, last_s).explain(stuck)
    found.at, found.silent = at, quiet
    if not goes_on:
        found.unknown.append("The run is over: what was stuck when it was killed is shown.")
    return found


class _Search:
    """Follows the waiting from the trainer on."""

    def __init__(self, processes: Sequence[_Process], last_s: float) -> None:
        self.processes = processes
        self.last_s = last_s
        self.found = Verdict("stuck", "")

    def of(self, *roles: str) -> list[_Process]:
        return [each for each in self.processes if each.role in roles]

    def explain(self, stuck: Sequence[tuple[_Process, Mapping[str, Any]]]) -> Verdict:
        silent = [each for each in self.of("trainer") if each.silent_s]
        if silent and not stuck:
            self.found.summary = (
                f"The trainer has written nothing for {seconds(silent[0].silent_s)}."
            )
            self.blame(silent, [])
            return self.found
        trainer, phase = stuck[-1]
        age_s = self.last_s - _since(phase, self.last_s)
        self.found.summary = f"{_phase(phase)} has taken {seconds(age_s)}{_usually(phase)}."
        inner = [row for row in trainer.rows("calls") if _since(row, 0) >= _since(phase, 0)]
        place = (inner[-1] if inner else phase).get("at")
        self.add(trainer.name, str(phase.get("event")), age_s, place, phase.get("step"))
        if silent:
            self.blame(silent, [])
        elif not (self.ranks() or self.requests()):
            self.others(trainer, phase)
        return self.found

    def add(
        self,
        process: str,
        what: str,
        open_s: float | None,
        at: str | None = None,
        step: int | None = None,
        *,
        depth: int | None = None,
    ) -> None:
        """Add what the last one waits for, or `depth` things."""
        if depth is None:
            depth = self.found.chain[-1].depth + 1 if self.found.chain else 0
        self.found.chain.append(Link(process, what, open_s, at, step, depth))

    def end(self, culprit: str, confidence: str, stack: Iterable[str] = ()) -> None:
        self.found.culprit, self.found.confidence = culprit, confidence
        self.found.evidence = list(stack)

    def blame(self, silent: Sequence[_Process], stack: Iterable[str]) -> None:
        names = _some([each.name for each in silent])
        states = {_state(each) for each in silent} - {None}
        why = f", which {states.pop()}" if len(states) == 1 else ""
        depth = self.found.chain[-1].depth + 1 if self.found.chain else 0
        for each in silent[:_SHOWN]:
            self.add(each.name, "no sign of life", each.silent_s, depth=depth)
        self.end(f"{names}{why}", "high" if why else "medium", stack)

    def ranks(self) -> bool:
        """Follow the ranks, if they have anything open."""
        members = self.of(*COMPUTING_ROLES)
        silent = [each for each in members if each.silent_s]
        busy = [(each, self.innermost(each)) for each in members if not each.silent_s]
        working = [(each, row) for each, row in busy if row is not None]
        if not working:
            if silent and not self.old_requests():
                self.blame(silent, [])
                return True
            return False
        waits = [(each, row) for each, row in working if _in_collective(row)]
        works = [(each, row) for each, row in working if not _in_collective(row)]
        for group in (waits, works):
            for at, ranks in _grouped(group).items():
                what = str(ranks[0][1].get("event"))
                age_s = max(self.age(row) for _, row in ranks)
                self.add(_some([each.name for each, _ in ranks]), what, age_s, at, depth=1)
        idle = [each for each, row in busy if row is None]
        if silent:
            self.blame(silent, [])
        elif works:
            _, row = min(works, key=lambda pair: _since(pair[1], 0))
            names = _some([one.name for one, _ in works])
            self.end(f"{names} in {_place(row)}", "high", row.get("stack") or ())
        elif idle:
            names = _some([each.name for each in idle])
            self.end(f"{names}: in no call, while the other ranks wait in a collective", "medium")
        else:
            _, row = waits[0]
            self.end(
                f"all ranks wait for each other in {_place(row)}: a collective that does not match, "
                "or the network",
                "low",
                row.get("stack") or (),
            )
        return True

    def old_requests(self) -> list[tuple[_Process, Mapping[str, Any]]]:
        return [(each, row) for each in self.of(WORKER_ROLE) for row in each.rows("requests")]

    def requests(self) -> bool:
        """Follow the requests, if any are open for long."""
        workers = self.of(WORKER_ROLE)
        silent = [each for each in workers if each.silent_s]
        pairs = self.old_requests()
        if pairs:
            names = _some(sorted({each.name for each, _ in pairs}))
            age_s = max(self.age(row) for _, row in pairs)
            total = sum(
                max(each.open.get("open_requests") or 0, len(each.rows("requests")))
                for each in workers
            )
            steps = {row.get("step") for _, row in pairs}
            step = steps.pop() if len(steps) == 1 else None
            self.add(names, counted(total, "request"), age_s, None, step)
        if silent:
            self.blame(silent, [])
            return True
        blocked = [(each, row) for each in workers for row in each.rows("blocked_loops")]
        if blocked:
            for each, row in blocked[:_SHOWN]:
                self.add(each.name, "blocked event loop", self.age(row), _place(row), depth=2)
            _, row = max(blocked, key=lambda pair: self.age(pair[1]))
            names = _some([each.name for each, _ in blocked])
            self.end(
                f"{_place(row)} blocks the event loop of {names}, and all requests there",
                "high",
                row.get("stack") or (),
            )
            return True
        if not pairs:
            return False
        inside = [(each, self.inside(each, row)) for each, row in pairs]
        kinds: dict[str, list[tuple[_Process, Mapping[str, Any]]]] = {}
        for each, row in inside:
            kinds.setdefault(str(row.get("event")), []).append((each, row))
        ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
        for kind, group in ordered:
            self.add_calls(kind, group)
        kind, group = ordered[0]
        confidence = "high" if len(group) == len(pairs) else "medium"
        follow = {
            "engine_call": self.engine,
            "engine_attempt": self.engine,
            "reward": self.reward,
        }.get(kind, self.calls)
        follow(group, confidence)
        return True

    def add_calls(self, kind: str, group: Sequence[tuple[_Process, Mapping[str, Any]]]) -> None:
        of = Counter(
            str(
                (row.get("extra") or {}).get("tool") or (row.get("extra") or {}).get("server") or ""
            )
            for _, row in group
        )
        named = ", ".join(f"{name} {count}" for name, count in of.most_common(_SHOWN) if name)
        what = f"{len(group)} in {kind}" + (f" ({named})" if named else "")
        places = Counter(_place(row) for _, row in group)
        age_s = max(self.age(row) for _, row in group)
        self.add(
            _some(sorted({each.name for each, _ in group})),
            what,
            age_s,
            places.most_common(1)[0][0],
            depth=2,
        )

    def calls(self, group: Sequence[tuple[_Process, Mapping[str, Any]]], confidence: str) -> None:
        """Name the calls themselves, those of a tool for example; or a process that answers nobody."""
        silent = [each for each in self.processes if each.silent_s]
        if silent:
            self.blame(silent, [])
            return
        _, oldest = max(group, key=lambda pair: self.age(pair[1]))
        tools = Counter(str((row.get("extra") or {}).get("tool") or "") for _, row in group)
        names = [name for name, _ in tools.most_common(_SHOWN) if name]
        who = str(oldest.get("event"))
        if names:
            who = f"tool{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        self.end(
            f"{who}: {counted(len(group), 'call has', 'calls have')} not returned; "
            f"the oldest is in {_place(oldest)}",
            confidence,
            oldest.get("stack") or (),
        )

    def engine(self, group: Sequence[tuple[_Process, Mapping[str, Any]]], confidence: str) -> None:
        """Follow generate calls into the engines."""
        servers = Counter(str((row.get("extra") or {}).get("server") or "") for _, row in group)
        named = [name for name, _ in servers.most_common(_SHOWN) if name]
        engines = self.of("engine")
        silent = [each for each in engines if each.silent_s]
        if silent:
            self.blame(silent, [])
            return
        where = f" by {' and '.join(named)}" if named else ""
        calls = (
            f"{counted(len(group), 'generate call is', 'generate calls are')} not answered{where}"
        )
        holding = [(each, self.innermost(each)) for each in engines]
        # Others are busy with younger calls.
        least_s = max(self.age(row) for _, row in group) / 2
        holding = [(each, row) for each, row in holding if row and self.age(row) > least_s]
        for each, row in holding:
            self.add(each.name, str(row.get("event")), self.age(row), _place(row), depth=3)
        if len(holding) == 1:
            each, row = holding[0]
            self.end(
                f"{each.name}: {calls}; it is in {_place(row)}", confidence, row.get("stack") or ()
            )
            return
        self.end(calls, "medium" if len(named) == 1 else "low")
        if not holding:
            self.found.unknown.append(
                "No engine process has a request on record that is open for so long: the call may wait in "
                "front of the engine, or in a scheduler, which is not recorded."
            )

    def reward(self, group: Sequence[tuple[_Process, Mapping[str, Any]]], confidence: str) -> None:
        """Follow rewards into their workers."""
        members = self.of("reward")
        silent = [each for each in members if each.silent_s]
        if silent:
            self.blame(silent, [])
            return
        threads = [(each, row) for each in members for row in each.rows("threads")]
        calls = [(each, row) for each in members for row in each.rows("calls")]
        found = threads or calls
        if not found:
            self.calls(group, "medium")
            return
        for at, rows in _grouped(found).items():
            ages = [self.age(row) for _, row in rows if row.get("since")]
            names = _some(sorted({each.name for each, _ in rows}))
            self.add(names, "reward function", max(ages, default=None), at, depth=3)
        _, row = found[0]
        waiting = counted(len(group), "request waits", "requests wait")
        self.end(
            f"the reward function, in {_place(row)}; {waiting} for it",
            confidence,
            row.get("stack") or (),
        )

    def others(self, trainer: _Process, phase: Mapping[str, Any]) -> None:
        """Nothing is open below the trainer: a silent process, or the trainer itself."""
        silent = [each for each in self.processes if each.silent_s]
        if silent:
            self.blame(silent, [])
            return
        inner = trainer.rows("calls")
        row = inner[-1] if inner else phase
        self.end(f"{trainer.name}, in {_place(row)}", "low", row.get("stack") or ())
        self.found.unknown.append("No other process has a recorded call that is open for so long.")

    def innermost(self, process: _Process) -> Mapping[str, Any] | None:
        """Return the innermost of the calls that are open for long, in that which is so longest."""
        after_s = process.open.get("after_s") or 0.0
        rows = [row for row in process.rows("calls") if self.age(row) >= after_s]
        if not rows:
            return None
        oldest = min(rows, key=lambda row: _since(row, 0))
        same = [row for row in rows if row.get("thread") == oldest.get("thread")]
        if oldest.get("thread") is None:
            same = [row for row in rows if _identity(row) == _identity(oldest)]
        return max(same, key=lambda row: _since(row, 0))

    def inside(self, process: _Process, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the innermost call of a request; the request where there is none."""
        wanted = _identity(request)
        rows = [
            row
            for row in process.rows("calls")
            if row.get("event") not in _CONTAINERS and _is_of(row, wanted)
        ]
        if rows:
            return max(rows, key=lambda row: _since(row, 0))
        rows = [row for row in process.rows("calls") if _is_of(row, wanted)]
        return max(rows, key=lambda row: _since(row, 0), default=request)

    def age(self, row: Mapping[str, Any]) -> float:
        return self.last_s - _since(row, self.last_s)


def _process(name: str, header: Mapping[str, Any], opened: Mapping[str, Any]) -> _Process:
    signs = (header.get("complete_until"), header.get("updated"), opened.get("at"))
    heard = [moment.timestamp() for sign in signs if (moment := instant(str(sign).strip()))]
    role = header.get("role") or name.rpartition("_")[0]
    ended = header.get("ended") is not None
    return _Process(name, role, header, opened, max(heard, default=None), ended)


def _since(row: Mapping[str, Any], otherwise: float) -> float:
    moment = instant(row.get("since"))
    return otherwise if moment is None else moment.timestamp()


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    extra = row.get("extra") or {}
    return {
        key: extra[key]
        for key in ("request_id", "sample", "session", "validate")
        if extra.get(key) is not None
    }


def _is_of(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    extra = row.get("extra") or {}
    if "request_id" in wanted and extra.get("request_id") is not None:
        return extra["request_id"] == wanted["request_id"]
    keys = [key for key in ("sample", "session") if extra.get(key) is not None]
    return bool(keys) and all(extra[key] == wanted.get(key) for key in keys)


def _grouped(
    pairs: Iterable[tuple[_Process, Mapping[str, Any]]],
) -> dict[str, list[tuple[_Process, Mapping[str, Any]]]]:
    """Return processes and rows by the function that they are in."""
    groups: dict[str, list[tuple[_Process, Mapping[str, Any]]]] = {}
    for each, row in pairs:
        groups.setdefault(_place(row), []).append((each, row))
    return groups


def _place(row: Mapping[str, Any]) -> str:
    at, user = row.get("at"), row.get("user")
    if at is None:
        return "an unknown place"
    return f"{at}, called by {user}" if user else str(at)


def _in_collective(row: Mapping[str, Any]) -> bool:
    return str(row.get("at")).startswith(_COLLECTIVES)


def _phase(row: Mapping[str, Any]) -> str:
    step = row.get("step")
    return f"{row.get('event')} of step {step}" if step is not None else str(row.get("event"))


def _usually(row: Mapping[str, Any]) -> str:
    usual_s = row.get("usual_s")
    return "" if usual_s is None else f", usually {seconds(usual_s)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} others"


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")


def _silence(process: _Process) -> str:
    state = _state(process)
    since = _clock(process.heard_s or 0.0)
    return f"{process.name} has written nothing since {since}" + (f"; it {state}" if state else "")


def _state(process: _Process) -> str | None:
    """Return what this host shows of a silent process; None of another host's."""
    header = process.header
    boot = (header.get("clock") or {}).get("boot_id")
    pid = header.get("pid")
    if header.get("host") != socket.gethostname() or not boot or pid is None:
        return None
    try:
        own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        if own not in boot:
            return None
        if not os.path.exists(f"/proc/{pid}"):
            return "no longer exists"
        status = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    state = status[0] if status else b""
    return {b"T": "is stopped (SIGSTOP)", b"t": "is held by a debugger", b"Z": "has died"}.get(
        state, "is alive but its profiler thread does not run"
    )
