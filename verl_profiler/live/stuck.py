"""Why a run does not go on: who waits for whom, down to what waits for nobody.

From the headers, which show up to when each process wrote, and from what each process has open for long.
No event file is read: the answer takes as long for a run of weeks as for a short one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from verl_profiler.events.open_files import stuck_after_s
from verl_profiler.live.open_processes import (
    Process,
    Verdict,
    age_text,
    phase_text,
    since,
    state_of,
)
from verl_profiler.live.wait_chain import explained
from verl_profiler.reading.descriptions import instant
from verl_profiler.units import seconds

__all__ = ["verdict"]

# Without a sign of life for so long, beside processes that have them.
_SILENCE_S = 10.0
_FLUSHES = 20
# The run as a whole goes on if any of its processes wrote so lately.
_ALIVE_S = 30.0


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
    innermost = [(each, row) for each in trainers for row in each.rows("phases")[-1:]]
    stuck = [
        (each, row)
        for each, row in innermost
        if last_s - since(row, last_s)
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
            text = f"{phase_text(row)} has taken {seconds(last_s - since(row, last_s))} so far{age_text(row)}."
        if state == "killed":
            text = f"The run was killed; it had not been stuck. {text}"
        return Verdict(state, text, at, silent=quiet)
    found = explained(processes, stuck, last_s)
    found.at, found.silent = at, quiet
    if not goes_on:
        found.unknown.append("The run is over: what was stuck when it was killed is shown.")
    return found


def _process(name: str, header: Mapping[str, Any], opened: Mapping[str, Any]) -> Process:
    signs = (header.get("complete_until"), header.get("updated"), opened.get("at"))
    heard = [moment.timestamp() for sign in signs if (moment := instant(str(sign).strip()))]
    role = header.get("role") or name.rpartition("_")[0]
    ended = header.get("ended") is not None
    return Process(name, role, header, opened, max(heard, default=None), ended)


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")


def _silence(process: Process) -> str:
    state = state_of(process)
    heard = _clock(process.heard_s or 0.0)
    return f"{process.name} has written nothing since {heard}" + (f"; it {state}" if state else "")
