"""The five pictures of a console log, under the names that their users know."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_profiler.analysis.console_timers import (
    generation_times,
    logged_phases,
    logged_steps,
    per_token_times,
)
from verl_profiler.analysis.log_findings import left_out, log_headline, log_phases
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.render.charts import (
    SOLID,
    Line,
    Series,
    Spec,
    chart,
    layer,
    panel,
    step_bars,
    step_lines,
)
from verl_profiler.render.colors import INK, PHASE_COLORS, color, is_known
from verl_profiler.render.text import without
from verl_profiler.units import seconds, share
from verl_profiler.views.view import NothingToDraw, at_steps, column, known

_OUTSIDE = "{}, outside"
# Of timers inside gen, by the last or the middle part of their names.
_DASHED = (5, 3)
_STYLES = {"max": _DASHED, "slowest": (8, 2, 2, 2, 2, 2), "mean": (6, 2, 1, 2), "min": (1, 2)}
# The timers that people compare first, and the share of the step from which others join them.
_COMPARED = ("gen", "update_actor", "update_critic", "update_critic_actor")
_COMPARED_SHARE = 0.05

_DENOMINATORS = (
    "verl divides gen by response tokens, and the others by prompt and response tokens, so gen "
    "cannot be compared with them."
)
_CHILDREN = (
    "Broken lines: inside gen, not in addition to it. min, max and mean are over the requests or "
    "workers of a step; slowest is its slowest request."
)


# By name, in the order in which they are written.  Each raises NothingToDraw without numbers for it.
PICTURES: dict[str, Callable[[LoggedRun], Spec]] = {}


def _picture(draw: Callable[[LoggedRun, Rows], Spec]) -> Callable[[LoggedRun, Rows], Spec]:
    """Make a picture of the function that draws a run with its `logged_steps`, under the function's name."""
    PICTURES[draw.__name__] = lambda run: draw(run, logged_steps(run))
    return draw


def _some(rows: Rows, absent: str) -> Rows:
    if not rows:
        raise NothingToDraw(f"the log has {absent}")
    return rows


@_picture
def step_timing_breakdown(run: LoggedRun, steps: Rows) -> Spec:
    """Stack the timers of each step, with the time of the step as a line."""
    places = grouped(_some(logged_phases(run), "no timer of a phase"), "place")
    inside, outside = (grouped(places.get(place, ()), "phase") for place in ("step", "outside"))
    apart = sorted({row["phase"] for row in places.get("overlapping", ())})
    totals = [row for row in steps if row["step_s"] is not None]
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
    numbers = _numbers(steps)
    series: list[Series] = []
    for shown, timers in (("{}", inside), (_OUTSIDE, outside)):
        for name in sorted(timers, key=_stack_order):
            values = at_steps(timers[name], "duration_s", numbers)
            series.append((shown.format(name), values, color(name)))
    pale = [_OUTSIDE.format(name) for name in outside]
    bars = step_bars(numbers, series, "time", pale=pale, form="s")
    # How long each step took, on the axis of the bars.
    (line,) = step_lines(numbers, [("", totals, "step_s", INK, SOLID)], "")
    line["mark"] = {"type": "line", "strokeDash": [4, 2], "color": INK}
    line["encoding"]["y"] = bars[0]["encoding"]["y"] | {"field": "value"}
    del line["encoding"]["color"]
    return chart(
        _breakdown_title(run),
        _about(run, steps),
        panel(bars, line, height=380),
        notes=[*notes, *["Lines: the time of the step (timing_s/step)."] * bool(totals)],
    )


@_picture
def per_token_timing(run: LoggedRun, steps: Rows) -> Spec:
    """Draw a line per timer."""
    timers = grouped(_some(per_token_times(run), "no timing_per_token_ms/… metric"), "timer")
    per = {
        name: f"per {'response ' * (own[0]['tokens'] == 'response')}token"
        for name, own in timers.items()
    }
    middles = {name: statistics.median(column(own, "ms_per_token")) for name, own in timers.items()}
    most = max(middles, key=lambda name: middles[name])
    responses = {name for name in timers if "response" in per[name]}
    lines: list[Line] = [
        (
            f"{name}: {_ms(middles[name])} {per[name]}",
            own,
            "ms_per_token",
            color(name),
            SOLID if name in responses else _DASHED,
        )
        for name, own in timers.items()
    ]
    return chart(
        f"{most} takes {_ms(middles[most])} {per[most]} (median)",
        _about(run, steps),
        panel(step_lines(_numbers(steps), lines, "time per token [ms]"), height=320),
        notes=[_DENOMINATORS] * bool(responses),
    )


@_picture
def throughput(run: LoggedRun, steps: Rows) -> Spec:
    """Draw tokens per second, and below them the time per step."""
    kept = _kept(run, steps)
    each, job = known(kept, "tokens_per_s_per_gpu"), known(kept, "tokens_per_s")
    title = f"{_count(statistics.median(each))} tokens/s per GPU" if each else "Time per step"
    if job:
        title += f", {_count(statistics.median(job))} tokens/s of the job (medians)"
    gpus = set(known(steps, "gpus"))
    more = (
        f", {' and '.join(map(str, sorted(gpus)))} GPU{'s' if gpus != {1} else ''}" if gpus else ""
    )
    shown = [
        (
            "tokens_per_s_per_gpu",
            _count,
            PHASE_COLORS["gen"],
            "perf/throughput [tokens/s per GPU]",
            "",
        ),
        ("step_s", seconds, INK, "perf/time_per_step", "s"),
    ]
    panels: list[Spec] = []
    for key, words, code, axis, form in shown:
        if values := known(kept, key):
            mean = statistics.fmean(values)
            middles = f"mean {words(mean)}, median {words(statistics.median(values))}"
            line: Line = (middles, steps, key, code, SOLID)
            drawn = step_lines(_numbers(steps), [line], axis, form=form)
            rule = layer(
                [{"mean": mean}],
                {"type": "rule", "strokeDash": [4, 3]},
                tip=("mean",),
                y=drawn[0]["encoding"]["y"] | {"field": "mean"},
                color=code,
            )
            panels.append(panel(drawn, rule, height=200))
    if not panels:
        raise NothingToDraw("the log has neither perf/throughput nor a time per step")
    notes = f"Broken lines: the mean{without(left_out(run))}."
    return chart(title, _about(run, steps) + more, *panels, notes=notes)


@_picture
def component_comparison(run: LoggedRun, steps: Rows) -> Spec:
    """Draw a line per major timer of the step."""
    phases = _some(logged_phases(run), "no timer of a phase")
    timers = grouped((row for row in phases if row["place"] == "step"), "phase")
    total = sum(row["step_s"] or 0 for row in steps) or 1.0
    chosen = {
        name: own
        for name, own in timers.items()
        if name in _COMPARED
        or (name != "unaccounted" and sum(column(own, "duration_s")) >= _COMPARED_SHARE * total)
    } or timers
    most = max(chosen, key=lambda name: sum(column(chosen[name], "duration_s")))
    return _times(
        f"{most} takes {seconds(_mean_s(run, chosen[most]))} on average",
        chosen,
        run,
        steps,
        [
            f"Timers other than {', '.join(_COMPARED[:3])} are shown if they take at least {share(_COMPARED_SHARE)} of the time."
        ],
    )


@_picture
def generation_timing(run: LoggedRun, steps: Rows) -> Spec:
    """Draw a line per timer inside gen."""
    rows = _some(generation_times(run), "no timer of gen")
    timers = grouped(sorted(rows, key=_generation_order), "timer")
    title = "Inside generation"
    if "gen" in timers:
        title = f"gen takes {seconds(_mean_s(run, timers['gen']))} on average"
    inside = any(row["inside"] for row in rows)
    notes = [_CHILDREN if inside else "This log has no timers inside gen."]
    if "old_log_prob" in timers:
        notes.append("old_log_prob is the pass after gen, not part of it.")
    return _times(title, timers, run, steps, notes, style=_generation_style)


def _times(
    title: str,
    timers: Mapping[str, Rows],
    run: LoggedRun,
    steps: Rows,
    notes: Sequence[str],
    style: Callable[[str], Sequence[int]] = lambda _: SOLID,
) -> Spec:
    """Draw a line per timer, with its mean in the legend."""
    lines: list[Line] = []
    for name, own in timers.items():
        mean = seconds(_mean_s(run, own))
        lines.append((f"{name}: {mean}", own, "duration_s", _timer_color(name), style(name)))
    drawn = step_lines(_numbers(steps), lines, "time", form="s")
    notes = [f"Below the chart: the mean of each timer{without(left_out(run))}.", *notes]
    return chart(title, _about(run, steps), panel(drawn, height=340), notes=notes)


def _numbers(steps: Rows) -> list[int]:
    return [row["step"] for row in steps]


def _kept(run: LoggedRun, rows: Rows) -> Rows:
    """Return the rows of the steps that means cover, or all where there are no others."""
    return [row for row in rows if row["step"] not in left_out(run)] or rows


def _mean_s(run: LoggedRun, rows: Rows) -> float:
    return statistics.fmean(column(_kept(run, rows), "duration_s"))


def _breakdown_title(run: LoggedRun) -> str:
    mean_s = log_headline(run)["step_mean_s"]
    inside, outside = (
        [row for row in log_phases(run) if row["place"] == place] for place in ("step", "outside")
    )
    if not inside or not mean_s:
        return "Timers of each step"
    title = (
        f"A step takes {seconds(mean_s)} (mean{without(left_out(run))}); "
        f"{share(inside[0]['mean_s'] / mean_s)} of the time is {inside[0]['phase']}"
    )
    if outside and outside[0]["mean_s"] >= _COMPARED_SHARE * mean_s:
        title += (
            f"; {outside[0]['phase']}, outside the step, takes {seconds(outside[0]['mean_s'])} "
            "on average"
        )
    return title


def _about(run: LoggedRun, steps: Rows) -> str:
    first, last = steps[0]["step"], steps[-1]["step"]
    missing = last - first + 1 - len(steps)
    text = f"{run.label}: {len(steps):,} step{'s' if len(steps) > 1 else ''}, {first} to {last}"
    text += f", {missing:,} in between are not in the log" if missing else ""
    resumed = [str(row["step"]) for row in steps[1:] if row["first_of_launch"]]
    return text + (f"; training resumed at step {', '.join(resumed)}" if resumed else "")


def _stack_order(name: str) -> tuple[int, int]:
    """Sort timers as the steps have them: the known phases in order, others, the rest on top."""
    order = [*PHASE_COLORS]
    last = {"unaccounted": 1, "testing": 2}
    return last.get(name, 0), order.index(name) if name in order else len(order)


def _generation_order(row: Mapping[str, Any]) -> tuple[int, str]:
    known_order = {"gen": 0, "generate_sequences": 1, "reshard": 2, "old_log_prob": 9}
    return known_order.get(row["timer"], 5), row["timer"]


def _generation_style(name: str) -> Sequence[int]:
    if name in ("gen", "old_log_prob"):
        return SOLID
    return next((_STYLES[part] for part in name.split("/") if part in _STYLES), _DASHED)


def _timer_color(name: str) -> str:
    """Return the color of a timer, or of the work that its name stands for."""
    spare = color(name)
    return next((color(part) for part in reversed(name.split("/")) if is_known(part)), spare)


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
