"""Views of why steps took as long as they did: critical path, what-if, stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis.explain.critical_path import critical_path
from verl_profiler.analysis.explain.rules import UNEXPLAINED
from verl_profiler.analysis.explain.stragglers import straggler_requests, stragglers
from verl_profiler.analysis.explain.what_if import UNCHANGED, what_if
from verl_profiler.analysis.overview import path_means
from verl_profiler.analysis.selection import (
    Rows,
    after_warm_up,
    grouped,
    named,
    steady,
    summed,
    warm_ups,
)
from verl_profiler.render.charts import Series, Spec, chart, layer, name_bars, panel, step_bars
from verl_profiler.render.colors import ACCENT, INK, MUTED, category_color
from verl_profiler.render.text import without
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.cycle_text import as_decoding
from verl_profiler.views.view import Choice, DataTables, NothingToDraw, column, view

# Categories with less than this part of the steps, and of each of them, are drawn together.
_SMALL, _SMALL_IN_STEP = 0.005, 0.05
# Changes that save or cost less than this part of a step are named below the chart.
_LITTLE = 0.001
_SMALL_COLOR = "#E4E7EB"
_NO_STEP = "no step of synchronous training finished there. Asynchronous training: bubble_ledger."


@view(
    "critical_path",
    "What did each second of a step wait for?",
    critical_path,
    empty=_NO_STEP,
    only_of="synchronous",
)
def _path(data: DataTables, choice: Choice) -> Spec:
    rows = data["critical_path"]
    steps = sorted({row["step"] for row in rows})
    left_out = warm_ups(rows, choice.steps)
    means = path_means(steady(rows, left_out))
    first, second = (*means[:2], means[0])[:2]
    lengths = {(row["step"], row["category"]): row["duration_s"] for row in rows}
    whole = summed(rows, "duration_s", "step")
    # What takes long in the step that means leave out has its name, too.
    large = {
        each for (step, each), length in lengths.items() if length >= _SMALL_IN_STEP * whole[step]
    }
    shares = {row["category"]: row["share"] for row in means}
    order = dict.fromkeys([*shares, *summed(rows, "duration_s", "category")])
    shown = [each for each in order if each in large or shares.get(each, 0.0) >= _SMALL]
    small = [each for each in order if each not in shown]

    def spent(categories: Sequence[str]) -> list[float]:
        return [
            sum(lengths.get((step, category), 0.0) for category in categories) for step in steps
        ]

    series: list[Series] = [
        (category, spent([category]), category_color(category)) for category in shown
    ]
    if small:
        series.append((f"{len(small)} more", spent(small), _SMALL_COLOR))
    return chart(
        f"{share(first['share'])} of the critical path is {first['category']}, "
        f"{share(second['share'])} {second['category']}; "
        f"{share(shares.get(UNEXPLAINED, 0.0))} is unattributed",
        f"{choice.text()}: {counted(len(steps), 'step')}; a step takes "
        f"{seconds(sum(row['mean_s'] for row in means))} on average{without(named(left_out, rows))}",
        panel(step_bars(steps, series, "time", form="s"), height=300),
        notes="Every second of a step is attributed to one category: what the step waited for. Pale: phases of "
        "the trainer, in a tint of their colors.",
    )


_HOW_DRAWN = (
    "Bars: mean saving per step. Lines: 90 % interval, from three steps on; the first step "
    "is left out as warm-up if two others remain; for loads not observed, the interval "
    "reaches from saturated replicas to calls that do not slow each other down. "
    "Gains are not additive."
)


@view(
    "what_if",
    "How long would a step have taken after a change?",
    what_if,
    empty="no step can be replayed there.",
)
def _what_if(data: DataTables, choice: Choice) -> Spec:
    """Draw what changes would save, the largest saving on top."""
    rows = data["what_if"]
    (unchanged,) = (row for row in rows if row["what"] == UNCHANGED)
    replays = sorted(
        (row for row in rows if row["what"] != UNCHANGED and row["expected_s"] is not None),
        key=lambda row: -row["expected_s"],
    )
    if not replays:
        reason = unchanged["refused"] or "no change could be replayed there"
        raise NothingToDraw(f"{choice.text()}: {reason}.")
    best = replays[0]
    least_s = _LITTLE * unchanged["step_s"]
    drawn = [row for row in replays if abs(row["expected_s"]) >= least_s] or replays
    left_out = len(replays) - len(drawn)
    listed = [
        _HOW_DRAWN,
        *as_decoding(unchanged["undivided_share"]),
        *[f"Not drawn: {counted(left_out, 'change')} of less than {share(_LITTLE)}."]
        * bool(left_out),
    ]
    return chart(
        f"{best['about'][0].upper()}{best['about'][1:]}: {seconds(best['expected_s'])} per step "
        f"({share(best['share'])})",
        f"{choice.text()}: {counted(unchanged['steps'], 'step')} replayed, "
        f"{seconds(unchanged['step_s'])} on average; replay error "
        f"{share(abs(unchanged['residual_share']))}",
        _savings(drawn),
        notes=listed,
    )


def _savings(rows: Rows) -> Spec:
    """Draw a bar per change, the first on top, and its interval."""
    bars = name_bars(
        [row["about"] for row in rows],
        [("", column(rows, "expected_s"), ACCENT)],
        "saved per step",
    )
    x, y = (bars["layer"][0]["encoding"][axis] for axis in "xy")
    ranges = [
        {"at": at, "low_s": row["low_s"], "high_s": row["high_s"]}
        for at, row in zip(y["scale"]["domain"], rows, strict=True)
        if row["low_s"] is not None
    ]
    mark = {"type": "rule", "strokeWidth": 1.6}
    low, high = {**x, "field": "low_s"}, {"field": "high_s"}
    lines = layer(ranges, mark, tip=("low_s", "high_s"), x=low, x2=high, y=y, color=INK)
    zero = layer([{"low": 0}], {"type": "rule", "color": MUTED}, x=x)
    return {**bars, "layer": [*bars["layer"], zero, lines]}


# By the reason of a straggler: what the waiting is due to.
_DUE_TO = {
    "late": "late starts",
    "queued": "queueing",
    "parked": "pauses of the engine",
    "cold": "lost prefix caches",
    "prefill": "slow or long prefill",
    "recomputed": "retractions and aborts",
    "undivided": "engine time that was not divided",
    "long": "long requests",
    "slow": "slow decoding",
    "tool": "tools",
    "other": "other causes",
}


@view(
    "stragglers",
    "Which requests, tools, workers and ranks do the others wait for, and why?",
    stragglers,
    straggler_requests,
    default_steps=after_warm_up,
    empty="no waiting was recorded there.",
)
def _stragglers(data: DataTables, choice: Choice) -> Spec:
    rows = data["stragglers"]
    reasons = [row for row in rows if row["kind"] == "request"]
    # The worst of each other kind.
    others = [
        max(own, key=lambda row: row["caused_wait_s"])
        for kind, own in grouped(rows, "kind").items()
        if kind != "request"
    ]
    others.sort(key=lambda row: -row["per_step_s"])
    if reasons:
        title = (
            f"{share(reasons[0]['share'])} of straggler waiting is due to "
            f"{_DUE_TO[reasons[0]['who']]}"
        )
    else:
        title = (
            f"{others[0]['who']} keeps others waiting in {others[0]['kind']}, "
            f"{seconds(others[0]['per_step_s'])} per step"
        )
    shown = [*reasons, *others]
    bars = name_bars(
        [
            _DUE_TO[row["who"]] if row["kind"] == "request" else f"{row['kind']}: {row['who']}"
            for row in shown
        ],
        [
            (name, [row["per_step_s"] * ((row["kind"] == "request") == own) for row in shown], code)
            for name, own, code in (
                ("requests, by reason", True, ACCENT),
                ("the worst of each other kind", False, MUTED),
            )
        ],
        "caused wait time per step",
        texts=[f"{seconds(row['per_step_s'])}, {share(row['share'])}" for row in shown],
    )
    return chart(
        title,
        f"{choice.text()}: {counted(max(row['of_steps'] for row in rows), 'step')}; wait time, attributed to "
        "what is still running",
        bars,
        notes="Percent: share of the wait time of its kind. The first step is left out as warm-up if "
        "two others remain.",
    )
