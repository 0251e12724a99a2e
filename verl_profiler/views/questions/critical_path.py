"""Views of why steps took as long as they did: critical path and what-if."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_profiler.analysis.explain.critical_path import UNEXPLAINED, critical_path
from verl_profiler.analysis.explain.what_if import UNCHANGED, what_if
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    layer,
    name_bars,
    panel,
    step_bars,
    time_unit,
)
from verl_profiler.render.colors import ACCENT, INK, MUTED, category_color
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, NothingToDraw, View, asking

__all__ = ["TABLES", "VIEWS", "savings"]

# Categories with less than this part of the steps are drawn together.
_SMALL = 0.005
# Of more steps than this, the longest are drawn once more.
_MANY = 30
_LONGEST = 6
_SMALL_COLOR = "#E4E7EB"


def _path(data: DataTables, choice: Choice) -> Spec:
    rows = data["critical_path"]
    steps = sorted({row["step"] for row in rows})
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["category"]] = sums.get(row["category"], 0.0) + row["duration_s"]
    total = sum(sums.values())
    order = sorted(sums, key=lambda category: (category == UNEXPLAINED, -sums[category]))
    shown = [category for category in order if sums[category] >= _SMALL * total]
    small = [category for category in order if category not in shown]
    first, second = (*order[:2], order[0])[:2]
    lengths = {(row["step"], row["category"]): row["duration_s"] for row in rows}
    wholes = {step: sum(lengths.get((step, category), 0.0) for category in order) for step in steps}
    factor, unit = time_unit(max(wholes.values()))

    def spent(steps: Sequence[int], categories: Sequence[str]) -> list[float]:
        return [
            factor * sum(lengths.get((step, category), 0.0) for category in categories)
            for step in steps
        ]

    def series(steps: Sequence[int]) -> list[Series]:
        made: list[Series] = [
            (category, spent(steps, [category]), category_color(category)) for category in shown
        ]
        more: Series = (f"{len(small)} more", spent(steps, small), _SMALL_COLOR)
        return [*made, more] if small else made

    panels = [panel(step_bars(steps, series(steps), f"time [{unit}]", most=2_400), height=300)]
    if len(steps) > _MANY:
        worst = sorted(steps, key=lambda step: (-wholes[step], step))[:_LONGEST]
        texts: list[str] = []
        for step in worst:
            more = {
                category: lengths.get((step, category), 0.0) - sums[category] / len(steps)
                for category in order
            }
            most = max(more, key=lambda category: more[category])
            texts.append(f"{seconds(wholes[step])}; {most} +{seconds(more[most])}")
        bars = name_bars(
            [f"step {step}" for step in worst],
            series(worst),
            f"time [{unit}]",
            texts=texts,
            legend=False,
            room=1.3,
        )
        title = "the longest steps, and the category that exceeds its mean the most"
        panels.append(panel(bars, title=title, height=0))
    return chart(
        f"{share(sums[first] / total)} of the critical path is {first}, "
        f"{share(sums[second] / total)} {second}; "
        f"{share(sums.get(UNEXPLAINED, 0.0) / total)} is unattributed",
        f"{choice.text()}: {len(steps)} steps, {seconds(total / len(steps))} on average",
        *panels,
        notes=(
            "Every second of a step is attributed to one category: what the step waited for. "
            "Pale: the trainer's phases."
        ),
    )


def _what_if(data: DataTables, choice: Choice) -> Spec:
    replays = sorted(
        (row for row in data["what_if"] if row["expected_s"] is not None),
        key=lambda row: -row["expected_s"],
    )
    if not replays:
        raise NothingToDraw(f"{choice.text()}: no change could be replayed there.")
    (unchanged,) = (row for row in data["what_if"] if row["what"] == UNCHANGED)
    best = replays[0]
    return chart(
        f"{best['about'][0].upper()}{best['about'][1:]}: {seconds(best['expected_s'])} per step "
        f"({share(best['share'])})",
        f"{choice.text()}: {unchanged['steps']} steps replayed, {seconds(unchanged['step_s'])} on "
        f"average; replay error {share(unchanged['residual_share'])} (median)",
        panel(savings(replays), height=0),
        notes=(
            "Bars: mean saving per step. Lines: 90 % interval, from three steps on; the first step "
            "is left out as warm-up if two others remain; for loads not observed, the interval "
            "reaches from saturated replicas to calls that do not slow each other down. Diamonds: "
            "saving in these steps, where the trainer polls. Gains are not additive."
        ),
    )


def savings(rows: Rows) -> list[Spec]:
    """Draw a bar per change, its interval, and a diamond for the saving in the replayed steps.

    Args:
        rows: With about, expected_s, low_s and high_s (None without an interval) and, if they are
            to have diamonds, saved_s; the first on top.
    """
    columns = ("expected_s", "low_s", "high_s", "saved_s")
    factor, unit = time_unit(max(abs(row.get(name) or 0) for row in rows for name in columns))
    bars = name_bars(
        [row["about"] for row in rows],
        [("saved", [row["expected_s"] * factor for row in rows], ACCENT)],
        f"saved per step [{unit}]",
        legend=False,
    )
    x, y = bars[0]["encoding"]["x"], bars[0]["encoding"]["y"]
    scaled = [
        {"at": at}
        | {name: None if row.get(name) is None else row[name] * factor for name in columns}
        for at, row in zip(y["scale"]["domain"], rows, strict=True)
    ]
    drawn = [*bars, layer([{"low": 0}], {"type": "rule", "color": MUTED}, x=x)]
    ranges = [row for row in scaled if row["low_s"] is not None]
    if ranges:
        mark = {"type": "rule", "strokeWidth": 1.6}
        low, high = {**x, "field": "low_s"}, {"field": "high_s"}
        drawn.append(layer(ranges, mark, tip=("low_s", "high_s"), x=low, x2=high, y=y, color=INK))
    diamonds = [row for row in scaled if row["saved_s"] is not None]
    if diamonds:
        mark = {"type": "point", "shape": "diamond", "size": 45, "fill": "white", "stroke": MUTED}
        drawn.append(layer(diamonds, mark, tip=("saved_s",), x={**x, "field": "saved_s"}, y=y))
    return drawn


_PATH_CATEGORIES = """\
Every second of a step is attributed to one category; the categories add up to the step.
From the end of the step backwards, the trainer waits for its own timers: in `gen` for the request
that ended last, in other phases for the last rank.
Work in parallel to that chain does not lengthen the step and is not part of it.
Of more than 30 steps, the longest are below, each with what exceeds its mean the most.

| category | what the time went to |
| --- | --- |
| `old_log_prob`, `update_actor`, `update_weights`, … | the trainer's phase of that name, while its \
last rank worked; all of the weight sync |
| `handover` | dispatch/collect gap: a phase while its last rank was idle |
| `offload` | loading and offloading of model and optimizer by its last rank |
| a span of your own | in the trainer's process |
| `prepare_step` | reading the next batch and passing it to the agent loops |
| `dispatch` | from the start of `gen` until the request that ended last started |
| `prompt_build`, `tool_parsing`, `token_merge`, `postprocess` | its agent-loop worker's own work |
| `server_acquire`, `transport` | the load balancer; transport to the engine and back |
| `parked` | the call waits in an engine that is paused |
| `queue`, `prefill`, `decode` | components that the engine reports; `engine` where it reports none |
| `tool` | tool calls |
| `reward` | the reward of that request, or the trainer's timer of that name |
| `transfer` | TransferQueue calls of that request, of the trainer, or of the last rank |
| `event_loop` | the worker's event loop stalled, and nothing else explains the time |
| `polling` | all requests had finished, but the trainer had not polled yet |
| `sleep_replicas` | the trainer waits while the engines are put to sleep, at the end of `gen` |
| `gen` | the rest of that timer: samples fetched |
| `unexplained` | unattributed: no event explains it |"""

_NO_STEP = "no step of synchronous training finished there. Asynchronous training: bubble_ledger."

_ENGINE = "source of the engines' speed: `iterations` as the engines report them, or a line fitted to the `calls`"

VIEWS = (
    View(
        name="critical_path",
        question="What did each second of a step wait for?",
        analysis=asking(critical_path),
        columns=common("run step")
        | {
            "category": "category of the time, or the trainer's timer",
            "duration_s": "time of that category on the critical path, in s",
            "share": "part of the step; the shares of a step add up to 1",
            "segments": "number of segments of the path",
            "longest_s": "longest segment, in s",
            "longest_what": "tool, replica, process or event of the longest segment",
        },
        chart=_path,
        empty=_NO_STEP,
        section="path",
        shows=_PATH_CATEGORIES,
        conclude="""
            - A long `decode`: the last request generated for long; `stragglers` shows whether
              it was long or slow.
            - A long `tool`, `queue` or `reward`: only the last request's counts. Making all
              other requests faster would change nothing.
            - A long `polling`: see [what-if](what-if.md).
            - A large phase of the trainer is work, not waiting; it is here for comparison.
            - A large `unexplained`: your own code between verl's timers, or a disabled probe
              family.
        """,
        limits="""
            The second-longest chain is not shown. After a fix the path takes another way; `what_if`
            replays that. In collective operations ranks wait for each other, and the
            time is the phase's. If the engine's host has another clock, an engine interval that
            does not fit into its call is centered in it. `critical_segments` has the
            stretches in order; `verl-profiler why` prints them.
        """,
    ),
    View(
        name="what_if",
        question="How long would a step have taken after a change?",
        analysis=asking(what_if),
        columns=common("run")
        | {
            "what": "name of the change; `unchanged` is the replay of the step as it was",
            "about": "the change in words",
            "engine": _ENGINE,
            "steps": (
                "number of replayed steps; the 95th percentile needs 20 requests, and gains are "
                "empty if no step has enough"
            ),
            "step_s": "mean length of these steps as measured, in s",
            "saved_s": (
                "mean gain per step, the unchanged replay minus the changed one, in s; negative if "
                "the step would take longer"
            ),
            "share": "expected_s as part of step_s",
            "earlier_s": "mean gain per step without polling, in s",
            "expected_s": (
                "mean gain over many steps, in s: earlier_s, or saved_s if the change removes "
                "polling"
            ),
            "low_s": (
                "lower end of the 90 % bootstrap interval of expected_s, in s, allowing for "
                "autocorrelated steps: from least_s of `step_replays`, widened by its error_s; "
                "empty with fewer than three steps, unless least_s and most_s differ in the mean"
            ),
            "high_s": "upper end of the interval, in s: the same from most_s",
            "pair_low_s": (
                "lower end for the measured difference to another run with as many steps, in s"
            ),
            "pair_high_s": "upper end for that difference, in s",
            "between_runs_s": (
                "difference of two such runs with the same settings, 90th percentile, in s"
            ),
            "residual_share": "absolute replay error of the median step; of `unchanged`",
            "tokens_share": "absolute token-model error of the median step",
        },
        chart=_what_if,
        empty=_NO_STEP,
        section="path",
        shows="""
            One bar per change: the gain per step, averaged over the replayed steps. The line is
            the 90 % interval, from the steps and from the model's error. The diamond is the
            gain in these steps, where verl polls for samples every 2 s: one step saves nothing
            or 2 s, and the mean over many steps approaches the bar.
        """,
        conclude="""
            - Try the longest bars first. Gains are not additive: two changes may shorten the
              same seconds.
            - A refilled batch (a typical request replaces a slow one) with a negative gain:
              stopping late does not help; starting more requests at once might.
            - `halve the engine's concurrency` does not lengthen the step: the engines have spare
              capacity, and fewer replicas may suffice.
        """,
        limits="""
            See [what-if](what-if.md) for the assumptions, and for predictions compared with
            real changes. Of runs with more than 10,000 generate calls every n-th step is
            replayed; the plot has the number. `step_replays` has the gains per step.
        """,
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "critical_segments": common("run step request_id turn")
    | {
        "place": "place of the segment in the step, from 0",
        "begin_s": "start, in s after the step's",
        "duration_s": "duration, in s; those of a step add up to the step's",
        "category": "category of the time, or the trainer's timer",
        "phase": "the trainer's timer; empty between timers",
        "event": "innermost event",
        "name": "process of that event",
        "what": "tool, replica or operation; the server's address if its engine was not recorded",
    },
    "step_replays": common("run step")
    | {
        "what": "name of the change; `unchanged` is the replay of the step as it was",
        "engine": _ENGINE,
        "duration_s": "length of the step as measured, in s",
        "replayed_s": "length of the replayed step, in s",
        "saved_s": "gain, the unchanged replay minus the changed one, in s; empty for `unchanged`",
        "earlier_s": "gain without polling, in s",
        "least_s": (
            "expected gain if higher loads than recorded give no more tokens per second, in s"
        ),
        "most_s": (
            "expected gain if higher loads do not slow calls down further, or, with iterations, "
            "slow them down as the highest batch did, in s; equal to least_s if the load is not higher"
        ),
        "error_s": "standard error of the model in the gain, in s",
        "residual_s": (
            "replay error, the unchanged replay minus the measured step, in s; only of `unchanged`"
        ),
        "residual_share": "residual_s as part of the step; only of `unchanged`",
        "tokens_share": (
            "token-model error of the rollout's end as part of the step, if decoding times are "
            "predicted from tokens and the fitted speed; only of `unchanged`"
        ),
    },
}
