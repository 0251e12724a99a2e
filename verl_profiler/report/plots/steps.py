"""Plots of steps: how long they took, what their time went to, and validation."""

from __future__ import annotations

from matplotlib.figure import Figure

from verl_profiler.analysis.event_shares import event_shares
from verl_profiler.analysis.exclusive_times import exclusive_times
from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.step_durations import step_durations, step_trend
from verl_profiler.analysis.validation_times import validation_times
from verl_profiler.report.plots.canvas import (
    bars,
    end_labels,
    legend,
    sheet,
    stack,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.report.plots.choice import Choice, Plot, Sheets, column, known
from verl_profiler.report.style import ACCENT, GRID, INK, MUTED, PHASE_COLORS, color
from verl_profiler.report.text import seconds, share
from verl_profiler.tables import Tables

__all__ = ["PLOTS"]

_TRAINING_COLOR = PHASE_COLORS["update_actor"]
_NAMED_UNUSUAL = 6


def _duration_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {
        "step_durations": step_durations(tables, choice.steps),
        "step_trend": step_trend(tables, choice.steps),
    }


def _durations(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["step_durations"]
    finished = [row for row in rows if row["finished"]]
    notes = []
    if finished:
        notes.append(
            "training: rewards, log-probabilities, values, advantages and updates. "
            "Hatched: after the step, before the next one (validation is verl's testing)."
        )
        if len(finished) < len(rows):
            notes.append(f"{len(rows) - len(finished)} unfinished steps show their rollout alone.")
    else:
        notes.append(
            "The trainer was not recorded: what lies between two rollouts (log-probabilities, "
            "updates, weight sync, validation) has one color."
        )
    unusual = [row for row in rows if row["unusual"]]
    about = f"{choice.words()}: {len(rows)} steps"
    if len(rows) < (rows[-1]["step"] - rows[0]["step"] + 1):
        about += ", some missing"
    if unusual:
        named = ", ".join(str(row["step"]) for row in unusual[:_NAMED_UNUSUAL])
        about += f"; unusual (marked): {named}" + (
            f" and {len(unusual) - _NAMED_UNUSUAL} more" if len(unusual) > _NAMED_UNUSUAL else ""
        )
    figure, (axes,) = sheet(
        _duration_title(rows, sheets["step_trend"]), about, size=(11, 5.2), notes=notes
    )
    steps = [row["step"] for row in rows]
    names = [
        ("rollout", "rollout_s", PHASE_COLORS["gen"]),
        ("training", "training_s", _TRAINING_COLOR),
        ("update_weights", "weights_s", PHASE_COLORS["update_weights"]),
        ("save_checkpoint", "checkpoint_s", PHASE_COLORS["save_checkpoint"]),
        ("in no timer", "unaccounted_s", PHASE_COLORS["unaccounted"]),
        ("validation", "testing_s", PHASE_COLORS["testing"]),
        ("between steps, other", "between_other_s", "#EDEDED"),
        ("outside the rollout", "outside_rollout_s", PHASE_COLORS["unaccounted"]),
    ]
    heights = [sum(row[key] or 0 for _, key, _ in names) for row in rows]
    factor, unit = time_unit(max(heights))
    shown = [
        (name, column(rows, key, factor), code)
        for name, key, code in names
        if sum(row[key] or 0 for row in rows) > 0.001 * sum(heights)
    ]
    tops = stack(
        axes,
        steps,
        shown,
        hatched={"validation": "////", "between steps, other": "////"},
    )
    for trend in sheets["step_trend"]:
        if trend["measure"] == "rollout" and len(rows) >= 5:
            middle, slope = trend["median_s"], trend["slope_s_per_step"]
            center = (steps[0] + steps[-1]) / 2
            axes.plot(
                [steps[0], steps[-1]],
                [(middle + slope * (step - center)) * factor for step in (steps[0], steps[-1])],
                color=INK,
                linestyle="--",
                linewidth=1.2,
                label="trend of the rollout",
            )
    for row, top in zip(rows, tops, strict=True):
        if row["unusual"]:
            axes.plot([row["step"]], [top + max(tops) * 0.02], "v", color=ACCENT, markersize=5)
    step_axis(axes, steps)
    value_axis(axes, f"time [{unit}]")
    axes.set_ylim(0, max(tops) * 1.06)
    legend(axes, reverse=True)
    return figure


def _duration_title(rows: Rows, trends: Rows) -> str:
    steps = sorted(known(rows, "step_s"))
    rollouts = sorted(known(rows, "rollout_s"))
    if steps:
        middle = steps[len(steps) // 2]
        part = sum(row["rollout_s"] or 0 for row in rows if row["finished"]) / sum(steps)
        title = f"A step takes {seconds(middle)} (median); {share(part)} of the time is rollout"
    elif rollouts:
        title = f"A rollout takes {seconds(rollouts[len(rollouts) // 2])}"
    else:
        title = "Steps"
    if len(rows) < 5:
        return title
    for trend in trends:
        if trend["measure"] != "rollout":
            continue
        clear = abs(trend["rising"] - 0.5) > 0.15 and abs(trend["change_share"] or 0) > 0.05
        if clear:
            word = "longer" if trend["change_s"] > 0 else "shorter"
            return (
                f"{title}; rollouts became {seconds(abs(trend['change_s']))} {word} "
                f"({share(abs(trend['change_share']))}) over {trend['steps']} steps"
            )
        return f"{title}; rollouts show no trend"
    return title


def _share_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = event_shares(tables, choice.steps, validate=choice.validate)
    return {"event_shares": [row for row in rows if row["share"] is not None]}


# Events of the profiler's own watch, and what contains everything, say nothing here.
_NOT_DRAWN = {"step", "request", "event_loop_lag", "request_start"}
_ROLES = ("trainer", "agent_loop", "engine", "actor", "critic", "ref", "reward")
_LINES = 7


def _shares(sheets: Sheets, choice: Choice) -> Figure:
    rows = [row for row in sheets["event_shares"] if row["event"] not in _NOT_DRAWN]
    if not rows:
        rows = list(sheets["event_shares"])
    present = {row["role"] for row in rows}
    roles = [role for role in _ROLES if role in present]
    roles += sorted(present - set(roles))
    roles = [
        role for role in roles if role != "engine" or any(r["role"] == "agent_loop" for r in rows)
    ][:4]
    means: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        means.setdefault((row["role"], row["event"]), []).append(row["share"])
    steps = sorted({row["step"] for row in rows})
    average = {key: sum(values) / len(steps) for key, values in means.items()}
    first = next(iter(roles))
    top = max((key for key in average if key[0] == first), key=lambda key: average[key])
    low, high = min(means[top]), max(means[top])
    whole = next(row["whole"] for row in rows if (row["role"], row["event"]) == top)
    title = f"{top[1]} takes {share(average[top])} of the {whole.rstrip('s')} time"
    if len(steps) > 1:
        title += f" on average, between {share(low)} and {share(high)}"
    left_out = 0
    figure, panels = sheet(
        title,
        f"{choice.words()}: {len(steps)} steps with a whole",
        size=(11, 1.4 + 2.7 * ((len(roles) + 1) // 2)),
        panels=((len(roles) + 1) // 2, 2 if len(roles) > 1 else 1),
        notes=[
            (
                "Share of the step (trainer), of the time of all requests (agent loops, engines), or of "
                "the step in each process (others). Events contain each other, so shares do not add up; "
                "the plot exclusive_times has those that do."
            )
        ],
    )
    for axes, role in zip(panels, roles, strict=False):
        events = sorted(
            (key[1] for key in average if key[0] == role), key=lambda event: -average[role, event]
        )
        left_out += max(len(events) - _LINES, 0)
        labels = []
        for place, event in enumerate(events[:_LINES]):
            line = {
                row["step"]: row["share"]
                for row in rows
                if (row["role"], row["event"]) == (role, event)
            }
            axes.plot(
                list(line),
                list(line.values()),
                color=color(event),
                linestyle=("-", "--", ":")[_repeats(events[:place], event) % 3],
                marker="o" if len(steps) <= 30 else None,
                markersize=3.5,
            )
            labels.append((list(line.values())[-1], event, color(event)))
        step_axis(axes, steps)
        value_axis(axes, "share", percent=True)
        if role == "trainer":
            axes.set_ylim(0, 1)
        end_labels(axes, labels, gap=0.085)
        more = f" (the {_LINES} largest of {len(events)})" if len(events) > _LINES else ""
        axes.set_title(f"{role}{more}")
    for axes in panels[len(roles) :]:
        axes.set_visible(False)
    return figure


def _repeats(events: list[str], event: str) -> int:
    """Return how many of the events before have the same color."""
    return sum(color(other) == color(event) for other in events)


def _exclusive_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"exclusive_times": exclusive_times(tables, choice.steps, validate=choice.validate)}


_BARS = 12


def _exclusive(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["exclusive_times"]
    scopes = list(dict.fromkeys(row["scope"] for row in rows))
    scopes.sort(key=lambda scope: ({"step": 0, "requests": 1}.get(scope, 2), scope))
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        held = sums.setdefault((row["scope"], row["event"]), [0.0, 0.0, 0])
        held[0] += row["self_s"]
        held[1] += row["total_s"]
        held[2] += row["events"]
    wholes = {scope: sum(v[0] for k, v in sums.items() if k[0] == scope) for scope in scopes}
    scopes = [scope for scope in scopes if wholes[scope] > 0][:4]
    first = "requests" if "requests" in scopes else scopes[0]
    top = max((key for key in sums if key[0] == first), key=lambda key: sums[key][0])
    where = {"requests": "all request time", "step": "all step time"}.get(
        first, f"the work of {first}s"
    )
    title = f"{share(sums[top][0] / wholes[first])} of {where} is spent in {top[1]} itself"
    steps = {row["step"] for row in rows}
    sizes = [min(_BARS, sum(1 for key in sums if key[0] == scope)) for scope in scopes]
    figure, panels = sheet(
        title,
        f"{choice.words()}: {len(steps)} steps",
        size=(10, 1.5 + sum(0.62 + 0.24 * size for size in sizes)),
        panels=(len(scopes), 1),
        height_ratios=[size + 1.2 for size in sizes],
        notes=[
            (
                "An event's own time is without what it contains; the own times of a panel add up to "
                "100 %. Pale: with what it contains."
            )
        ],
    )
    for axes, scope in zip(panels, scopes, strict=True):
        events = sorted(
            (key[1] for key in sums if key[0] == scope), key=lambda event: -sums[scope, event][0]
        )
        shown, rest = events[:_BARS], events[_BARS:]
        whole = wholes[scope]
        own = [sums[scope, event][0] / whole for event in shown]
        total = [min(sums[scope, event][1] / whole, 1.0) for event in shown]
        if rest:
            shown = [*shown[:-1], f"{len(rest) + 1} more"]
            own[-1] = sum(sums[scope, event][0] for event in events[_BARS - 1 :]) / whole
            total[-1] = own[-1]
        bars(
            axes,
            [f"{event}  {share(mine)}" for event, mine in zip(shown, own, strict=True)],
            [("", total, GRID)],
        )
        places = range(len(shown))
        axes.barh(places, own, 0.74, color=[color(event) for event in shown])
        value_axis(axes, "", of="x", percent=True)
        axes.set_xlim(0, 1.01)
        what = {"step": "steps, by the trainer's timers", "requests": "requests"}.get(
            scope, f"{scope} ranks, while they work"
        )
        axes.set_title(f"{what}: {seconds(whole)} together")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    return figure


def _validation_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"validation_times": validation_times(tables, choice.steps)}


def _validation(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["validation_times"]
    requests = sum(row["requests"] for row in rows)
    timed = known(rows, "testing_s") or known(rows, "rollout_s")
    title = f"{len(rows)} validation{'s' if len(rows) > 1 else ''}"
    if timed:
        title += f" of {seconds(sum(timed) / len(timed))}" + (
            " on average" if len(timed) > 1 else ""
        )
    slowest = max(rows, key=lambda row: row["max_s"] or 0)
    if slowest["max_s"]:
        title += f"; the slowest request took {seconds(slowest['max_s'])} (step {slowest['step']})"
    scored = any(row["reward"] is not None for row in rows)
    figure, panels = sheet(
        title,
        f"{choice.run or 'run'}: {requests:,} validation requests; listed under the step during which they ran",
        size=(11, 4.8),
        panels=(1, 3 if scored else 2),
    )
    steps = [row["step"] for row in rows]
    longest = max([*known(rows, "testing_s"), *known(rows, "rollout_s"), 0])
    factor, unit = time_unit(longest)
    axes = panels[0]
    axes.bar(
        steps,
        column(rows, "testing_s", factor),
        0.8,
        color=GRID,
        label="validation, trainer's timer",
    )
    axes.bar(
        steps,
        column(rows, "rollout_s", factor),
        0.5,
        color=PHASE_COLORS["testing"],
        label="first request to last",
    )
    step_axis(axes, steps)
    value_axis(axes, f"time [{unit}]")
    axes.set_ylim(0, longest * factor * 1.25 or 1)
    axes.legend(loc="upper left", fontsize=8)
    axes.set_title("how long it took")
    axes = panels[1]
    factor, unit = time_unit(slowest["max_s"])
    labels = []
    for name, code in (("p50", "#8FBBDD"), ("p95", "#4B8CC2"), ("max", "#0B2A4F")):
        line = [row for row in rows if row[f"{name}_s"] is not None]
        if line:
            axes.plot(
                [row["step"] for row in line],
                column(line, f"{name}_s", factor),
                marker="o",
                markersize=3.5,
                color=code,
            )
            labels.append(
                (line[-1][f"{name}_s"] * factor, name if name == "max" else name.upper(), code)
            )
    step_axis(axes, steps)
    value_axis(axes, f"duration of a request [{unit}]")
    end_labels(axes, labels)
    axes.set_title("its requests")
    if scored:
        axes = panels[2]
        line = [row for row in rows if row["reward"] is not None]
        axes.plot(
            [row["step"] for row in line],
            column(line, "reward"),
            marker="o",
            markersize=4,
            color=INK,
        )
        step_axis(axes, steps)
        axes.set_ylabel("mean reward")
        axes.set_title("their rewards")
        axes.axhline(0, color=MUTED, linewidth=0.8)
    return figure


PLOTS: dict[str, Plot] = {
    "step_durations": Plot(
        "How long do rollout and training take in each step, and what lies between steps?",
        _duration_tables,
        _durations,
        "no step has a rollout there.",
    ),
    "event_shares": Plot(
        "Which share of the step, of the requests or of a process does each event take?",
        _share_tables,
        _shares,
        "no event there belongs to a finished step or request.",
        frozenset({"validate"}),
    ),
    "exclusive_times": Plot(
        "Where is the time really spent, without counting anything twice?",
        _exclusive_tables,
        _exclusive,
        "no finished step, request or rank's work was recorded there.",
        frozenset({"validate"}),
    ),
    "validation_times": Plot(
        "How long do validations take, apart from training?",
        _validation_tables,
        _validation,
        "no validation was recorded there.",
    ),
}
