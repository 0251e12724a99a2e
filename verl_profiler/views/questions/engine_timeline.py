"""Views of engines over time: calls in lanes, batch, queue and KV cache."""

from __future__ import annotations

from verl_profiler.analysis.engine import (
    CALL_PARTS,
    LANE_PARTS,
    UNRECORDED,
    engine_lanes,
    engine_load_over_time,
    longest_step,
)
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.render.charts import Spec, chart, colored, fewer, layer, panel, quantity
from verl_profiler.render.colors import CALL_PART_COLORS, ENGINE_COLORS, PART_COLORS
from verl_profiler.units import counted, seconds
from verl_profiler.views.view import Choice, DataTables, column, known, view

# Engines drawn in lanes: those with the most of them.
_LANED = 8
# Pixels of the lanes of all of them, and of one at least and at most.
_HEIGHT, _LEAST, _MOST = 900, 56, 260
# Calls drawn.
_CALLS = 1_000
# Readings of an engine.
_READINGS = 400


@view(
    "engine_lanes",
    "What did each engine serve over time, and how full were its batch, queue and KV cache?",
    engine_lanes,
    engine_load_over_time,
    default_steps=longest_step,
    empty="no generate call with its engine's part was recorded there.",
    example="--steps 5",
)
def _draw(data: DataTables, choice: Choice) -> Spec:
    lanes, readings = data["engine_lanes"], data["engine_load_over_time"]
    of_engine = grouped(lanes, "name")
    many = {name: 1 + max(row["lane"] for row in own) for name, own in of_engine.items()}
    shown = sorted(sorted(many, key=lambda name: (-many[name], name))[:_LANED])
    parts = [part for part in LANE_PARTS if any(row[f"{part}_s"] for row in lanes)]
    sums = {part: sum(column(lanes, f"{part}_s")) for part in parts}
    total = sum(sums.values())
    causes = sums.keys() - {"decode", "prefill", "undivided"}
    worst = max(causes, key=sums.__getitem__, default=None)
    title = f"Engines served up to {counted(max(many.values()), 'call')} at once"
    if worst is not None:
        title += f"; {seconds(sums[worst])} of their {seconds(total)} {CALL_PARTS[worst]}"
    steps = sorted({row["step"] for row in lanes if row["step"] is not None})
    which = f", the longest step ({steps[0]})" if choice.steps is None and len(steps) == 1 else ""
    cut = "" if len(shown) == len(many) else f", {len(shown)} of them shown"
    kept = sorted((row for row in lanes if row["name"] in shown), key=lambda row: row["begin_s"])
    notes = [
        "A line per call, in the lowest free lane.",
        "Below: requests in the batch and in the queue (sampled), dashed: maximum; shaded: KV cache."
        if readings
        else "No readings of batch and queue: set profiler.events.engine_state=true.",
    ]
    if sums.get("undivided"):
        notes.append(f"Not divided: {UNRECORDED}.")
    if len(kept) > _CALLS:
        notes.append(f"The first {_CALLS:,} of {counted(len(kept), 'call')} are drawn.")
    # Readings may begin later than the calls, as those of a scheduler that compiles kernels at first.
    late_s = -min(kept[0]["begin_s"], 0.0)
    kept = [{**row, "begin_s": row["begin_s"] + late_s} for row in kept]
    readings = [{**row, "at_s": row["at_s"] + late_s} for row in readings]
    first_s = kept[0]["begin_s"]
    # The picture ends where the first call begins that is left out: no lane has gaps.
    last_s = (
        kept[_CALLS]["begin_s"]
        if len(kept) > _CALLS
        else max(row["begin_s"] + sum(row[f"{part}_s"] or 0 for part in parts) for row in kept)
    )
    kept = kept[:_CALLS]
    x = quantity("at_s", "seconds since the first reading or call", ends=(None, last_s))
    x["scale"]["domainMin"] = first_s
    panels: list[Spec] = []
    for name in shown:
        last = name == shown[-1]
        own = [row for row in kept if row["name"] == name]
        within = [
            row
            for row in readings
            if row["name"] == name and first_s - (row["held_s"] or 0) < row["at_s"] < last_s
        ]
        height = min(max(_LEAST, 7 * many[name]), max(_LEAST, _HEIGHT // len(shown)), _MOST)
        axis = {**x, "title": None} if within or not last else x
        panels.append(panel(_lanes(own, parts, axis, legend=last), title=name, height=height))
        if within:
            panels.append(panel(_load(within, x if last else axis, legend=last), height=76))
    return chart(
        title,
        f"{choice.text()}{which}: {counted(len(lanes), 'call')} of {counted(len(many), 'engine')}{cut}",
        *panels,
        notes=notes,
    )


def _lanes(rows: Rows, parts: list[str], x: Spec, *, legend: bool) -> Spec:
    """Draw the parts of each call in its lane."""
    pieces: Rows = []
    for row in rows:
        at = row["begin_s"]
        for part in parts:
            length = row[f"{part}_s"] or 0
            if length:
                own = {"part": CALL_PARTS[part], "at_s": at, "end_s": at + length, "took_s": length}
                request = {"request": row["request_id"], "turn": row["turn"]}
                lane = {"lane": row["lane"] + 0.1, "below": row["lane"] + 0.9}
                pieces.append(own | request | lane)
                at += length
    y = quantity("lane", "calls", tickMinStep=1, tickCount=4, grid=False, format="d")
    y["scale"] = {"reverse": True, "zero": True}
    return layer(
        pieces,
        {"type": "rect", "clip": True},
        tip=("request", "turn", "part", "took_s"),
        x=x,
        x2={"field": "end_s"},
        y=y,
        y2={"field": "below"},
        color=colored(
            "part", {CALL_PARTS[part]: CALL_PART_COLORS[part] for part in parts}, legend=legend
        ),
    )


_CODES = {"running": PART_COLORS["decode"], "waiting": ENGINE_COLORS["queue"]}


def _load(readings: Rows, x: Spec, *, legend: bool) -> Spec:
    """Draw batch and queue of an engine in front of its KV cache, which has an axis at the right.

    Args:
        readings: In the order of time; of several data-parallel ranks, a line each.
        x: The channel of time.
        legend: The lines are named below.
    """
    rows = fewer(readings, "running_requests", -(-len(readings) // _READINGS))
    shares = quantity("kv_share", "KV cache", form="%", ends=(0, 1), orient="right", tickCount=2)
    shares["axis"]["grid"] = False
    rank = {"field": "dp_rank", "type": "nominal"}
    kv = layer(
        rows,
        {"type": "area", "interpolate": "step-after", "opacity": 0.3, "clip": True},
        x=x,
        y=shares | {"stack": None},
        detail=rank,
        color=PART_COLORS["prefill"],
    )
    drawn = [
        {"at_s": row["at_s"], "what": what, "requests": row[f"{what}_requests"]}
        | {"dp_rank": row["dp_rank"]}
        for what in _CODES
        for row in rows
    ]
    y = quantity("requests", "requests", tickCount=3, tickMinStep=1, format="d")
    lines = layer(
        drawn,
        {"type": "line", "interpolate": "step-after", "clip": True},
        tip=("at_s", "what", "requests"),
        x=x,
        y=y,
        detail=rank,
        color=colored("what", _CODES, legend=legend),
    )
    highest = max((row["running_requests"] or 0 for row in rows), default=0)
    limit = max(known(rows, "running_limit"), default=0)
    limits = (
        [layer([{"requests": limit}], {"type": "rule", "strokeDash": [4, 3]}, y=y)]
        if limit and limit <= 2 * highest
        else []
    )
    return {
        "layer": [kv, {"layer": [lines, *limits]}],
        "resolve": {"scale": {"y": "independent"}},
    }
