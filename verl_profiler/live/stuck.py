"""Why a run does not go on: who waits for whom, and what they all wait for.

From the headers, which show up to when each process wrote, and from what each process has open for long.
The evidence that the processes gathered of a hang (docs/stuck.md) is added, a line of each kind that matters,
and all of it for `-v`.  No event file is read: the answer takes as long for a run of weeks as for a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.events.open_files import stuck_after_s
from verl_profiler.events.vocabulary import COMPUTING_ROLES, WORKER_ROLE
from verl_profiler.live.open_processes import (
    Link,
    Process,
    ProcessFiles,
    Verdict,
    age_text,
    busy_threads,
    clock_text,
    free_bytes,
    is_alive,
    part,
    parts,
    phase_text,
    since,
    some,
    standing,
    state_of,
    texts,
)
from verl_profiler.live.wait_chain import explained, open_now
from verl_profiler.reading.descriptions import instant
from verl_profiler.units import counted, seconds, size

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
_SHOWN = 3
# Not failures: somebody ended the run.
_INTERRUPTS = ("KeyboardInterrupt", "SystemExit")
# Of Ray: the process is gone, rather than an exception raised in it.
_DEATHS = ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError")
# Of its memory monitor; torch has an OutOfMemoryError of its own, which kills nothing.
_MEMORY_MONITOR = "the host's memory ran out"
_UNWRITTEN = (
    "What the run waits for: no process can write what it has open. Events are kept in memory or counted "
    "as dropped until there is room; training goes on unless it writes there, too."
)
# Less room than this is none: files are written in blocks.
_ROOM_BYTES = 64 << 10
# Without -v, so many of a kind: all of it fits on a screen.
_BRIEF = 6


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


def with_evidence(found: Verdict, processes: Sequence[Process]) -> Verdict:
    """Add to a verdict the load of the engines, a line for each, and the evidence of each process for `-v`."""
    lines = [f"{each.name}: {text}" for each in processes if (text := _engine_text(each))]
    others = len(lines) - _SHOWN * 2
    found.facts += lines
    if others > 0:
        found.facts[-others:] = [f"{others} other engines: see -v"]
    for each in processes:
        own = [*_process_details(each)] if each.evidence else []
        if own:
            found.details += [f"{each.name}:", *(f"    {text}" for text in own)]
    return found


def _engine_text(process: Process) -> str:
    """Write the load of an engine: `3 running, 5 waiting, KV cache 12 % of 16,384 tokens`."""
    found = part(process.evidence, "engine")
    facts: list[str] = []
    unanswered = found.get("unanswered")
    if unanswered == "scheduler":
        facts.append("its scheduler does not answer")
    elif unanswered:
        facts.append(f"its {unanswered} does not answer")
    elif "engine" in texts(process.evidence, "unanswered"):
        facts.append("its server does not answer")
    loads = parts(found, "loads")
    for key, word in (("running_requests", "running"), ("waiting_requests", "waiting")):
        known = [each[key] for each in loads if each.get(key) is not None]
        if known:
            facts.append(f"{sum(known)} {word}")
    capacity = sum(each.get("kv_capacity_tokens") or 0 for each in loads)
    if capacity:
        used = sum(each.get("kv_used_tokens") or 0 for each in loads)
        facts.append(f"KV cache {100 * used / capacity:.0f} % of {capacity:,} tokens")
    if found.get("requests") is not None:
        facts.append(f"{counted(found['requests'], 'request')} in its server")
    if found.get("paused"):
        facts.append("paused")
    ages = [each["age_s"] for each in loads if each.get("age_s") is not None]
    if ages:
        facts.append(f"last iteration {max(ages):.0f} s before")
    return ", ".join(facts)


def _process_details(process: Process) -> Iterator[str]:
    found: Mapping[str, Any] = process.evidence
    text = _engine_text(process)
    if text:
        yield f"engine: {text}"
    stacks = part(found, "stacks")
    tasks = [row for row in parts(stacks, "tasks") if texts(row, "stack")]
    for row in tasks[:_SHOWN]:
        awaited = f", awaiting {row['awaits']}" if row.get("awaits") else ""
        stack = texts(row, "stack")
        at = next((each for each in stack[::-1] if not each.startswith("asyncio.")), stack[-1])
        yield f"{counted(row.get('tasks') or 0, 'task')} in {at}{awaited}"
    threads = busy_threads(found)
    if threads:
        yield f"threads in {some(threads)}"
    for name in texts(found, "unanswered"):
        yield f"{name}: no answer in time"
    for name, error in part(found, "errors").items():
        yield f"{name}: not available ({error})"


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
    killed = error in _DEATHS or _MEMORY_MONITOR in str(reason)
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


def pointer(files: ProcessFiles) -> str | None:
    """Return a line for other commands if a run is stuck or failed: on what, and what explains it."""
    opened = files.open_files()
    if not opened:
        # The usual case: no header needs to be read.
        return None
    return alarm(verdict(files.headers(), opened, files.directory), files.directory)


def alarm(found: Verdict, directory: Path) -> str | None:
    """Return that line; None if nobody needs to look at the run."""
    if not found.is_alarm:
        return None
    return f"{found.state}: {found.summary} Culprit: {found.culprit}. See verl-profiler stuck {directory}"


def lines(found: Verdict, *, verbose: bool = False) -> Iterator[str]:
    """Yield the lines that explain a run.

    Args:
        found: What is known of it.
        verbose: With the stack of the culprit and the evidence of each process.
    """
    yield f"{found.state}: {found.summary}"
    if found.chain:
        yield ""
    for link in found.chain:
        yield f"{'   ' * (link.depth - 1) + '└─ ' if link.depth else ''}{_shown(link)}"
    if found.culprit is not None:
        yield ""
        yield f"Culprit: {found.culprit}"
        yield f"Confidence: {found.confidence}"
    if found.facts:
        yield ""
        yield from _first(found.facts, "facts", verbose=verbose)
    if verbose and found.evidence:
        yield ""
        yield "Stack of the culprit, the innermost last:"
        yield from (f"    {place}" for place in found.evidence)
    if verbose and found.details:
        yield ""
        yield "Evidence:"
        yield from found.details
    if found.silent:
        yield ""
        yield from _first(found.silent, "silent processes", verbose=verbose)
    if found.unknown:
        yield ""
        unknown = [f"Not determined: {text}" for text in found.unknown]
        yield from _first(unknown, "points not determined", verbose=verbose)


def _first(texts: Sequence[str], what: str, *, verbose: bool) -> Iterator[str]:
    """Yield the first lines, and how many there are besides; all if verbose."""
    count = len(texts) if verbose or len(texts) == _BRIEF + 1 else _BRIEF
    yield from texts[:count]
    if len(texts) > count:
        yield f"and {len(texts) - count:,} more {what}; -v lists them"


def _shown(link: Link) -> str:
    step = "" if link.step is None else f" of step {link.step}"
    age = "" if link.open_s is None else f", {seconds(link.open_s)}"
    at = "" if link.at is None else f", in {link.at}"
    return f"{link.process}: {link.what}{step}{age}{at}"
