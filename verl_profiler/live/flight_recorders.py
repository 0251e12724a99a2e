"""Where the ranks are in their collectives, from PyTorch's flight recorders and the files that they dump."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_profiler.events.files import open_regular
from verl_profiler.host.flight_recorder import last_collectives, load_trace
from verl_profiler.live.host_facts import own_pid
from verl_profiler.live.open_processes import Process, part, parts, since, some

__all__ = ["recorder_facts", "recorder_rows"]

_SHOWN = 3
_MOST_BYTES = 64 << 20


def recorder_facts(processes: Sequence[Process]) -> Iterator[str]:
    """Name the ranks of each process group that are behind the others."""
    groups: dict[str, list[tuple[Process, Mapping[str, Any]]]] = {}
    for each in processes:
        for row in _groups_of(each):
            groups.setdefault(str(row.get("group")), []).append((each, row))
    lines = [text for name, rows in groups.items() if (text := _fact(name, rows))]
    yield from lines[:_SHOWN]


def _fact(name: str, rows: Sequence[tuple[Process, Mapping[str, Any]]]) -> str | None:
    numbers = [(each, number) for each, row in rows if (number := _number(row)) is not None]
    if len(numbers) < 2:
        return None
    most = max(number for _, number in numbers)
    behind = [(each, number) for each, number in numbers if number < most]
    ahead = [row for _, row in rows if _number(row) == most]
    what = next((str(row["collective"]) for row in ahead if row.get("collective")), "a collective")
    if behind:
        names = some([each.name for each, _ in behind])
        least = min(number for _, number in behind)
        verb = "has" if len(behind) == 1 else "have"
        return (
            f"Flight recorder, group {name}: {names} {verb} entered {least} collectives, the others "
            f"{most}, the last one {what}"
        )
    open_ones = {str(row["collective"]) for _, row in rows if row.get("ended") is False}
    if len(open_ones) > 1:
        return f"Flight recorder, group {name}: the ranks are in {' and '.join(sorted(open_ones))}"
    if open_ones:
        return (
            f"Flight recorder, group {name}: all {len(rows)} ranks are in {open_ones.pop()} {most}"
        )
    return None


def _number(row: Mapping[str, Any]) -> int | None:
    numbers = [row.get("enqueued"), row.get("number")]
    known = [each for each in numbers if type(each) is int]
    return max(known, default=None)


def recorder_rows(process: Process) -> Iterator[str]:
    """Write where one rank is, a line for each group."""
    for row in _groups_of(process):
        text = f"group {row.get('group')}: {_number(row)} collectives entered"
        if row.get("completed") is not None:
            text += f", {row['completed']} completed"
        if row.get("collective"):
            state = "" if row.get("ended") else ", which has not ended"
            text += f"; {row['collective']} {row.get('number')}{state}"
        yield text


def _groups_of(process: Process) -> list[Mapping[str, Any]]:
    """Return the groups of a rank: what PyTorch dumped since the hang began, else what the rank reported."""
    found = part(process.evidence, "collectives")
    dumped = _dumped(process, found.get("dump"))
    return dumped or parts(found, "groups")


def _dumped(process: Process, path: Any) -> list[Mapping[str, Any]]:
    if not isinstance(path, str) or own_pid(process.header) is None:
        return []
    try:
        with open_regular(path, _MOST_BYTES) as file:
            # One of an earlier run has the same name.
            started_s = since({"since": process.header.get("started")}, 0.0)
            if os.fstat(file.fileno()).st_mtime < started_s:
                return []
            return list(last_collectives(load_trace(file.read())))
    except (OSError, ValueError):
        return []
