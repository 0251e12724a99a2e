"""The view of the engines' load: batch, queue and KV cache over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.engine_state import engine_load, engine_load_over_time
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.colors import ENGINE_COLORS, MUTED, PART_COLORS
from verl_profiler.render.figure import sheet, short
from verl_profiler.units import counted, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, Section, View, asking, known, marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["TABLES", "VIEWS", "draw_kv_cache"]

# Engines drawn: those with the longest queues, then the fullest.
_ENGINES = 6


def _engine_load(data: DataTables, choice: Choice) -> Figure:
    summed, readings = data["engine_load"], data["engine_load_over_time"]
    engines = sorted(
        {(row["name"], row["dp_rank"]) for row in readings},
        key=lambda engine: (
            *(
                -max(known(_of(summed, engine), key), default=0)
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
    figure, panels = sheet(
        title,
        f"{choice.text()} and validation: {len(readings):,} readings of "
        f"{counted(len(engines), 'engine')}{cut}",
        size=(12, 1.6 + 2.1 * len(shown)),
        panels=(len(shown), 1),
        sharex=True,
        notes=(
            "Sampled twice a second, drawn until the next sample: shorter peaks are missed. "
            "Running: requests in the batch; dashed: maximum; shaded: KV cache. Start-up and "
            "training are included."
        ),
    )
    for place, (engine, axes) in enumerate(zip(shown, panels, strict=True)):
        _draw(axes, _of(readings, engine), several_ranks=len({rank for _, rank in engines}) > 1)
        if not place:
            axes.legend(loc="upper left", ncols=2, frameon=False)
    panels[-1].set_xlabel("seconds since the first reading")
    return figure


def _share(rows: Rows, column: str) -> float | None:
    """Return the mean of a share by time; None where no reading has it."""
    having = [row for row in rows if row[column] is not None]
    covered = sum(row["covered_s"] for row in having)
    return sum(row[column] * row["covered_s"] for row in having) / covered if covered else None


def _of(rows: Rows, engine: tuple[str, int]) -> Rows:
    return [row for row in rows if (row["name"], row["dp_rank"]) == engine]


def draw_kv_cache(axes: Panel, ranks: Iterable[Rows]) -> None:
    """Shade the share of the KV cache that is in use, on an axis of its own at the right.

    Args:
        axes: Time is its horizontal axis.
        ranks: The readings of each data-parallel rank, in the order of time.
    """
    kv = axes.twinx()
    for rows in ranks:
        kv.fill_between(
            [row["at_s"] for row in rows],
            marks(rows, "kv_share", 100),
            step="post",
            color=PART_COLORS["prefill"],
            alpha=0.25,
            linewidth=0,
        )
    kv.set_ylim(0, 100)
    kv.set_ylabel("KV cache [%]", color=MUTED)
    kv.grid(visible=False)


def _draw(axes: Panel, rows: Rows, *, several_ranks: bool) -> None:
    times = [row["at_s"] for row in rows]
    for key, label, code in (
        ("running_requests", "running", PART_COLORS["decode"]),
        ("waiting_requests", "waiting", ENGINE_COLORS["queue"]),
    ):
        axes.step(times, marks(rows, key), where="post", color=code, label=label, linewidth=1.4)
    highest = max((row["running_requests"] or 0 for row in rows), default=0)
    limit = max(known(rows, "running_limit"), default=0)
    if limit and limit <= 2 * highest:
        axes.axhline(limit, color=MUTED, linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests")
    axes.locator_params(axis="y", integer=True)
    draw_kv_cache(axes, [rows])
    rank = f", DP rank {rows[0]['dp_rank']}" if several_ranks else ""
    axes.set_title(f"{short(rows[0]['name'], 30)}{rank}")


VIEWS = (
    View(
        name="engine_load",
        question="How full were the engines: running and waiting requests, and KV cache?",
        analysis=asking(engine_load, engine_load_over_time),
        columns=common("run step dp_rank running_limit")
        | {
            "name": "process of the engine",
            "replica": "number of the replica",
            "readings": "number of readings",
            "covered_s": "time covered by the readings, in s",
            "running": "requests in the batch, time-weighted mean",
            "max_running": "the maximum of running",
            "waiting": "requests in the engine's queues, time-weighted mean",
            "max_waiting": "the maximum of waiting",
            "kv_share": "part of the KV cache in use, time-weighted mean",
            "max_kv_share": "the maximum of kv_share",
            "idle_share": "part of the time without a running request; empty if not reported",
            "waiting_share": "part of the time with a waiting request; empty if not reported",
            "iterations": "iterations of the engine (vLLM; empty of SGLang)",
            "prefill_tokens": "prompt tokens computed in them (vLLM; empty of SGLang)",
            "decode_tokens": "tokens generated in them (vLLM; empty of SGLang)",
            "retractions": (
                "preemptions: requests removed from its batch, to be recomputed (vLLM; empty of "
                "SGLang)"
            ),
            "prefix_hit_share": (
                "part of the prompt tokens looked up in its prefix cache that were found there "
                "(vLLM; empty of SGLang)"
            ),
        },
        draw=_engine_load,
        empty=(
            "no load of engines was sampled there. Set profiler.events.engine_state=true; "
            "SGLang and vLLM report their load (docs/versions.md)."
        ),
        section=Section(
            "engine-load",
            "Engine load",
            "whether engines are idle while requests run elsewhere, or full with a queue",
            link="Load",
        ),
        shows="""
            One panel per engine: requests in its batch and queues; in the background, the share of
            the KV cache in use.
        """,
        conclude="""
            - Waiting requests and a full KV cache: memory limits the batch. More memory for the
              engine (`gpu_memory_utilization`), more replicas, or shorter contexts.
            - Waiting requests and free KV cache: `max_running_requests` limits the batch.
            - One engine idle while another has a queue: see `routes`.
            - Few running requests for a long time at the end of `gen`: the tail of the rollout.
        """,
        limits="""
            Samples are taken twice a second; shorter peaks are missed. Engines do not have the
            step: a reading belongs to the step whose weights the engine has. An engine that does
            not respond has no readings, and the time until its next one is not counted. Source: `engine_state` events of SGLang
            and vLLM.
        """,
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "engine_load_over_time": common("run step dp_rank running_limit")
    | {
        "name": "process of the engine",
        "at_s": "time of the reading, in s after the run's first of those selected",
        "held_s": "until the next reading, in s; empty if none followed",
        "running_requests": "requests in the batch",
        "waiting_requests": "requests in the engine's queues",
        "kv_share": "part of the KV cache in use",
    },
}
