"""The view of rollouts: the tail, and idle capacity."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from verl_profiler.analysis.rollout import rollout_tail
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    panel,
    step_bars,
    step_lines,
    time_unit,
    tint,
)
from verl_profiler.render.colors import ACCENT, PHASE_COLORS
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking, column, known

__all__ = ["TABLES", "VIEWS"]


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
    factor, unit = time_unit(max(row["rollout_s"] for row in rows))
    rests = [column(rows, key, factor) for key in ("rollout_s", *(f"tail{n}_s" for n in levels))]
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
            step_bars(steps, series, f"time [{unit}]"),
            title="time until these requests were done",
            height=220,
        ),
        panel(idle, title="idle capacity", height=150),
        notes=notes,
    )


VIEWS = (
    View(
        name="rollout_tail",
        question="How much of each rollout goes to its last requests?",
        analysis=asking(rollout_tail),
        columns=common("run step rollout_s")
        | {
            "requests": "number of finished requests",
            "begin_us": "start of the first request on the run's clock, in µs",
            "tail80_s": (
                "from the time when 80 % of the requests had finished to the end, in s; empty for "
                "too few"
            ),
            "tail95_s": "the same from 95 %, in s",
            "tail99_s": "the same from 99 %, in s",
            "tail80_share": "tail80_s as part of rollout_s",
            "tail95_share": "tail95_s as part of rollout_s",
            "tail99_share": "tail99_s as part of rollout_s",
            "peak": "most requests in progress at once",
            "bubble_share": "idle part of peak × rollout_s: 0 if all requests end together",
            "workers": "number of agent-loop workers",
            "idle_share": "part of the workers' time after their own last request",
            "last_request_id": "id of the request that finished last",
            "last_name": "its worker",
        },
        chart=_tails,
        empty="no finished request of synchronous training was recorded there. Asynchronous training: bubble_ledger.",
        section="rollout",
        shows="""
            Left: each rollout, divided at the times when 80, 95 and 99 % of its requests had finished. Right:
            idle slots and waiting workers.
        """,
        conclude="""
            - A large dark part: the last 1 % of the requests determine the length of the step.
              Shorter limits on response length or turns, or over-sampling with partial rollouts,
              help.
            - Idle slots without waiting workers: each worker has its own tail.
            - Waiting workers: the load is not balanced over agent-loop workers; `worker_phases`
              names the slow one.
        """,
        limits="""
            Idle slots refer to the most requests at once, not to the engines' capacity. The last
            1 % needs 100 requests in each rollout, the last 5 % 20 and the last 20 % 5. Requests
            that never end are left out.
        """,
        takes=frozenset({"worker", "validate"}),
        example="--validate",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "requests_in_flight": common("run step")
    | {
        "at_s": "time, in s after the start of the step's first request",
        "in_flight": (
            "requests in progress from then on; in a step that is cut into spans of time, at the "
            "end of the span"
        ),
        "fewest": "fewest requests in progress in the span, otherwise in_flight",
        "most": "most requests in progress in the span, otherwise in_flight; no peak is lost",
        "merged": "number of starts and ends that the row stands for; 1 without spans",
    },
    "step_tail": common("run step")
    | {
        "requests": "number of finished training requests",
        "after_p80_s": (
            "from the time when 80 % of the requests had finished to the end, in s; empty for too "
            "few"
        ),
        "after_p95_s": "the same from 95 %, in s",
        "after_p99_s": "the same from 99 %, in s",
        "spread_s": "from the start of the first request to the end of the last, in s",
        "poll_s": (
            "from the end of the last request to the end of `gen`, in s (verl's replay buffer "
            "polls every 2 s); empty if `gen` was not recorded"
        ),
    },
}
