"""The five pictures of a console log, under the names that their users know."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.console_timers import (
    generation_times,
    logged_phases,
    logged_steps,
    per_token_times,
)
from verl_profiler.analysis.selection import Rows, warm_up
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.axes import EndLabel, legend, stack, time_unit
from verl_profiler.render.colors import INK, MUTED, PHASE_COLORS, color, is_known
from verl_profiler.render.figure import settings, sheet
from verl_profiler.render.text import without
from verl_profiler.units import seconds, share
from verl_profiler.views.timing_axes import (
    areas,
    finish,
    gapped,
    middle_lines,
    step_line,
    step_times,
)
from verl_profiler.views.view import DataTables, NothingToDraw, known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "Picture"]

# Above this many steps a stack is drawn as areas: bars would be thinner than a dot.
_BARS = 600
# Of timers inside gen, by the last or the middle part of their names.
_STYLES = {"max": "--", "slowest": (0, (6, 1, 1, 1, 1, 1)), "mean": "-.", "min": ":"}
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
    draw: Callable[[DataTables, str], Figure]
    empty: str

    def figure(self, run: LoggedRun) -> Figure:
        """Draw a run.

        Raises:
            NothingToDraw: The log has no numbers for this picture.
        """
        data = self.data(run)
        if not next(iter(data.values())):
            raise NothingToDraw(self.empty)
        with settings():
            return self.draw(data, run.label)


def _breakdown(data: DataTables, label: str) -> Figure:
    phases, steps = data["phases"], data["steps"]
    inside = _series(phases, "phase", "duration_s", lambda row: row["place"] == "step")
    outside = _series(phases, "phase", "duration_s", lambda row: row["place"] == "outside")
    apart = sorted({row["phase"] for row in phases if row["place"] == "overlapping"})
    totals = {row["step"]: row["step_s"] for row in steps if row["step_s"] is not None}
    numbers = [row["step"] for row in steps]
    notes: list[str] = []
    if outside:
        notes.append(
            f"Hatched: {', '.join(outside)} ran outside timing_s/step and are not part of the step's time."
        )
    if apart:
        notes.append(
            f"Not in the stack, because nested in or concurrent with other timers: {', '.join(apart)}."
        )
    if any(row["overlap_s"] for row in steps):
        notes.append("In some steps the timers together are longer than the step: they overlap.")
    figure, (axes,) = sheet(
        _breakdown_title(phases, steps), _about(label, steps), size=(12, 6.2), notes=notes
    )
    longest = max(
        [row["accounted_s"] + row["outside_s"] for row in steps] + list(totals.values()), default=0
    )
    factor, unit = time_unit(longest)
    among = [("{}", inside), ("{}, outside", outside)]
    series = [
        (named.format(name), [values.get(step, 0.0) * factor for step in numbers], color(name))
        for named, timers in among
        for name, values in _ordered(timers)
    ]
    hatched = {f"{name}, outside": "////" for name in outside}
    if len(numbers) > _BARS:
        areas(axes, numbers, series, hatched)
    else:
        stack(axes, numbers, series, hatched=hatched)
    step_times(axes, {step: value * factor for step, value in totals.items()})
    finish(axes, steps, f"time [{unit}]")
    legend(axes, reverse=True)
    return figure


def _per_token(data: DataTables, label: str) -> Figure:
    rows, steps = data["per_token"], data["steps"]
    series = _series(rows, "timer", "ms_per_token")
    responses = {row["timer"] for row in rows if row["tokens"] == "response"}
    middles = {name: statistics.median(values.values()) for name, values in series.items()}
    most = max(middles, key=lambda name: middles[name])
    positive = [middle for middle in middles.values() if middle > 0]
    wide = len(positive) > 1 and max(positive) > _LOG_SCALE * min(positive)
    figure, (axes,) = sheet(
        f"{most} takes {_ms(middles[most])} per {'response token' if most in responses else 'token'} "
        "(median)",
        _about(label, steps),
        size=(12, 5.6),
        notes=[_DENOMINATORS] * bool(responses),
    )
    labels: list[EndLabel] = []
    for name, values in series.items():
        style = "-" if name in responses else "--"
        step_line(axes, values, color=color(name), linestyle=style)
        last = values[max(values)]
        unit = "per response token" if name in responses else "per token"
        labels.append(EndLabel(last, f"{name}: {_ms(middles[name])} {unit}", color(name), style))
    finish(axes, steps, "time per token [ms]" + (", log scale" if wide else ""), labels, log=wide)
    return figure


def _throughput(data: DataTables, label: str) -> Figure:
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
    about = _about(label, steps)
    if gpus:
        about += f", {' and '.join(map(str, sorted(gpus)))} GPU{'s' if gpus != {1} else ''}"
    figure, (top, bottom) = sheet(title, about, size=(12, 7.4), panels=(2, 1), sharex=True)
    if each:
        top.fill_between(*gapped(each), color=PHASE_COLORS["gen"], alpha=0.15, linewidth=0)
        step_line(top, each, color=PHASE_COLORS["gen"])
        middle_lines(top, each, PHASE_COLORS["gen"], _count)
    finish(top, steps, "perf/throughput [tokens/s per GPU]")
    top.set_xlabel("")
    if len(gpus) == 1 and job:
        (count,) = gpus
        to_job: Callable[[float], float] = lambda value: value * count  # noqa: E731
        to_gpu: Callable[[float], float] = lambda value: value / count  # noqa: E731
        other: Any = top.secondary_yaxis("right", functions=(to_job, to_gpu))
        other.set_ylabel("tokens/s of the job", color=MUTED)
        other.tick_params(colors=MUTED)
        other.yaxis.set_major_formatter(top.yaxis.get_major_formatter())
    factor, unit = time_unit(max(times.values(), default=0))
    step_line(bottom, times, factor, color=INK)
    middle_lines(bottom, times, INK, seconds, factor)
    finish(bottom, steps, f"perf/time_per_step [{unit}]", named=False)
    return figure


def _comparison(data: DataTables, label: str) -> Figure:
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


def _generation(data: DataTables, label: str) -> Figure:
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
    style: Callable[[str], Any] = lambda _: "-",
) -> Figure:
    """Draw a line per timer, with its mean and median beside it."""
    figure, (axes,) = sheet(
        title, _about(label, steps), size=(12, max(5.6, 0.3 * len(series) + 2.4)), notes=notes
    )
    factor, unit = time_unit(max(max(values.values()) for values in series.values()))
    labels: list[EndLabel] = []
    for name, values in series.items():
        code = _timer_color(name)
        step_line(axes, values, factor, color=code, linestyle=style(name))
        mean, middle = statistics.fmean(values.values()), statistics.median(values.values())
        words = f"{name}: mean {seconds(mean)}, median {seconds(middle)}"
        labels.append(EndLabel(values[max(values)] * factor, words, code, style(name)))
    finish(axes, steps, f"time [{unit}]", labels)
    return figure


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


def _generation_style(name: str) -> Any:
    if name in ("gen", "old_log_prob"):
        return "-"
    return next((_STYLES[part] for part in name.split("/") if part in _STYLES), "--")


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
