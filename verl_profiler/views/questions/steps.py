"""Views of steps: how long they took, and validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from verl_profiler.analysis.selection import Rows, named, steady, warm_ups
from verl_profiler.analysis.steps import step_durations, step_trend
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    layer,
    panel,
    step_bars,
    time_unit,
)
from verl_profiler.render.colors import ACCENT, INK, MUTED, PHASE_COLORS
from verl_profiler.render.text import without
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking, column, known

__all__ = ["TABLES", "VIEWS"]

_TRAINING_COLOR = PHASE_COLORS["update_actor"]
_OTHER_COLOR = PHASE_COLORS["prepare_step"]
_NAMED_UNUSUAL = 6
_INSIDE = (
    ("gen", "gen_s", PHASE_COLORS["gen"]),
    ("training", "training_s", _TRAINING_COLOR),
    ("update_weights", "weights_s", PHASE_COLORS["update_weights"]),
    ("save_checkpoint", "checkpoint_s", PHASE_COLORS["save_checkpoint"]),
    ("other phases", "other_s", _OTHER_COLOR),
    ("in no timer", "unaccounted_s", PHASE_COLORS["unaccounted"]),
    ("outside gen", "outside_gen_s", PHASE_COLORS["unaccounted"]),
)
_BETWEEN = (
    ("validation", "testing_s", PHASE_COLORS["testing"]),
    ("between steps, other", "between_other_s", MUTED),
)


def _durations(data: DataTables, choice: Choice) -> Spec:
    rows = data["step_durations"]
    finished = [row for row in rows if row["finished"]]
    notes: list[str] = []
    if finished:
        notes.append(
            "training: rewards, log-probabilities, values, advantages and updates. "
            "other phases: prepare_step (the next batch is loaded), profiling, switches. "
            "Below zero, pale: after the step, before the next one (validation is verl's testing)."
        )
        if len(finished) < len(rows):
            notes.append(f"{len(rows) - len(finished)} unfinished steps show gen alone.")
    else:
        notes.append(
            "The trainer was not recorded: the time between two rollouts (log-probabilities, "
            "updates, weight sync, validation) has one color."
        )
    unusual = [row for row in rows if row["unusual"]]
    about = f"{choice.text()}: {len(rows)} steps"
    if len(rows) < (rows[-1]["step"] - rows[0]["step"] + 1):
        about += ", some missing"
    if unusual:
        named = ", ".join(str(row["step"]) for row in unusual[:_NAMED_UNUSUAL])
        about += f"; unusual (marked): {named}" + (
            f" and {len(unusual) - _NAMED_UNUSUAL} more" if len(unusual) > _NAMED_UNUSUAL else ""
        )
    steps = [row["step"] for row in rows]
    heights = [sum(row[key] or 0 for _, key, _ in (*_INSIDE, *_BETWEEN)) for row in rows]
    factor, unit = time_unit(max(heights))

    def shown(parts: Sequence[tuple[str, str, str]], sign: int) -> list[Series]:
        return [
            (name, column(rows, key, sign * factor), code)
            for name, key, code in parts
            if sum(row[key] or 0 for row in rows) > 0.001 * sum(heights)
        ]

    # A step is as long as its bar; what follows it is no part of it.
    bars = step_bars(
        steps,
        [*shown(_BETWEEN, -1), *shown(_INSIDE, 1)],
        f"time [{unit}]",
        pale=[name for name, _, _ in _BETWEEN],
    )
    x, y = bars[0]["encoding"]["x"] | {"field": "step"}, bars[0]["encoding"]["y"]
    more: list[Spec] = []
    for trend in data["step_trend"]:
        if trend["measure"] == "gen" and len(rows) >= 5:
            middle, slope = trend["median_s"], trend["slope_s_per_step"]
            center = (steps[0] + steps[-1]) / 2
            ends = [
                {"step": step, "low": (middle + slope * (step - center)) * factor}
                for step in (steps[0], steps[-1])
            ]
            mark = {"type": "line", "strokeDash": [6, 4], "color": INK}
            more.append(layer(ends, mark, x=x, y=y))
            notes.append("Broken line: trend of gen.")
    if unusual:
        tops = [
            {"step": row["step"], "low": sum(row[key] or 0 for _, key, _ in _INSIDE) * factor}
            for row in unusual
        ]
        mark = {
            "type": "point",
            "shape": "triangle-down",
            "filled": True,
            "size": 45,
            "yOffset": -8,
        }
        more.append(layer(tops, mark, tip=("step",), x=x, y=y, color=ACCENT))
    title = _duration_title(rows, data["step_trend"], choice)
    return chart(title, about, panel(bars, more, height=300), notes=notes)


def _duration_title(rows: Rows, trends: Rows, choice: Choice) -> str:
    finished = [row for row in rows if row["finished"] and row["step"] > 0]
    left_out = warm_ups(finished, choice.steps)
    kept = steady(finished, left_out)
    steps = known(kept, "step_s")
    gens = known(rows, "gen_s")
    if steps:
        sums = {name: sum(row[key] or 0 for row in kept) for name, key, _ in _INSIDE}
        most = max(sums, key=lambda name: sums[name])
        title = (
            f"A step takes {seconds(fmean(steps))} (mean{without(named(left_out, finished))}); "
            f"{share(sums[most] / sum(steps))} of the time is {most}"
        )
        if most != "gen":
            title += f", {share(sums['gen'] / sum(steps))} gen"
    elif gens:
        title = f"gen takes {seconds(fmean(gens))} (mean)"
    else:
        title = "Steps"
    if len(rows) < 5:
        return title
    for trend in trends:
        if trend["measure"] != "gen":
            continue
        clear = abs(trend["rising"] - 0.5) > 0.15 and abs(trend["change_share"] or 0) > 0.05
        if clear:
            word = "longer" if trend["change_s"] > 0 else "shorter"
            return (
                f"{title}; gen became {seconds(abs(trend['change_s']))} {word} "
                f"({share(abs(trend['change_share']))}) over {trend['steps']} steps"
            )
        return f"{title}; gen shows no trend"
    return title


VIEWS = (
    View(
        name="step_durations",
        question="How long do rollout and training take in each step, and how long is it from one step to the next?",
        analysis=asking(step_durations, step_trend),
        columns=common("run step unaccounted_s to_next_s")
        | {
            "finished": "whether the trainer recorded the step's end",
            "validated": "whether validation ran in it",
            "step_s": (
                "length of the step by the trainer's timer, in s: gen_s, training_s, weights_s, "
                "checkpoint_s, other_s and unaccounted_s together"
            ),
            "gen_s": "rollout, in s; without the trainer, that of the slowest worker",
            "training_s": "rewards, log-probabilities, values, advantages and updates, in s",
            "weights_s": "weight sync (`update_weights`, `sync_rollout_weights`, `param_sync`), in s",
            "checkpoint_s": "`save_checkpoint`, in s",
            "other_s": "other phases of the step, such as `prepare_step` (the next batch), in s",
            "between_s": "from the end of the step to the start of the next one, in s",
            "testing_s": "validation in that time, in s",
            "between_other_s": "the rest of that time, in s",
            "outside_gen_s": (
                "without the trainer: the rest of to_next_s, whatever it was, in s; otherwise empty"
            ),
            "unusual": (
                "whether its length, or gen_s without the trainer, is far from the median (4 "
                "spreads and 30 %)"
            ),
        },
        chart=_durations,
        empty="no step has a rollout there.",
        section="steps",
        shows="""
            One bar per step. Pale, below zero: the time between it and the next one.
            The dashed line is the trend of `gen`, the median slope over all pairs of steps, which
            is robust to outliers. Triangles mark unusual steps. A missing step leaves a gap in the
            axis, and the time across it is not counted as time between steps.
        """,
        conclude="""
            - `gen` is most of the step: see `rollout_tail` first, then `engine_parts` and
              `tool_latencies`.
            - Training is most of the step: `worker_phases` shows whether ranks wait for each
              other.
            - If `gen` grows together with the tokens (`token_rates`), it does more work; if it
              grows alone, it became slower.
            - `gen` has only a few distinct lengths: verl polls for finished samples every 2 s, so
              lengths are multiples of 2 s.
            - Time in no timer is small in a healthy run. If it is large, the trainer runs code that
              verl does not time.
        """,
        limits="""
            Without the trainer's events (files of the original logger, or the family `trainer`
            off), `gen` is the span of the requests, and the time until the next rollout is one
            bar. The title reports a trend only from five steps on, if two thirds of all pairs of
            steps agree and the change exceeds 5 % of the median. Sources: the trainer's timers (`timing_s/...`) and the start of the next
            step.
        """,
        example="--steps 10:60",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "time_tree": common("run step")
    | {
        "phase": "phase of the step; empty for the step itself",
        "component": "component of the requests in `gen`, or `idle slots`; empty above that level",
        "tool": "tool in the component `tool`; empty above that level",
        "duration_s": "duration, in s; those below a row add up to its own",
    },
    "validation_times": common("run unfinished mean_s p50_s p95_s p99_s max_s reward rollout_s")
    | {
        "step": "step during which it ran; 0 is before training",
        "requests": "number of validation requests",
        "turns": "mean number of turns",
        "generated_tokens": "tokens generated in the validation",
        "testing_s": "the trainer's timer, in s; empty if not recorded",
        "share": (
            "part of the time from the start of this step to the start of the next one that "
            "the validation takes; empty if there is no next step"
        ),
    },
    "step_times": common("run step begin_us requests unaccounted_s to_next_s")
    | {
        "finished": "whether the trainer recorded the step's end",
        "requests": "number of training requests; empty if the family `rollout` was off",
        "duration_s": "length of the step, in s; empty without an end",
        "seen_s": "length of what was recorded of it, in s",
        "gen_s": "sum of its `gen`, in s",
        "unfinished_requests": "number of training requests without an end",
        "validation_requests": "number of validation requests",
        "generated_tokens_per_s": (
            "tokens of finished training requests by the length of the whole step"
        ),
        "testing_s": "validation, in s",
    },
    "step_phases": common("run step duration_s")
    | {
        "phase": "phase of the step by the trainer's timer, or `unaccounted`",
        "duration_s": "time of the phase in the step, in s",
        "share": (
            "part of the step; the shares of a finished step add up to 1; empty for unfinished "
            "steps"
        ),
        "count": "number of intervals of the phase",
    },
    "phase_totals": common("run total_s")
    | {
        "phase": "phase of the step by the trainer's timer, or `unaccounted`",
        "steps": "number of finished steps, without the warm-up",
        "mean_s": "mean time per finished step, in s",
        "share": "part of the time of these steps",
        "count": "number of intervals of the phase",
        "max_s": "longest time in one step, in s",
        "max_step": "that step",
    },
    "step_metrics": common("step estimated")
    | {
        "name": "name of the metric",
        "unit": "`s`, `/s`, or nothing for numbers",
        "value": (
            "the value, of metrics that occur once per step (the step, its phases, tails, tokens); "
            "those that occur many times (requests, calls) have mean to count instead"
        ),
        "mean": "mean",
        "p50": "median; quantiles are empty for too few values (p95 needs 20)",
        "p90": "90th percentile",
        "p95": "95th percentile",
        "p99": "99th percentile",
        "max": "the maximum",
        "total": "sum, in s; 0 in steps without an occurrence",
        "count": "number of occurrences; 0 in steps without any",
    },
    "step_trend": common("run")
    | {
        "measure": "`step`, `gen` or `training`",
        "steps": "number of steps with this measure",
        "median_s": "its median, in s",
        "slope_s_per_step": "median of the slopes between every two steps, in s per step",
        "change_s": "the slope times the number of steps passed, in s",
        "change_share": "change_s as part of the median",
        "rising": "share of pairs in which the later step is longer; 0.5 is no trend",
    },
}
