"""Views of engines over time: calls in lanes, batch, queue and KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis import engine_state
from verl_profiler.analysis.engine_lanes import LANE_PARTS, engine_lanes, longest_step
from verl_profiler.analysis.engine_time import CALL_PARTS, UNRECORDED
from verl_profiler.analysis.selection import Rows, Steps, grouped
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import Spec, chart, colored, fewer, layer, panel, quantity
from verl_profiler.render.colors import CALL_PART_COLORS, ENGINE_COLORS, PART_COLORS
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, view

__all__ = ["load_layers"]


# Engines drawn in lanes: those with the most of them.
_LANED = 3
# Calls drawn.
_CALLS = 1_000


def _longest(tables: Tables, steps: Steps = None) -> Rows:
    """Return the lanes of these steps, or of the longest one."""
    return engine_lanes(tables, steps or longest_step(tables))


def engine_load_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Return the readings of these steps, or of the longest one."""
    return engine_state.engine_load_over_time(tables, steps or longest_step(tables))


@view(
    "engine_lanes",
    "What did each engine serve over time, and how full was it?",
    _longest,
    engine_load_over_time,
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
    worst = max(
        sums.keys() - {"decode", "prefill", "undivided"}, key=sums.__getitem__, default=None
    )
    title = f"Engines served up to {counted(max(many.values()), 'call')} at once"
    if worst is not None:
        title += f"; {seconds(sums[worst])} of their {seconds(total)} {CALL_PARTS[worst]}"
    steps = sorted({row["step"] for row in lanes if row["step"] is not None})
    which = f", the longest step ({steps[0]})" if choice.steps is None and len(steps) == 1 else ""
    cut = "" if len(shown) == len(many) else f", {len(shown)} of them shown"
    kept = sorted((row for row in lanes if row["name"] in shown), key=lambda row: row["begin_s"])
    notes = ["A line per call, in the lowest free lane."]
    if readings:
        notes[0] += (
            " Below: requests in the batch and in the queue (sampled), dashed: maximum; shaded: KV "
            "cache; triangles: retracted calls."
        )
    if sums.get("undivided"):
        notes.append(f"Not divided: {UNRECORDED}.")
    if len(kept) > _CALLS:
        notes.append(f"The first {_CALLS:,} of {counted(len(kept), 'call')} are drawn.")
    if not readings:
        notes.append("No readings of batch and queue: set profiler.events.engine_state=true.")
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
            {**row, "at_s": max(row["at_s"], first_s)}
            for row in readings
            if row["name"] == name
            and row["at_s"] + (row["held_s"] or 0) > first_s
            and row["at_s"] < last_s
        ]
        height = min(max(56, 7 * many[name]), 260)
        panels.append(panel(_lanes(own, parts, x, legend=last), title=name, height=height))
        if within:
            panels.append(panel(_load(within, own, x, legend=last), height=76))
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


def _load(readings: Rows, lanes: Rows, x: Spec, *, legend: bool) -> Spec:
    retracted = [{"at_s": row["begin_s"]} for row in lanes if row["retractions"]]
    mark = {"type": "point", "shape": "triangle-up", "filled": True, "size": 40}
    code = CALL_PART_COLORS["recomputed"]
    more = [layer(retracted, mark, x=x, y={"value": 72}, color=code)] if retracted else []
    kept, _ = fewer(readings, ("running_requests", "waiting_requests", "kv_share"))
    return load_layers(kept, x, legend=legend, more=more)


# Engines drawn: those with the longest queues, then the fullest.
_ENGINES = 8
_CODES = {"running": PART_COLORS["decode"], "waiting": ENGINE_COLORS["queue"]}


@view(
    "engine_load",
    "How full were the engines: running and waiting requests, and KV cache?",
    engine_state.engine_load,
    engine_state.engine_load_over_time,
    empty="no load of engines was sampled there. Set profiler.events.engine_state=true; "
    "SGLang and vLLM report their load, other engines do not.",
)
def _engine_load(data: DataTables, choice: Choice) -> Spec:
    summed, readings = data["engine_load"], data["engine_load_over_time"]
    of_engine, sums = (grouped(rows, "name", "dp_rank") for rows in (readings, summed))
    engines = sorted(
        of_engine,
        key=lambda engine: (
            *(
                -max(known(sums.get(engine, []), key), default=0)
                for key in ("max_waiting", "max_kv_share")
            ),
            engine,
        ),
    )
    shown = engines[:_ENGINES]
    idle, waiting = _share(summed, "idle_share"), _share(summed, "waiting_share")
    fullest = max(known(summed, "max_kv_share"), default=None)
    title = "Load of the engines"
    if idle is not None and waiting is not None:
        title = (
            f"Engines ran requests {share(1 - idle)} of the time and had requests waiting "
            f"{share(waiting)} of it"
        )
    if fullest is not None:
        title += f"; KV cache at most {share(fullest)} full"
    cut = "" if len(shown) == len(engines) else f", {len(shown)} of them shown"
    whole_s = max(row["at_s"] + (row["held_s"] or 0) for row in readings)
    several = len({rank for _, rank in engines}) > 1
    x = quantity("at_s", "seconds since the first reading", ends=(0, whole_s))
    panels: list[Spec] = []
    every = 1
    for place, engine in enumerate(shown):
        own, thinned = fewer(
            of_engine[engine], ("running_requests", "waiting_requests", "kv_share")
        )
        every = max(every, thinned)
        rank = f", DP rank {engine[1]}" if several else ""
        last = place == len(shown) - 1
        panels.append(
            panel(
                load_layers(own, {**x, "title": x["title"] if last else None}, legend=last),
                title=f"{engine[0]}{rank}",
                height=84,
            )
        )
    notes = [
        (
            "Sampled twice a second, drawn until the next sample: shorter peaks are missed. "
            "Running: requests in the batch; dashed: maximum; shaded: KV cache, on the right. Start-up "
            "and training are included."
        )
    ]
    if every > 1:
        notes.append(f"Of {every} successive readings the fullest is drawn.")
    return chart(
        title,
        f"{choice.text()} and validation: {len(readings):,} readings of "
        f"{counted(len(engines), 'engine')}{cut}",
        *panels,
        notes=notes,
    )


def _share(rows: Rows, column: str) -> float | None:
    """Return the mean of a share by time; None where no reading has it."""
    having = [row for row in rows if row[column] is not None]
    covered = sum(row["covered_s"] for row in having)
    return sum(row[column] * row["covered_s"] for row in having) / covered if covered else None


def load_layers(rows: Rows, x: Spec, *, legend: bool, more: Sequence[Spec] = ()) -> Spec:
    """Draw batch and queue of an engine in front of its KV cache, which has an axis at the right.

    Args:
        rows: Readings in the order of time; of several data-parallel ranks, a line each.
        x: The channel of time.
        legend: The lines are named below.
        more: Layers on the axis of the requests.
    """
    shares = quantity("kv_share", "KV cache", form="%", ends=(0, 1), orient="right", tickCount=2)
    shares["axis"]["grid"] = False
    rank = {"field": "dp_rank", "type": "nominal"}
    kv = layer(
        rows,
        {"type": "area", "interpolate": "step-after", "opacity": 0.3},
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
        {"type": "line", "interpolate": "step-after"},
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
        "layer": [kv, {"layer": [lines, *limits, *more]}],
        "resolve": {"scale": {"y": "independent"}},
    }
