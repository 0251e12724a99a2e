"""Views of an asynchronous run: how stale its samples are."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, summed
from verl_profiler.analysis.staleness import staleness
from verl_profiler.render.charts import Spec, chart, panel, step_bars, tint
from verl_profiler.units import counted, share
from verl_profiler.views.staleness_text import by_group
from verl_profiler.views.view import Choice, DataTables, view


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
    return chart(
        title,
        f"{choice.text()}: {counted(whole['samples'], 'sample')} of {counted(len(steps), 'step')}",
        _distribution([row for row in rows if row["part"] == "versions"], steps),
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
    return panel(bars, title="tokens by versions behind", height=200)
