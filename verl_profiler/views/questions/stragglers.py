"""View of stragglers: what the others wait for."""

from __future__ import annotations

from verl_profiler.analysis.explain.stragglers import straggler_requests, stragglers
from verl_profiler.render.charts import Spec, chart, name_bars
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import seconds, share
from verl_profiler.views.view import Choice, DataTables, column, view

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
    empty="no waiting was recorded there.",
)
def _stragglers(data: DataTables, choice: Choice) -> Spec:
    rows = data["stragglers"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    worst = [
        max((r for r in rows if r["kind"] == kind), key=lambda r: r["caused_wait_s"])
        for kind in kinds
    ]
    reasons = [row for row in rows if row["kind"] == "request"]
    others = sorted(
        (row for row in worst if row["kind"] != "request"), key=lambda row: -row["per_step_s"]
    )
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
    panels: list[Spec] = []
    for rows_of, title_of, code, names in (
        (reasons, "requests, by reason", ACCENT, [row["who"] for row in reasons]),
        (
            others,
            "the worst of each other kind, per step",
            MUTED,
            [f"{row['kind']}: {row['who']}" for row in others],
        ),
    ):
        if not rows_of:
            continue
        bars = name_bars(
            names,
            [("", column(rows_of, "per_step_s"), code)],
            "caused wait time per step",
            form="s",
            texts=[f"{seconds(row['per_step_s'])}, {share(row['share'])}" for row in rows_of],
            above=title_of,
        )
        panels.append(bars)
    return chart(
        title,
        f"{choice.text()}: {max(row['of_steps'] for row in rows)} steps; wait time, attributed to "
        "what is still running",
        *panels,
        notes="Percent: share of the wait time of its kind.",
    )
