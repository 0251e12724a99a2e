"""The view of rollouts: the tail, and idle capacity."""

from __future__ import annotations

from itertools import pairwise

from verl_profiler.analysis.rollout import rollout_tail
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    panel,
    step_bars,
    step_lines,
    tint,
)
from verl_profiler.render.colors import ACCENT, PHASE_COLORS
from verl_profiler.units import seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, view


@view(
    "rollout_tail",
    "How much of each rollout goes to its last requests?",
    rollout_tail,
    empty="no finished request of synchronous training was recorded there. Asynchronous training: bubble_ledger.",
    example="--validate",
)
def _tails(data: DataTables, choice: Choice) -> Spec:
    rows = data["rollout_tail"]
    total = sum(row["rollout_s"] for row in rows)
    levels = [level for level in (80, 95, 99) if len(known(rows, f"tail{level}_s")) == len(rows)]
    shares = {level: sum(column(rows, f"tail{level}_s")) / (total or 1) for level in levels}
    title = ", ".join(
        f"{share(shares[level])} of all rollout time goes to the last {100 - level} % of the requests"
        if level == 80
        else f"{share(shares[level])} to the last {100 - level} %"
        for level in levels[:2]
    )
    about = (
        f"{choice.text()}: {len(rows)} rollouts, {sum(row['requests'] for row in rows):,} requests"
    )
    notes = [
        (
            "Idle slots: share of (peak requests in flight) × (rollout time) without a request. "
            "Waiting workers: share of the workers' time after their own last request."
        )
    ]
    few = [f"{100 - level} %" for level in (80, 95, 99) if level not in levels]
    if few:
        notes.append(f"Too few requests in a rollout for the last {' and '.join(few)}.")
    steps = [row["step"] for row in rows]
    rests = [column(rows, key) for key in ("rollout_s", *(f"tail{n}_s" for n in levels))]
    rests.append([0.0] * len(rows))
    names = [f"{low} to {high} %" for low, high in pairwise([0, *levels])]
    names.append(f"the last {100 - levels[-1]} %" if levels else "all requests")
    series: list[Series] = [
        (name, [a - b for a, b in zip(before, after, strict=True)], tint(0.1 + 0.3 * place))
        for place, (name, (before, after)) in enumerate(zip(names, pairwise(rests), strict=True))
    ]
    idle = step_lines(
        steps,
        [
            ("idle slots", rows, "bubble_share", PHASE_COLORS["gen"]),
            ("waiting workers", rows, "idle_share", ACCENT),
        ],
        "share",
        form="%",
        ends=(0, 1),
    )
    return chart(
        title or f"The rollouts took {seconds(total)}",
        about,
        panel(
            step_bars(steps, series, "time", form="s"),
            title="time until these requests were done",
            height=220,
        ),
        panel(idle, title="idle capacity", height=150),
        notes=notes,
    )
