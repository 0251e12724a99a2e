"""Views of an asynchronous run's cycle: the loop of dependencies that bounds its steps, and its replays."""

from __future__ import annotations

from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.explain.critical_cycle import EDGES, critical_cycle, cycle_bound
from verl_profiler.analysis.explain.what_if import asynchronous_what_if
from verl_profiler.render.charts import Series, Spec, chart, name_bars, panel
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.cycle_text import BOUNDS, as_decoding
from verl_profiler.views.questions.critical_path import savings
from verl_profiler.views.view import (
    Choice,
    DataTables,
    NothingToDraw,
    Section,
    View,
    asking,
)

__all__ = ["VIEWS"]

_POOLS = (("trainer", MUTED), ("rollout", ACCENT))


def _cycle(data: DataTables, choice: Choice) -> Spec:
    rows = data["critical_cycle"]
    series: list[Series] = [
        (pool, [row["edge_s"] if row["pool"] == pool else None for row in rows], color)
        for pool, color in _POOLS
        if any(row["pool"] == pool for row in rows)
    ]
    bars = name_bars(
        [row["edge"].replace("_", " ") for row in rows],
        series,
        "time per step [s]",
        texts=[f"{seconds(row['edge_s'])}, {share(row['share'])}" for row in rows],
    )
    return chart(
        f"{seconds(rows[0]['cycle_s'])} per step: {BOUNDS[cycle_bound(rows)]}",
        f"{choice.text()}: {counted(rows[0]['steps'], 'step')}",
        panel(bars, height=0),
        notes="Dependencies traced back from the last step, always to the one that finished last.",
    )


def _replays(data: DataTables, choice: Choice) -> Spec:
    (unchanged,) = (row for row in data["asynchronous_what_if"] if row["what"] == UNCHANGED)
    if unchanged["refused"] is not None:
        raise NothingToDraw(f"{choice.text()}: {unchanged['refused']}.")
    replays = sorted(
        (row for row in data["asynchronous_what_if"] if row["what"] != UNCHANGED),
        key=lambda row: -row["expected_s"],
    )
    best = replays[0]
    return chart(
        f"{best['about'][0].upper()}{best['about'][1:]}: {seconds(best['expected_s'])} per step "
        f"({share(best['share'])})",
        f"{choice.text()}: {counted(unchanged['steps'], 'step')} replayed, "
        f"{seconds(unchanged['step_s'])} on average; replay error "
        f"{share(abs(unchanged['residual_share']))}",
        panel(savings(replays), height=0),
        notes=(
            "Bars: mean saving per step. Lines: 90 % interval.",
            "The first step is left out as warm-up if two others remain. Gains are not additive.",
            *as_decoding(unchanged["undivided_share"]),
        ),
    )


_EDGE_TABLE = "\n".join(
    ["| edge | what the time is spent on |", "| --- | --- |"]
    + [f"| `{edge}` | {text} |" for edge, text in EDGES.items()]
)

VIEWS = (
    View(
        name="critical_cycle",
        question="Which loop of dependencies bounds the steps of an asynchronous run?",
        analysis=asking(critical_cycle),
        columns=common("run")
        | {
            "edge": "what happens between the two ends of the dependency",
            "pool": "the pool whose time it is, `trainer` or `rollout`",
            "steps": "steps that the cycle passes",
            "cycle_s": (
                "all edges together, in s per step: the run from the start to the end of the window"
            ),
            "edge_s": "this edge, in s per step",
            "share": "this edge, part of the cycle",
        },
        chart=_cycle,
        empty="no asynchronous training with recorded samples.",
        section=Section(
            "cycle",
            "Critical cycle",
            "what a step of an asynchronous run waits for, and what that waited for in turn, over "
            "all steps; making anything else faster gains nothing",
        ),
        shows=f"""\
The seconds per step of each edge. A step takes samples when the trainer is free and the last sample is
ready; the trainer was busy since it last took samples, and the sample is made since its dispatch.
The cycle is traced from the last step backwards, always to what finished last.

{_EDGE_TABLE}
""",
        conclude="""
            - Edges of the trainer alone: the trainer bounds the run. A faster rollout gains nothing.
            - Mostly `generating`, `tools` or `rollout_other`: requests take longer than the steps that
              they overlap with. Shorten the last ones, or dispatch them earlier.
            - `training` and `generating`, both large: they do not overlap. Where the rollout has devices
              of its own, more samples in flight (`num_warmup_batches`) make them overlap.
            - `weight_sync` is large in either case: it stops both pools.
        """,
        limits="""
            The next bottleneck after the cycle gets shorter is not computed. A rollouter dispatches without
            the trainer (`fully_async_policy`): the time before its dispatch counts as the trainer's.
            A sample that was dispatched before the first consumption is followed back to that, with its
            calls and tools in proportion.
        """,
    ),
    View(
        name="asynchronous_what_if",
        question="How long would the steps of an asynchronous run take after a change?",
        analysis=asking(asynchronous_what_if),
        columns={
            **common("run"),
            "what": "name of the change; `unchanged` is the replay of the steps as they were",
            "about": "the change in words",
            "steps": "number of replayed steps",
            "step_s": "mean length of these steps, in s",
            "replayed_s": "mean length of the replayed steps, in s",
            "residual_share": "replayed minus measured length, as part of the latter; of `unchanged`",
            "expected_s": "mean saving per step, in s; negative if steps would take longer",
            "share": "expected_s as part of step_s",
            "low_s": "lower end of the 90 % interval of expected_s, in s",
            "high_s": "upper end of the 90 % interval of expected_s, in s",
            "engine": "what the engines' speed is from: `iterations` that they reported, or the `calls`",
            "undivided_share": (
                "part of the replayed generate calls whose queue, prefill and decode times were not "
                "recorded (`profiler.events.engine_timing`): their time in the engine is replayed as "
                "decoding"
            ),
            "refused": "why the run could not be replayed; then there is no other row",
        },
        chart=_replays,
        empty="no asynchronous training. Synchronous training: what_if.",
        section=Section(
            "async_what_if",
            "What if",
            "what a change would save in each step of an asynchronous run, from replays of its cycle; "
            "gains are not additive",
        ),
        shows="""
            One bar per change: the mean saving per step. The line is the 90 % interval, from the steps
            and from the model's error.
        """,
        conclude="""
            - Try the longest bars first. Two changes may save the same seconds.
            - 0 s for faster calls and tools: the trainer bounds the run, and waits for no sample.
            - A large loss for one batch fewer in flight: the samples in flight are needed, and staleness
              is the price. No loss: fewer warm-up batches make samples less stale for free.
            - One replica fewer with a gain: the split of devices is off.
        """,
        limits="""
            See [asynchronous training](asynchronous.md#what-a-change-would-save) for the model and its
            assumptions. Of long runs the last steps are replayed, at most 40, with at most 3,000 generate calls.
        """,
        labels={
            "expected_s": "saved",
            "low_s": "from",
            "high_s": "to",
            "residual_share": "replay error",
        },
    ),
)
