"""The view of the engines' load: batch, queue and KV cache over time."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis.engine_state import engine_load, engine_load_over_time
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.render.charts import Spec, chart, colored, fewer, layer, panel, quantity
from verl_profiler.render.colors import ENGINE_COLORS, PART_COLORS
from verl_profiler.units import counted, share
from verl_profiler.views.view import Choice, DataTables, known, view

__all__ = ["load_layers"]

# Engines drawn: those with the longest queues, then the fullest.
_ENGINES = 8
_CODES = {"running": PART_COLORS["decode"], "waiting": ENGINE_COLORS["queue"]}


@view(
    "engine_load",
    "How full were the engines: running and waiting requests, and KV cache?",
    engine_load,
    engine_load_over_time,
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
