"""The view of staleness: how old the samples of an asynchronous run are, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.staleness import staleness
from verl_profiler.render.axes import bars, legend, percent, step_stack, value_axis
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.render.figure import sheet, tint
from verl_profiler.units import share
from verl_profiler.views.staleness_text import by_group, makers
from verl_profiler.views.view import Choice, DataTables, Section, View, asking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]


def _staleness(data: DataTables, choice: Choice) -> Figure:
    rows = data["staleness"]
    (whole,) = by_group(rows, "all")
    off = whole["off_policy_share"]
    title = f"Samples are {whole['behind']:.2f} versions behind when they are consumed"
    if off is not None:
        title += f"; {share(off)} of their tokens are off-policy"
    steps = sorted({row["step"] for row in rows})
    figure, panels = sheet(
        title,
        f"{choice.text()}: {whole['samples']} samples of {len(steps)} steps",
        size=(11, 8.8),
        panels=(2, 1),
        notes=("In queue: after the last token. While generating: between first and last token.",),
    )
    _distribution(panels[0], [row for row in rows if row["part"] == "versions"], steps)
    groups = makers(rows)
    axes = panels[1]
    series = [
        ("in queue", [row["waited"] for row in groups], MUTED),
        ("while generating", [row["spanned"] for row in groups], ACCENT),
    ]
    bars(axes, [f"{row['what']} ({row['samples']})" for row in groups], series)
    value_axis(axes, "versions behind, mean", of="x")
    legend(axes)
    axes.set_title("By generated tokens, prompt tokens and aborts (samples)")
    return figure


def _distribution(axes: Axes, rows: Rows, steps: list[int]) -> None:
    tokens = {(row["step"], int(row["what"])): row["tokens"] for row in rows}
    totals = {
        step: sum(count for (own, _), count in tokens.items() if own == step) for step in steps
    }
    behind = sorted({versions for _, versions in tokens})
    series = [
        (
            str(versions),
            [tokens.get((step, versions), 0) / max(totals[step], 1) for step in steps],
            tint(place / max(len(behind) - 1, 1)),
        )
        for place, versions in enumerate(behind)
    ]
    step_stack(
        axes,
        steps,
        series,
        "share of tokens",
        "Tokens by versions behind",
        form=percent,
        legend_title="versions behind",
    )


VIEWS = (
    View(
        name="staleness",
        question="How stale are the samples that an asynchronous run trains on?",
        analysis=asking(staleness),
        columns={
            "part": "`all`, `versions` behind, `length`, `prompt_length`, `attempts` or `prompt`: how samples are grouped",
            "what": "the group: versions behind, range of generated or prompt tokens, whether calls were aborted, uid",
            "samples": "samples that the step consumed; of `versions`, by their oldest token",
            "waited": "versions behind of the newest token, mean",
            "spanned": "versions between oldest and newest token, mean",
            "behind": "versions behind of the oldest token, mean",
            "max_behind": "most versions behind",
            "tokens": "generated tokens; of `versions`, by their own version",
            "off_policy_tokens": "tokens of older weights than the trainer's",
            "unknown_tokens": "tokens whose version is not recorded",
            "off_policy_share": "part of the tokens with a known version that is off-policy",
            "logged_waited": "verl's `training/off_policy/trajectory_staleness/mean`",
            "logged_behind": "verl's `training/off_policy/trajectory_staleness_worst/mean`",
        },
        draw=_staleness,
        empty="no asynchronous training with recorded weight versions.",
        section=Section(
            "staleness",
            "Staleness",
            "how many versions of the weights the samples were behind when a step consumed them, by "
            "lengths and aborts; asynchronous runs only",
        ),
        shows="""\
Above, of each step, the generated tokens by how many versions older than the trainer's the weights
were that made them. Below, the mean over the samples' oldest tokens: the part that they waited in
the queue after their last token, and the part between their first and last token.""",
        conclude="""
            - Mostly in queue: too many samples are under way; fewer warm-up batches
              (`num_warmup_batches`) make them younger.
            - Mostly while generating, and more in the longest quartile: long requests outlast steps.
            - More in the quartile of long prompts: their prefill, or longer answers to them.
            - Only `aborted and resumed` spans versions, unless tools or queueing lie between calls.
            - Even the shortest samples are one behind: samples are dispatched a step ahead, which is
              the price of overlapping.
        """,
        limits="""
            The trainer's version is that of its last weight sync. verl's metrics take the global
            step before, which is the same where every step ends with a sync, and larger where one
            does not; verl 0.9's `verl.experimental` trainers do not log them. Versions count syncs of
            weights, not how much the policy changed. A sample of several versions has unknown
            tokens where the engine did not report the version of each attempt.
        """,
    ),
)
