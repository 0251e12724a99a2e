"""What the page draws request by request, as numbers and names: `analysis.timelines`, packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, grouped
from verl_profiler.analysis.timelines import UNIT_US, Bounds, chosen_timelines
from verl_profiler.events.vocabulary import depth
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.colors import color
from verl_profiler.render.frames import frame, short_text


class _Names:
    """Numbers the kinds of spans that are drawn."""

    def __init__(self) -> None:
        self.listed: list[list[Any]] = []
        self._codes: dict[tuple[str, str | None, bool], int] = {}

    def code(self, event: str, tool: str | None = None, *, failed: bool = False) -> int:
        """Return the number of a kind: its place in `listed`."""
        key = (event, tool, failed)
        if key not in self._codes:
            self._codes[key] = len(self.listed)
            shown = None if tool is None else short_text(tool)
            self.listed.append([short_text(event), shown, int(failed), color(event)])
        return self._codes[key]


def timelines(
    tables: Tables,
    steps: Steps,
    places: Mapping[tuple[Any, Any], int],
    bounds: Bounds = Bounds(),  # noqa: B008  immutable
) -> dict[str, Any]:
    """Choose steps and requests, and gather what is drawn of them.

    `places` are those in the rows of `step_times`, by run and step.

    Returns:
        `names` (event, tool, failed, color) that spans refer to; `scenes` with their lanes;
        `requests` (columns and rows), with the spans and engine calls of each; `of`, how many
        requests there are in all.
    """
    found = chosen_timelines(tables, steps, bounds)
    names = _Names()
    requests = frame(_placed(found.requests, places), drop=("run", "step"))
    spans: list[list[int]] = [[] for _ in found.requests]
    for row in found.spans:
        code = names.code(row["event"], row["tool"], failed=row["failed"])
        spans[row["number"]] += [code, row["turn"], row["begin"], row["length"]]
    calls: list[list[Any]] = [[] for _ in found.requests]
    servers: dict[str, int] = {}
    for row in found.calls:
        if row["server"] is not None:
            row["server"] = servers.setdefault(row["server"], len(servers))
        number, *call = row.values()
        # The Nones at the end are left out.
        while call and call[-1] is None:
            call.pop()
        calls[number].append(call)
    stalls = grouped(found.stalls, "scene", "name")
    lanes = grouped(found.lanes, "scene")
    scenes = _placed(found.scenes, places)
    for number, scene in enumerate(scenes):
        del scene["run"], scene["step"]
        own = lanes.get(number, [])
        scene["lanes"] = [
            _lane(lane, stalls.get((number, lane["name"]), []), names) for lane in own
        ]
    return {
        "unit_s": UNIT_US / 1e6,
        "names": names.listed,
        "scenes": scenes,
        "requests": {
            **requests,
            "spans": spans,
            "calls": calls,
            "servers": [*map(short_text, servers)],
        },
        "of": found.of,
    }


def _placed(rows: Rows, places: Mapping[tuple[Any, Any], int]) -> Rows:
    return [{"s": places.get((row["run"], row["step"]), -1), **row} for row in rows]


def _lane(lane: dict[str, Any], stalls: Rows, names: _Names) -> dict[str, Any]:
    """Return a lane as the page has it: spans as numbers, and the stalls of its process."""
    shown = {key: value for key, value in lane.items() if key not in ("scene", "total")}
    shown["name"] = short_text(lane["name"])
    if lane["kind"] == "count":
        shown["code"] = names.code(lane["role"])
    if lane["kind"] == "spans":
        # Of two spans of the same length, the outer one comes first.
        spans = sorted(
            lane["spans"], key=lambda row: (row["begin"], -row["length"], depth(row["event"]))
        )
        shown["spans"] = [
            [names.code(row["event"], failed=row["failed"]), row["begin"], row["length"]]
            for row in spans
        ]
    if stalls:
        shown["lags"] = [
            [row["begin"], row["length"], *([short_text(row["during"])] if row["during"] else [])]
            for row in stalls
        ]
    return shown
