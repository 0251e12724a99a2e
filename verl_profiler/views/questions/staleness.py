"""The view of staleness: how old the samples of an asynchronous run are, and why."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, summed
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.render.charts import Spec, chart, name_bars, panel, step_bars, tint
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import seconds, share
from verl_profiler.views.staleness_text import by_cause, by_group, makers
from verl_profiler.views.view import Choice, DataTables, column, view

_QUEUE = "#B9C2CC"


@view(
    "staleness",
    "How stale are the samples that an asynchronous run trains on?",
    staleness,
    empty="no asynchronous training with recorded weight versions.",
)
def _staleness(data: DataTables, choice: Choice) -> Spec:
    rows = data["staleness"]
    (whole,) = by_group(rows, "all")
    off = whole["off_policy_share"]
    title = f"Samples are {whole['behind']:.2f} weight versions behind when they are consumed"
    if off is not None:
        title += f"; {share(off)} of their tokens are off-policy"
    steps = sorted({row["step"] for row in rows})
    groups = makers(rows)
    made = name_bars(
        [f"{row['what']} ({row['samples']})" for row in groups],
        [
            ("in queue", column(groups, "waited"), _QUEUE),
            ("while generating", column(groups, "spanned"), ACCENT),
        ],
        "versions behind, mean",
    )
    return chart(
        title,
        f"{choice.text()}: {whole['samples']} samples of {len(steps)} steps",
        _distribution([row for row in rows if row["part"] == "versions"], steps),
        panel(made, title="By generated tokens, prompt tokens and aborts (samples)", height=0),
        notes="In queue: after the last token. While generating: between first and last token.",
    )


def _distribution(rows: Rows, steps: list[int]) -> Spec:
    tokens = {(row["step"], int(row["what"])): row["tokens"] for row in rows}
    totals = summed(rows, "tokens", "step")
    behind = sorted({versions for _, versions in tokens})
    bars = step_bars(
        steps,
        [
            (
                f"{versions} behind",
                [tokens.get((step, versions), 0) / max(totals.get(step, 0), 1) for step in steps],
                tint(place / max(len(behind) - 1, 1)),
            )
            for place, versions in enumerate(behind)
        ],
        "share of tokens",
        form="%",
    )
    return panel(bars, title="Tokens by versions behind", height=200)


@view(
    "staleness_causes",
    "What were samples in while they went stale?",
    staleness_causes,
    empty="no asynchronous training with recorded weight versions.",
)
def _causes(data: DataTables, choice: Choice) -> Spec:
    rows = by_cause(data["staleness_causes"])
    samples, behind = rows[0]["samples"], sum(row["behind"] for row in rows)
    most = max(rows, key=lambda row: row["behind"])
    title = f"Samples are {seconds(sum(row['age_s'] for row in rows))} old when they are consumed"
    if behind:
        part = share(most["behind"] / behind)
        title += f"; {part} of the versions behind: {most['cause'].replace('_', ' ')}"
    causes = [row["cause"].replace("_", " ") for row in rows]
    of_versions = name_bars(
        causes, [("", column(rows, "behind"), ACCENT)], "versions behind, mean", legend=False
    )
    of_time = name_bars(
        causes,
        [("", column(rows, "age_s"), MUTED)],
        "time per sample, mean",
        form="s",
        legend=False,
    )
    return chart(
        title,
        f"{choice.text()}: {samples} samples",
        panel(of_versions, title="Versions behind by cause", height=0),
        panel(of_time, title="From dispatch to consumption", height=0),
        notes="Versions count where the sample was when their weight sync began.",
    )
