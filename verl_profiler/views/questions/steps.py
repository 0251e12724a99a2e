"""Views of steps: how long they took, and validation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from verl_profiler.analysis.requests import request_parts
from verl_profiler.analysis.selection import Rows, grouped, named, steady, summed, warm_ups
from verl_profiler.analysis.steps import step_durations
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    panel,
    step_bars,
)
from verl_profiler.render.colors import MUTED, PHASE_COLORS, color
from verl_profiler.render.text import without
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.view import Choice, DataTables, at_steps, column, known, view

_TRAINING_COLOR = PHASE_COLORS["update_actor"]
_OTHER_COLOR = PHASE_COLORS["prepare_step"]
# Parts with less of the time are not drawn; below zero, they would take room of their own.
_LITTLE, _LITTLE_BETWEEN = 0.001, 0.005
_INSIDE = (
    ("gen", "gen_s", PHASE_COLORS["gen"]),
    ("training", "training_s", _TRAINING_COLOR),
    ("update_weights", "weights_s", PHASE_COLORS["update_weights"]),
    ("save_checkpoint", "checkpoint_s", PHASE_COLORS["save_checkpoint"]),
    ("other phases", "other_s", _OTHER_COLOR),
    ("outside all timers", "unaccounted_s", PHASE_COLORS["unaccounted"]),
    ("outside gen", "outside_gen_s", PHASE_COLORS["unaccounted"]),
)
_BETWEEN = (
    ("validation", "testing_s", PHASE_COLORS["testing"]),
    ("between steps, other", "between_other_s", MUTED),
)


@view(
    "step_durations",
    "How long do rollout and training take in each step, and how long is it from one step to the next?",
    step_durations,
    request_parts,
    empty="no step has a rollout there.",
    example="--steps 10:60",
)
def _durations(data: DataTables, choice: Choice) -> Spec:
    rows = data["step_durations"]
    finished = [row for row in rows if row["finished"]]
    notes: list[str] = []
    if finished:
        notes.append(
            "training: rewards, log-probabilities, values, advantages and updates. "
            "other phases: prepare_step (the next batch is loaded), profiling, switches."
        )
        if len(finished) < len(rows):
            notes.append(f"Of unfinished steps only gen is drawn: {len(rows) - len(finished)}.")
    else:
        notes.append(
            "The trainer was not recorded: the time between two rollouts (log-probabilities, "
            "updates, weight sync, validation) has one color."
        )
    about = f"{choice.text()}: {counted(len(rows), 'step')}"
    if len(rows) < (rows[-1]["step"] - rows[0]["step"] + 1):
        about += ", some missing"
    steps = [row["step"] for row in rows]
    heights = [sum(row[key] or 0 for _, key, _ in (*_INSIDE, *_BETWEEN)) for row in rows]

    def shown(parts: Sequence[tuple[str, str, str]], sign: int, least: float) -> list[Series]:
        return [
            (name, [sign * value for value in column(rows, key)], code)
            for name, key, code in parts
            if sum(row[key] or 0 for row in rows) > least * sum(heights)
        ]

    # A step is as long as its bar; what follows it is no part of it.
    below = shown(_BETWEEN, -1, _LITTLE_BETWEEN)
    bars = step_bars(
        steps,
        [*below, *shown(_INSIDE, 1, _LITTLE)],
        "time",
        form="s",
        pale=[name for name, _, _ in below],
    )
    if finished and below:
        notes.append(
            "Below zero, faint: after the step, before the next one (validation is verl's testing)."
        )
    title = _duration_title(rows, choice)
    return chart(title, about, panel(bars, height=300), *_components(data, steps), notes=notes)


def _components(data: DataTables, steps: Sequence[int]) -> list[Spec]:
    """Return a panel with the share of each component of the requests in each step."""
    rows = [row for row in data["request_parts"] if not row["validate"] and row["share"]]
    if not rows:
        return []
    parts, sums = grouped(rows, "part"), summed(rows, "share", "part")
    series: list[Series] = [
        (part, at_steps(parts[part], "share", steps), color(part))
        for part in sorted(sums, key=lambda part: (-sums[part], part))
    ]
    bars = step_bars(steps, series, "share of the requests' time", form="%")
    return [
        panel(
            bars, title="components of the requests that were dispatched in each step", height=180
        )
    ]


def _duration_title(rows: Rows, choice: Choice) -> str:
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
    return title
