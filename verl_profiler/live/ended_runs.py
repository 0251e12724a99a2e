"""Runs that do not go on: what failed, which process died, why nothing is written any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.live.host_facts import free_bytes, is_alive, state_of
from verl_profiler.live.open_processes import Link, Process, Verdict, phase_text, standing
from verl_profiler.units import seconds, size

__all__ = ["clock_text", "failed", "failure_of", "full", "is_interrupt", "silent"]

# Not failures: somebody ended the run.
_INTERRUPTS = ("KeyboardInterrupt", "SystemExit")
# Of Ray: the process is gone, rather than an exception raised in it.
_DEATHS = ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError")
# Of its memory monitor; torch has an OutOfMemoryError of its own, which kills nothing.
_MEMORY_MONITOR = "Memory on the node"
_UNWRITTEN = (
    "What the run waits for: no process can write what it has open. Events are kept in memory or counted "
    "as dropped until there is room; training goes on unless it writes there, too."
)
# Less room than this is none: files are written in blocks.
_ROOM_BYTES = 64 << 10


def failure_of(trainers: Sequence[Process]) -> tuple[Process, Mapping[str, Any]] | None:
    """Return the trainer whose last phase an exception ended, and that phase."""
    for each in trainers:
        row = each.open.get("failed")
        if row and row.get("error"):
            return each, row
    return None


def is_interrupt(row: Mapping[str, Any]) -> bool:
    """Whether a phase ended because somebody ended the run."""
    return row.get("error") in _INTERRUPTS


def failed(
    processes: Sequence[Process],
    trainer: Process,
    row: Mapping[str, Any],
    hung: Verdict | None,
) -> Verdict:
    """Explain a run whose trainer ended with an exception.

    Args:
        processes: All of the run.
        trainer: The one that failed.
        row: The phase, as `open/<name>.json` has it.
        hung: What it waited for, if the phase was stuck before it failed.
    """
    error, open_s = str(row["error"]), row.get("open_s") or 0.0
    text = f"{phase_text(row)} failed after {seconds(open_s)}: {error}."
    found = Verdict("failed", text)
    if is_interrupt(row):
        found.state = "ended"
        found.summary = f"{phase_text(row)} was interrupted after {seconds(open_s)} ({error})."
        return found
    pid, reason = row.get("pid"), row.get("reason")
    raised = [each for each in processes if pid is not None and each.header.get("pid") == pid]
    killed = error in _DEATHS or str(reason).startswith(_MEMORY_MONITOR)
    died = killed and pid is not None
    if hung is not None and not died:
        found.chain, found.culprit, found.confidence = hung.chain, hung.culprit, hung.confidence
        found.evidence, found.silent, found.unknown = hung.evidence, hung.silent, hung.unknown
        return found
    found.chain.append(
        Link(trainer.name, str(row.get("event")), open_s, row.get("at"), row.get("step"))
    )
    who = raised[0] if len(raised) == 1 else None
    named = trainer.name if pid is None else f"a process with pid {pid} on {row.get('ip')}"
    named = who.name if who is not None else named
    if who is not None:
        found.chain.append(_last_of(who))
    because = f": {reason}" if reason else ""
    if died:
        found.culprit = f"{named}, which died{because}"
    else:
        found.culprit = f"{named} raised {error}{because}"
    found.confidence = "high" if who is not None or pid is None else "medium"
    if died and not reason:
        found.unknown.append("Why it died: Ray gave no reason; its logs may have one.")
    return found


def _last_of(process: Process) -> Link:
    """Return what a process was in when it was last looked at."""
    rows = process.rows("calls")
    row = rows[-1] if rows else None
    heard = "" if process.heard_s is None else f"last sign of life at {clock_text(process.heard_s)}"
    if row is None:
        return Link(process.name, heard or "no sign of life", depth=1)
    what = f"{row.get('event')}, {heard}"
    return Link(process.name, what, row.get("open_s"), standing(row), row.get("step"), 1)


def full(directory: Path, last_s: float) -> Verdict | None:
    """Explain a run that cannot write what it has open; None if its disk has room, as far as is known.

    Headers are overwritten in place, so its processes still show signs of life.
    """
    room = free_bytes(directory)
    if room is None or room >= _ROOM_BYTES:
        return None
    return Verdict(
        "silent",
        f"The disk of {directory} is full.",
        clock_text(last_s),
        culprit=f"the disk of {directory}: {size(room)} are free",
        confidence="high",
        unknown=[_UNWRITTEN],
    )


def silent(trainers: Sequence[Process], last_s: float, now_s: float) -> Verdict | None:
    """Explain why nothing is written although the trainer exists; None if it does not, as far as is known.

    Args:
        trainers: Of the run.
        last_s: The run's last sign of life, seconds since 1970.
        now_s: The present.
    """
    alive = [each for each in trainers if not each.ended and is_alive(each.header)]
    if not alive:
        return None
    name, state = alive[0].name, state_of(alive[0].header)
    return Verdict(
        "silent",
        f"Nothing has been written for {seconds(now_s - last_s)}, and {name} {state}.",
        clock_text(last_s),
        culprit=f"{name}, which {state}",
        confidence="medium",
    )


def clock_text(at_s: float) -> str:
    """Write a time, in UTC."""
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")
