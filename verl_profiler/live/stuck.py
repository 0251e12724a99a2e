"""Why a run does not go on: who waits for whom, and what they all wait for.

From the headers, which show up to when each process wrote, and from what each process has open for long.
No event file is read: the answer takes as long for a run of weeks as for a short one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.events.open_files import stuck_after_s
from verl_profiler.events.vocabulary import COMPUTING_ROLES, WORKER_ROLE
from verl_profiler.live.ended_runs import (
    clock_text,
    failed,
    failure_of,
    full,
    is_interrupt,
    silent,
)
from verl_profiler.live.evidence import with_evidence
from verl_profiler.live.host_facts import is_alive, state_of
from verl_profiler.live.open_processes import Process, Verdict, age_text, phase_text, since
from verl_profiler.live.wait_chain import explained, open_now
from verl_profiler.reading.descriptions import instant
from verl_profiler.units import seconds

__all__ = ["verdict"]

# Without a sign of life for so long, beside processes that have them.
_SILENCE_S = 10.0
_FLUSHES = 20
# What the trainer waits for lives as long as it does.
_SERVING = (
    *COMPUTING_ROLES,
    WORKER_ROLE,
    "engine",
    "reward",
    "rollouter",
    "message_queue",
    "tq_storage",
)
# The run as a whole goes on if any of its processes wrote so lately.
_ALIVE_S = 30.0


def verdict(
    headers: Mapping[str, Mapping[str, Any]],
    opened: Mapping[str, Mapping[str, Any]],
    directory: Path,
    now: datetime | None = None,
    evidence: Mapping[str, Mapping[str, Any]] | None = None,
) -> Verdict:
    """Explain what a run waits for, or why it ended.

    Args:
        headers: Of its processes, by name, as `Run.headers` returns them.
        opened: What they have open for long, as `Run.open_files` returns it.
        directory: The run; only the room on its disk is looked at.
        now: The present.
        evidence: What they wrote when the run was found to be stuck, as `Run.evidence` returns it.
    """
    processes = [_process(name, header, opened.get(name) or {}) for name, header in headers.items()]
    known = [each.heard_s for each in processes if each.heard_s is not None]
    if not known:
        return Verdict("running", "No process has written a header yet.")
    last_s = max(known)
    now_s = (now or datetime.now(timezone.utc)).timestamp()
    goes_on = now_s - last_s < _ALIVE_S
    trainers = [each for each in processes if each.role == "trainer"]
    failure = failure_of(trainers)
    if failure is not None:
        # Later, its other processes are shut down, one after the other.
        at = instant(failure[0].open.get("at"))
        last_s = last_s if at is None else at.timestamp()
    elif goes_on:
        last_s = max(last_s, now_s)
    _note_silence(processes, last_s)
    # A rollouter that stands still while the trainer goes on counts only then.
    rollouters = [each for each in processes if each.role == "rollouter"]
    stuck = _stuck(trainers, last_s) or _stuck(rollouters, last_s)
    longest = sorted(processes, key=lambda each: -each.silent_s)
    quiet = [_silence(each) for each in longest if each.silent_s]
    rows = [row for _, row in stuck] + ([failure[1]] if failure is not None else [])
    begins = [since(row, last_s) for row in rows]
    begins += [each.heard_s for each in trainers if each.silent_s and each.heard_s is not None]
    _add_evidence(processes, evidence or {}, min(begins, default=None))
    if failure is not None:
        hung = explained(processes, stuck, last_s) if stuck else None
        if hung is not None and is_interrupt(failure[1]):
            found = hung
        else:
            found = failed(processes, *failure, hung)
        found.at, found.silent = clock_text(last_s), quiet
        return with_evidence(found, processes)
    over = bool(trainers) and all(each.ended for each in trainers)
    if over and not any(each.open for each in trainers):
        return Verdict("ended", "The trainer ended.", clock_text(last_s))
    if not over and (goes_on or any(is_alive(each.header) for each in trainers)):
        unwritten = None if stuck else full(directory, last_s)
        found = unwritten or (None if goes_on else silent(trainers, last_s, now_s))
        if found is not None:
            found.silent = quiet
            return found
    if not stuck and not any(each.silent_s for each in trainers):
        found = _unsuspicious(trainers, last_s, "running" if goes_on else "killed")
        if goes_on:
            _add_open(found, processes, trainers, last_s)
        elsewhere = [each.name for each in trainers if state_of(each.header) is None]
        if elsewhere and not goes_on:
            found.unknown.append(f"Whether {elsewhere[0]} is alive: it was on another host.")
    else:
        found = explained(processes, stuck, last_s)
        if not goes_on:
            found.unknown.append(
                "Whether it would have gone on: the run is over, and this is when it was killed."
            )
    found.at, found.silent = clock_text(last_s), quiet
    return with_evidence(found, processes) if found.is_alarm else found


def _add_evidence(
    processes: Sequence[Process],
    evidence: Mapping[str, Mapping[str, Any]],
    begin_s: float | None,
) -> None:
    """Give processes their evidence, if it is of what is stuck or failed since then."""
    for each in processes:
        found = evidence.get(each.name) or {}
        moment = instant(found.get("at"))
        if begin_s is not None and moment is not None and moment.timestamp() >= begin_s:
            each.evidence = found


def _note_silence(processes: Sequence[Process], last_s: float) -> None:
    """Set how long each process has been silent while others were not; one that ended before the trainer is."""
    trained_s = [each.heard_s or 0.0 for each in processes if each.role == "trainer"]
    for each in processes:
        if each.heard_s is not None:
            limit_s = max(_SILENCE_S, _FLUSHES * (each.header.get("flush_interval_s") or 0.5))
            until_s = last_s if not each.ended else min(trained_s, default=each.heard_s)
            served = not each.ended or each.role in _SERVING
            each.silent_s = gap_s if served and (gap_s := until_s - each.heard_s) > limit_s else 0.0


def _stuck(trainers: Sequence[Process], last_s: float) -> list[tuple[Process, Mapping[str, Any]]]:
    """Return the innermost phases that are open for far longer than usual."""
    return [
        (each, row)
        for each in trainers
        for row in each.rows("phases")[-1:]
        if last_s - since(row, last_s)
        > stuck_after_s(row.get("usual_s"), each.open.get("after_s") or 60.0, row.get("longest_s"))
    ]


def _unsuspicious(trainers: Sequence[Process], last_s: float, state: str) -> Verdict:
    text = "No phase has taken far longer than usual."
    waiting = [row for each in trainers for row in each.rows("phases")]
    if waiting:
        row = waiting[-1]
        length = seconds(last_s - since(row, last_s))
        text = f"{phase_text(row)} has taken {length} so far{age_text(row)}."
    if state == "killed":
        text = f"The run was killed; it had not been stuck. {text}"
    return Verdict(state, text)


def _add_open(
    found: Verdict, processes: Sequence[Process], trainers: Sequence[Process], last_s: float
) -> None:
    """Add what is open for long in a phase whose usual length is not known, or before the first phase."""
    phases = [(each, row) for each in trainers for row in each.rows("phases")[-1:]]
    new = [(each, row) for each, row in phases if row.get("usual_s") is None]
    if phases and not new:
        return
    if not phases:
        found.chain = open_now(processes, last_s)
        usual = "no phase of a trainer is on record as open"
    else:
        waits = explained(processes, new, last_s)
        if len(waits.chain) < 2:
            return
        found.chain, found.evidence = waits.chain, waits.evidence
        found.facts = [f"Open: {waits.culprit}", *waits.facts]
        found.unknown += waits.unknown
        usual = f"how long {new[-1][1].get('event')} usually takes is not known yet"
    if found.chain:
        found.unknown.insert(0, f"Whether this is unusual: {usual}.")


def _process(name: str, header: Mapping[str, Any], opened: Mapping[str, Any]) -> Process:
    signs = (header.get("complete_until"), header.get("updated"), opened.get("at"))
    heard = [moment.timestamp() for sign in signs if (moment := instant(str(sign).strip()))]
    role = header.get("role") or name.rpartition("_")[0]
    ended = header.get("ended") is not None
    return Process(name, role, header, opened, max(heard, default=None), ended)


def _silence(process: Process) -> str:
    state = state_of(process.header)
    heard = clock_text(process.heard_s or 0.0)
    since_then = f"ended at {heard}" if process.ended else f"has written nothing since {heard}"
    return f"{process.name} {since_then}" + (f"; it {state}" if state else "")
