"""Processes that were killed: what of their events is missing, and how much at most.

A header holds up to when its process's files are complete (`complete_until`), overwritten after every
flush.  A process whose files are complete beyond the last work of all others has lost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone

from verl_profiler.reading.processes import Process, named
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, some

__all__ = ["end_problems"]

# Without a sign of life for so long, a process has been killed or is stuck.
_SILENCE_S = 60.0
# Written by timer, or about calls that never ended: no evidence of work.
_NO_WORK = ("profiler_cost", "device", "event_loop_lag")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SHOWN = 4


def end_problems(
    tables: Tables, processes: Iterable[Process], now: datetime | None = None
) -> Iterator[str]:
    """Yield a sentence for each thing that processes took with them when they were killed.

    Args:
        tables: Of one run or several.
        processes: Theirs, without those whose files did not arrive from their node.
        now: The present, to distinguish a run that goes on from one that was killed as a whole.
    """
    now_us = ((now or datetime.now(timezone.utc)) - _EPOCH) // timedelta(microseconds=1)
    runs: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda each: (each.run, each.name)):
        if process.header is not None:
            runs.setdefault(process.run, []).append(process)
    for run, members in runs.items():
        if any(each.of("ended") is None for each in members):
            yield from _of_run(members, _last_work(tables, run), now_us)


def _of_run(members: list[Process], work: Mapping[str, int], now_us: int) -> Iterator[str]:
    killed = [each for each in members if each.of("ended") is None]
    heard = {each.name: _heard_us(each) for each in members}
    last_us = max((us for us in (*heard.values(), *work.values()) if us is not None), default=0)
    silent = [each for each in killed if last_us - (heard[each.name] or last_us) > _SILENCE_S * 1e6]
    yield from _fell_silent(silent, last_us)
    over = any(each.of("ended") and each.role in ("trainer", "driver") for each in members)
    if not over and now_us - last_us <= _SILENCE_S * 1e6:
        # It goes on, for all that is known, and nothing has been lost.
        return
    waited = {each.name: count for each in killed if (count := each.of("waiting_events"))}
    if waited:
        yield (
            f"{named(waited)} {_was(waited)} killed before {_they(waited)} wrote "
            f"{counted(sum(waited.values()), 'event')}, now lost"
        )
    rest = [each for each in killed if each not in silent]
    complete = {each.name: each.placed_us("complete_until") for each in rest}
    known = {us: name for name, us in complete.items() if us is not None}
    if known and len(killed) == len(members):
        # Compared with each other, none of them has lost anything.
        first_us, last_us = min(known), max(known)
        later = f" ({_tenths(last_us)} of {known[last_us]})" if last_us > first_us else ""
        yield (
            f"{_none_of(members)}: the run was killed, or its disk stopped responding; events after "
            f"{_tenths(first_us)} UTC may be lost{later}"
        )
        return
    lost: dict[str, float] = {}
    for each in rest:
        until_us = complete[each.name]
        others_us = max((us for name, us in work.items() if name != each.name), default=0)
        if until_us is not None and others_us > until_us:
            lost[each.name] = min((others_us - until_us) / 1e6, _window_s(each))
    if lost:
        yield (
            f"{len(lost)} of {len(members)} processes were killed while others worked; "
            f"{_bound(max(lost.values()))} each may be lost ({some(lost, _SHOWN)})"
        )


def _fell_silent(silent: list[Process], last_us: int) -> Iterator[str]:
    """Yield a sentence for all of them."""
    if silent:
        heard_us = sorted({_heard_us(each) or 0 for each in silent})
        last = " to ".join(dict.fromkeys(map(_time, (heard_us[0], heard_us[-1]))))
        names = [each.name for each in silent]
        each = " each" if names[1:] else ""
        yield (
            f"{named(names)} {_was(names)} killed or hung: last activity at {last}, the run's at "
            f"{_time(last_us)} UTC; {_bound(max(map(_window_s, silent)))}{each} may be lost"
        )


def _was(names: Collection[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _they(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "they"


def _time(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S}"


def _none_of(members: list[Process]) -> str:
    if len(members) == 1:
        return f"{members[0].name} recorded no end"
    return f"none of {len(members):,} processes recorded its end"


def _tenths(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S.%f}"[:-5]


def _heard_us(process: Process) -> int | None:
    """Return the last sign of life of a process, on the run's axis."""
    signs = (process.placed_us("complete_until"), process.placed_us("updated"))
    return max((us for us in signs if us is not None), default=None)


def _window_s(process: Process) -> float:
    """Return of how much time events can be missing at most."""
    return (process.of("flush_interval_s") or 0.5) + (process.of("longest_flush_s") or 0.0)


def _last_work(tables: Tables, run: str) -> dict[str, int]:
    """Return by process when it is last known to have worked."""
    rows = tables.rows(
        "SELECT name, max(end_us) AS end_us FROM event_fields WHERE run = ? "
        f"AND event NOT IN {_NO_WORK} AND status IS DISTINCT FROM 'unfinished' "
        "AND end_us IS NOT NULL GROUP BY name",
        [run],
    )
    return {row["name"]: row["end_us"] for row in rows}


def _bound(seconds: float) -> str:
    length = f"{seconds:.1f} s" if seconds >= 0.05 else f"{max(seconds * 1000, 1):.0f} ms"
    return f"up to {length} of events"
