"""The five pictures of a console log, under the names that their users know."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_profiler.analysis.console_timers import (
    generation_times,
    logged_phases,
    logged_steps,
    per_token_times,
)
from verl_profiler.analysis.selection import Rows, warm_up
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.charts import (
    Line,
    Series,
    Spec,
    chart,
    layer,
    panel,
    step_bars,
    step_lines,
    steps_axis,
)
from verl_profiler.render.colors import INK, PHASE_COLORS, color, is_known
from verl_profiler.render.text import without
from verl_profiler.units import seconds, share
from verl_profiler.views.view import DataTables, NothingToDraw, known

__all__ = ["PICTURES", "Picture"]

# Up to so many marks of steps are large.
_MARKED_POINTS = 80
_OUTSIDE = "{}, outside"
# Of timers inside gen, by the last or the middle part of their names.
_DASHED = [5, 3]
_STYLES = {"max": _DASHED, "slowest": [8, 2, 2, 2, 2, 2], "mean": [6, 2, 1, 2], "min": [1, 2]}
# The timers that people compare first, and the share of the step from which others join them.
_COMPARED = ("gen", "update_actor", "update_critic", "update_critic_actor")
_COMPARED_SHARE = 0.05
_LOG_SCALE = 100

_DENOMINATORS = (
    "verl divides gen by response tokens, and the others by prompt and response tokens, so gen "
    "cannot be compared with them."
)
_CHILDREN = (
    "Broken lines: inside gen, not in addition to it. min, max and mean are over the requests or "
    "workers of a step; slowest is its slowest request."
)


@dataclass(frozen=True)
class Picture:
    """A picture of one logged run.

    Args:
        data: Gives the rows by name; the first must have some.
        draw: Draws them.
        empty: What the log lacks when there are none.
    """

    data: Callable[[LoggedRun], dict[str, Rows]]
    draw: Callable[[DataTables, str], Spec]
    empty: str

    def spec(self, run: LoggedRun) -> Spec:
        """Return the picture of a run as a Vega-Lite specification.

        Raises:
            NothingToDraw: The log has no numbers for this picture.
        """
        data = self.data(run)
        if not next(iter(data.values())):
            raise NothingToDraw(self.empty)
        return self.draw(data, run.label)


def _breakdown(data: DataTables, label: str) -> Spec:
    phases, steps = data["phases"], data["steps"]
    inside = _series(phases, "phase", "duration_s", lambda row: row["place"] == "step")
    outside = _series(phases, "phase", "duration_s", lambda row: row["place"] == "outside")
    apart = sorted({row["phase"] for row in phases if row["place"] == "overlapping"})
    totals = [row for row in steps if row["step_s"] is not None]
    numbers = [row["step"] for row in steps]
    notes: list[str] = []
    if outside:
        notes.append(
            f"Faint: {', '.join(outside)} ran outside timing_s/step and are not part of the step's time."
        )
    if apart:
        notes.append(
            f"Not in the stack, because nested in or concurrent with other timers: {', '.join(apart)}."
        )
    if any(row["overlap_s"] for row in steps):
        notes.append("In some steps the timers together are longer than the step: they overlap.")
    series: list[Series] = [
        (named.format(name), [values.get(step, 0.0) for step in numbers], color(name))
        for named, timers in (("{}", inside), (_OUTSIDE, outside))
        for name, values in _ordered(timers)
    ]
    pale = [_OUTSIDE.format(name) for name in outside]
    bars = step_bars(numbers, series, "time", pale=pale, form="s")
    return _chart(
        _breakdown_title(phases, steps),
        label,
        steps,
        [panel(bars, _step_times(totals, steps, bars[0]), _marked(steps), height=380)],
        [*notes, *["Lines: the time of the step (timing_s/step)."] * bool(totals)],
    )


def _step_times(rows: Rows, steps: Rows, bars: Spec) -> list[Spec]:
    """Draw how long each step took on the axis of the bars, as a broken line."""
    if not rows:
        return []
    (line,) = step_lines(_numbers(steps), [("", rows, "step_s", INK)], "")
    del line["encoding"]["color"]
    line["mark"] = {"type": "line", "strokeDash": [4, 2], "color": INK}
    line["encoding"]["y"] = bars["encoding"]["y"] | {"field": "value"}
    return [line]


def _per_token(data: DataTables, label: str) -> Spec:
    rows, steps = data["per_token"], data["steps"]
    series = _series(rows, "timer", "ms_per_token")
    responses = {row["timer"] for row in rows if row["tokens"] == "response"}
    middles = {name: statistics.median(values.values()) for name, values in series.items()}
    most = max(middles, key=lambda name: middles[name])
    positive = [middle for middle in middles.values() if middle > 0]
    wide = len(positive) > 1 and max(positive) > _LOG_SCALE * min(positive)
    lines: list[Line] = [
        (
            f"{name}: {_ms(middles[name])} per {'response token' if name in responses else 'token'}",
            _rows(values),
            "value",
            color(name),
            [1, 0] if name in responses else _DASHED,
        )
        for name, values in series.items()
    ]
    axis = "time per token [ms]" + (", log scale" if wide else "")
    return _chart(
        f"{most} takes {_ms(middles[most])} per {'response token' if most in responses else 'token'} "
        "(median)",
        label,
        steps,
        [panel(step_lines(_numbers(steps), lines, axis, log=wide), _marked(steps), height=320)],
        [_DENOMINATORS] * bool(responses),
    )


def _throughput(data: DataTables, label: str) -> Spec:
    steps = data["steps"]
    each = _column(steps, "tokens_per_s_per_gpu")
    job = _column(steps, "tokens_per_s")
    times = _column(steps, "step_s")
    gpus = set(known(steps, "gpus"))
    title = (
        f"{_count(statistics.median(each.values()))} tokens/s per GPU" if each else "Time per step"
    )
    if job:
        title += f", {_count(statistics.median(job.values()))} tokens/s of the job (medians)"
    more = ""
    axis = "perf/throughput [tokens/s per GPU]"
    if gpus:
        more = f", {' and '.join(map(str, sorted(gpus)))} GPU{'s' if gpus != {1} else ''}"
    panels: list[Spec] = []
    for values, words, code, named, form in (
        (each, _count, PHASE_COLORS["gen"], axis, ""),
        (times, seconds, INK, "perf/time_per_step", "s"),
    ):
        if values:
            line: Line = (_middles(values, words), _rows(values), "value", code)
            drawn = step_lines(_numbers(steps), [line], named, form=form)
            panels.append(panel(drawn, [] if panels else _marked(steps), height=200))
    return _chart(title, label, steps, panels, [], more)


def _middles(values: dict[int, float], words: Callable[[float], str]) -> str:
    mean, middle = statistics.fmean(values.values()), statistics.median(values.values())
    return f"mean {words(mean)}, median {words(middle)}"


def _comparison(data: DataTables, label: str) -> Spec:
    phases, steps = data["phases"], data["steps"]
    series = _series(phases, "phase", "duration_s", lambda row: row["place"] == "step")
    total = sum(row["step_s"] or 0 for row in steps) or 1.0
    chosen = {
        name: values
        for name, values in series.items()
        if name in _COMPARED
        or (name != "unaccounted" and sum(values.values()) >= _COMPARED_SHARE * total)
    } or series
    means = {name: statistics.fmean(values.values()) for name, values in chosen.items()}
    most = max(means, key=lambda name: means[name])
    return _times(
        f"{most} takes {seconds(means[most])} on average",
        chosen,
        data["steps"],
        label,
        notes=[
            f"Timers other than {', '.join(_COMPARED[:3])} are shown if they take at least {share(_COMPARED_SHARE)} of the time."
        ],
    )


def _generation(data: DataTables, label: str) -> Spec:
    rows = data["generation"]
    series = _series(rows, "timer", "duration_s")
    inside = any(row["inside"] for row in rows)
    ordered = {name: series[name] for name in sorted(series, key=_generation_order)}
    means = {name: statistics.fmean(values.values()) for name, values in ordered.items()}
    title = (
        f"gen takes {seconds(means['gen'])} on average" if "gen" in means else "Inside generation"
    )
    notes = [_CHILDREN if inside else "This log has no timers inside gen."]
    if "old_log_prob" in ordered:
        notes.append("old_log_prob is the pass after gen, not part of it.")
    return _times(title, ordered, data["steps"], label, notes=notes, style=_generation_style)


def _times(
    title: str,
    series: dict[str, dict[int, float]],
    steps: Rows,
    label: str,
    *,
    notes: Sequence[str],
    style: Callable[[str], list[int]] = lambda _: [1, 0],
) -> Spec:
    """Draw a line per timer, with its mean and median in the legend."""
    lines: list[Line] = []
    for name, values in series.items():
        words = f"{name}: {_middles(values, seconds)}"
        lines.append((words, _rows(values), "value", _timer_color(name), style(name)))
    drawn = step_lines(_numbers(steps), lines, "time", form="s")
    return _chart(title, label, steps, [panel(drawn, _marked(steps), height=340)], notes)


def _chart(
    title: str,
    label: str,
    steps: Rows,
    panels: Sequence[Spec],
    notes: Sequence[str],
    more: str = "",
) -> Spec:
    resumed = any(row["first_of_launch"] for row in steps[1:])
    return chart(
        title,
        _about(label, steps) + more,
        *panels,
        notes=[*notes, *["Vertical broken line: training resumed."] * resumed],
    )


def _marked(steps: Rows) -> list[Spec]:
    """Mark validation and checkpoints above the panel, and where a launch begins inside it."""
    numbers = _numbers(steps)
    layers: list[Spec] = []
    resumed = [{"step": row["step"] - 0.5} for row in steps[1:] if row["first_of_launch"]]
    if resumed:
        layers.append(
            layer(resumed, {"type": "rule", "strokeDash": [6, 3, 1, 3]}, x=steps_axis(numbers))
        )
    shapes = {"validation": "triangle-down", "checkpoint": "square"}
    marked = [
        {"step": row["step"], "what": what}
        for what, key in (("validation", "validated"), ("checkpoint", "checkpoint"))
        for row in steps
        if row[key]
    ]
    if marked:
        size = 40 if len(marked) <= _MARKED_POINTS else 12
        found = [what for what in shapes if any(each["what"] == what for each in marked)]
        scale = {"domain": found, "range": [shapes[what] for what in found]}
        shape = {"field": "what", "type": "nominal", "title": None, "scale": scale}
        mark = {"type": "point", "filled": True, "size": size, "color": INK, "clip": False}
        y = {"value": -7}
        layers.append(
            layer(marked, mark, tip=("what", "step"), x=steps_axis(numbers), y=y, shape=shape)
        )
    return layers


def _numbers(steps: Rows) -> list[int]:
    return [row["step"] for row in steps]


def _rows(values: dict[int, float]) -> Rows:
    return [{"step": step, "value": value} for step, value in values.items()]


def _breakdown_title(phases: Rows, steps: Rows) -> str:
    # The means of a run leave the same step out.
    left_out = warm_up([row["step"] for row in steps]) if steps else []
    times = known([row for row in steps if row["step"] not in left_out], "step_s")
    totals: dict[str, float] = {}
    for row in (row for row in phases if row["step"] not in left_out):
        if row["place"] == "step":
            totals[row["phase"]] = totals.get(row["phase"], 0.0) + row["duration_s"]
    if not times or not totals:
        return "Timers of each step"
    most = max(totals, key=lambda name: totals[name])
    return (
        f"A step takes {seconds(statistics.fmean(times))} (mean{without(left_out)}); "
        f"{share(totals[most] / sum(times))} of the time is {most}"
    )


def _about(label: str, steps: Rows) -> str:
    first, last = steps[0]["step"], steps[-1]["step"]
    missing = last - first + 1 - len(steps)
    text = f"{label}: {len(steps):,} step{'s' if len(steps) > 1 else ''}, {first} to {last}"
    return text + (f", {missing:,} in between are not in the log" if missing else "")


def _series(
    rows: Rows, name: str, value: str, wanted: Callable[[dict[str, Any]], bool] = lambda _: True
) -> dict[str, dict[int, float]]:
    """Return the values by name and step."""
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        if wanted(row):
            series.setdefault(row[name], {})[row["step"]] = row[value]
    return series


def _column(rows: Rows, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows if row[name] is not None}


def _ordered(
    series: dict[str, dict[int, float]],
) -> Iterable[tuple[str, dict[int, float]]]:
    """Sort timers as the steps have them: the known phases in order, others, the rest on top."""
    order = {name: place for place, name in enumerate(PHASE_COLORS)}
    last = {"unaccounted": 1, "testing": 2}
    return sorted(
        series.items(), key=lambda item: (last.get(item[0], 0), order.get(item[0], len(order)))
    )


def _generation_order(name: str) -> tuple[int, str]:
    known_order = {"gen": 0, "generate_sequences": 1, "reshard": 2, "old_log_prob": 9}
    return known_order.get(name, 5), name


def _generation_style(name: str) -> list[int]:
    if name in ("gen", "old_log_prob"):
        return [1, 0]
    return next((_STYLES[part] for part in name.split("/") if part in _STYLES), _DASHED)


def _timer_color(name: str) -> str:
    """Return the color of a timer, or of the work that its name stands for."""
    spare = color(name)
    return next((color(part) for part in reversed(name.split("/")) if is_known(part)), spare)


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _with_steps(name: str, ask: Callable[[LoggedRun], Rows]) -> Callable[[LoggedRun], Any]:
    return lambda run: {name: ask(run), "steps": logged_steps(run)}


# In the order in which they are written.
PICTURES: dict[str, Picture] = {
    "step_timing_breakdown": Picture(
        _with_steps("phases", logged_phases), _breakdown, "the log has no timer of a phase"
    ),
    "per_token_timing": Picture(
        _with_steps("per_token", per_token_times),
        _per_token,
        "the log has no timing_per_token_ms/… metric",
    ),
    "throughput": Picture(
        lambda run: {
            "steps": [
                row
                for row in logged_steps(run)
                if row["step_s"] is not None or row["tokens_per_s_per_gpu"] is not None
            ]
        },
        _throughput,
        "the log has neither perf/throughput nor a time per step",
    ),
    "component_comparison": Picture(
        _with_steps("phases", logged_phases), _comparison, "the log has no timer of a phase"
    ),
    "generation_timing": Picture(
        _with_steps("generation", generation_times), _generation, "the log has no timer of gen"
    ),
}
