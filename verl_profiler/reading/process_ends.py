"""Processes that were killed: what of their events is missing, and how much at most.

A header holds up to when its process's files are complete (`complete_until`), overwritten after every
flush.  A process whose files are complete beyond the last work of all others has lost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, some

__all__ = ["end_problems"]

# Without a sign of life for so long, a process has been killed or is stuck.
_SILENCE_S = 60.0
# Written by timer, or about calls that never ended: no evidence of work.
_NO_WORK = ("profiler_cost", "memory_sample", "device", "event_loop_lag")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SHOWN = 4


@dataclass(frozen=True)
class _Killed:
    """A process without an end.

    Args:
        complete_us: Up to when its files are complete, on the run's axis; None where its header,
            written by an older version, does not have it.
        heard_us: Its last sign of life, on the run's axis.
        window_s: No more than this of events can be missing.
        waiting: Events that it could not write.
    """

    name: str
    complete_us: int | None
    heard_us: int | None
    window_s: float
    waiting: int


def end_problems(
    tables: Tables, now: datetime | None = None, unsent: Mapping[str, Collection[str]] | None = None
) -> Iterator[str]:
    """Yield a sentence for each thing that processes took with them when they were killed.

    Args:
        tables: Of one run or several.
        now: The present, to distinguish a run that goes on from one that was killed as a whole.
        unsent: By run, processes whose files did not arrive from their node; `shipments` has them.
    """
    rows = tables.rows(
        "SELECT run, name, role, shift_us, drift, drift_from_us, ended, header FROM processes "
        "WHERE has_header ORDER BY run, name"
    )
    now_us = _microseconds(now or datetime.now(timezone.utc))
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["name"] not in (unsent or {}).get(row["run"], ()):
            runs.setdefault(row["run"], []).append(row)
    for run, members in runs.items():
        if any(row["ended"] is None for row in members):
            work = _last_work(tables, run)
            yield from _of_run(members, work, now_us)


def _of_run(
    members: list[Mapping[str, Any]], work: Mapping[str, int], now_us: int
) -> Iterator[str]:
    described = [(row, _described(row)) for row in members]
    killed = [each for row, each in described if row["ended"] is None]
    last_us = max((each.heard_us for _, each in described if each.heard_us is not None), default=0)
    last_us = max(last_us, *work.values()) if work else last_us
    silent = [
        each
        for each in killed
        if each.heard_us is not None and last_us - each.heard_us > _SILENCE_S * 1e6
    ]
    yield from _fell_silent(silent, last_us)
    over = any(row["ended"] is not None and row["role"] in ("trainer", "driver") for row in members)
    if not over and now_us - last_us <= _SILENCE_S * 1e6:
        # It goes on, for all that is known, and nothing has been lost.
        return
    waited = {each.name: each.waiting for each in killed if each.waiting}
    if len(waited) <= _SHOWN:
        for name, waiting in waited.items():
            yield f"{name} was killed before it wrote {counted(waiting, 'event')}, now lost"
    else:
        yield (
            f"{len(waited)} processes were killed before they wrote "
            f"{counted(sum(waited.values()), 'event')}, now lost ({some(waited, _SHOWN)})"
        )
    rest = [each for each in killed if each not in silent]
    known = {each.complete_us: each.name for each in rest if each.complete_us is not None}
    if known and len(killed) == len(members):
        # Compared with each other, none of them has lost anything.
        first_us, last_us = min(known), max(known)
        later = f" ({_tenths(last_us)} of {known[last_us]})" if last_us > first_us else ""
        yield (
            f"{_none_of(members)}: the run was killed, or its disk stopped responding; events after "
            f"{_tenths(first_us)} UTC may be lost{later}"
        )
        rest = [each for each in rest if each.complete_us is None]
    lost: dict[str, float] = {}
    for each in rest:
        if each.complete_us is not None:
            others = max((us for name, us in work.items() if name != each.name), default=0)
            gap_s = (others - each.complete_us) / 1e6
            if gap_s > 0:
                lost[each.name] = min(gap_s, each.window_s)
    if lost:
        yield (
            f"{len(lost)} of {len(members)} processes were killed while others worked; "
            f"{_bound(max(lost.values()))} each may be lost ({some(lost, _SHOWN)})"
        )
    old = [each.name for each in rest if each.complete_us is None]
    if old:
        yield (
            f"{len(old)} of {len(members)} processes were killed; up to 0.5 s of events each may be "
            "lost (their headers, of an older version, do not show whether any are)"
        )


def _fell_silent(silent: list[_Killed], last_us: int) -> Iterator[str]:
    """Yield a sentence for each process, or one for all where they are many."""
    heard_us = [each.heard_us or 0 for each in silent]
    if len(silent) <= _SHOWN:
        for each, us in zip(silent, heard_us, strict=True):
            yield (
                f"{each.name} was killed or hung: its last activity was at {_time(us)}, the run's at "
                f"{_time(last_us)} UTC; {_bound(each.window_s)} may be lost"
            )
    else:
        names = some((each.name for each in silent), _SHOWN)
        yield (
            f"{len(silent)} processes were killed or hung ({names}): their last activity was at "
            f"{_time(min(heard_us))} to {_time(max(heard_us))}, the run's at {_time(last_us)} UTC; "
            f"{_bound(max(each.window_s for each in silent))} each may be lost"
        )


def _time(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S}"


def _none_of(members: list[Mapping[str, Any]]) -> str:
    if len(members) == 1:
        return f"{members[0]['name']} recorded no end"
    return f"none of {len(members):,} processes recorded its end"


def _tenths(us: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=us):%H:%M:%S.%f}"[:-5]


def _described(row: Mapping[str, Any]) -> _Killed:
    header = json.loads(row["header"] or "{}")
    shift_us = row["shift_us"] or 0

    def placed(key: str) -> int | None:
        moment = instant(header.get(key))
        if moment is None:
            return None
        own_us = _microseconds(moment)
        drift_us = (row["drift"] or 0.0) * (own_us - (row["drift_from_us"] or 0))
        return own_us + shift_us + round(drift_us)

    complete_us = placed("complete_until")
    heard = [us for us in (complete_us, placed("updated")) if us is not None]
    return _Killed(
        name=row["name"],
        complete_us=complete_us,
        heard_us=max(heard, default=None),
        window_s=(header.get("flush_interval_s") or 0.5) + (header.get("longest_flush_s") or 0.0),
        waiting=header.get("waiting_events") or 0,
    )


def _last_work(tables: Tables, run: str) -> dict[str, int]:
    """Return by process when it is last known to have worked."""
    rows = tables.rows(
        "SELECT name, max(end_us) AS end_us FROM event_fields WHERE run = ? "
        f"AND event NOT IN {_NO_WORK} AND status IS DISTINCT FROM 'unfinished' "
        "AND end_us IS NOT NULL GROUP BY name",
        [run],
    )
    return {row["name"]: row["end_us"] for row in rows}


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _bound(seconds: float) -> str:
    length = f"{seconds:.1f} s" if seconds >= 0.05 else f"{max(seconds * 1000, 1):.0f} ms"
    return f"up to {length} of events"
