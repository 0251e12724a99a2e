"""Views of rollouts: how many requests were in flight, and the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail
from verl_profiler.render.axes import percent, step_lines, step_stack, time_unit, value_axis
from verl_profiler.render.colors import ACCENT, PHASE_COLORS
from verl_profiler.render.figure import sheet, tint
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, DataTables, View, asking, column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_PANELS = 6


def _flights(data: DataTables, choice: Choice) -> Figure:
    tails = data["rollout_tail"]
    shown = sorted(tails, key=lambda row: (-row["rollout_s"], row["step"]))[:_PANELS]
    shown.sort(key=lambda row: row["step"])
    worst = max(shown, key=lambda row: row["tail80_s"])
    title = (
        f"The last fifth of the requests takes {share(worst['tail80_share'])} of the rollout"
        f"{'' if len(shown) == 1 else ' in step ' + str(worst['step'])}: {seconds(worst['tail80_s'])} "
        f"of {seconds(worst['rollout_s'])}"
    )
    about = f"{choice.text()}: {sum(row['requests'] for row in tails):,} requests"
    if len(shown) < len(tails):
        about += f"; the {len(shown)} longest rollouts of {len(tails)}"
    notes = [
        "Shaded: after 80 % and after 95 % of the requests were done. Only finished requests.",
        (
            "Idle slots: the part of (most requests in flight at once) times (length of the rollout) in "
            "which no request was in flight."
        ),
    ]
    points = [row for row in data["requests_in_flight"] if row["merged"] > 1]
    if points:
        notes.append(
            "Rollouts with more than 2,000 changes are drawn in 2,000 spans of time, each from its "
            "fewest to its most requests."
        )
    columns = 2 if len(shown) == 4 else min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure, panels = sheet(
        title,
        about,
        size=(10 if columns < 3 else 12, 1.5 + (3.6 if lines == 1 else 2.6 * lines)),
        panels=(lines, columns),
        sharey=True,
        notes=notes,
    )
    longest = max(row["rollout_s"] for row in shown)
    factor, unit = time_unit(longest)
    for axes, tail in zip(panels, shown, strict=False):
        rows = [row for row in data["requests_in_flight"] if row["step"] == tail["step"]]
        at = column(rows, "at_s", factor)
        axes.fill_between(
            at,
            column(rows, "fewest"),
            column(rows, "most"),
            step="post",
            color="#8FBBDD",
            linewidth=0,
        )
        axes.step(at, column(rows, "in_flight"), where="post", color=PHASE_COLORS["gen"])
        end = tail["rollout_s"] * factor
        for name, alpha in (("tail80_s", 0.10), ("tail95_s", 0.18)):
            axes.axvspan(end - tail[name] * factor, end, color=ACCENT, alpha=alpha, linewidth=0)
        axes.set_title(
            f"step {tail['step']}: {tail['requests']:,} requests, "
            f"{share(tail['bubble_share'])} of the slots idle"
        )
        value_axis(axes, f"time since the first request [{unit}]", of="x")
        value_axis(axes, "requests in flight" if axes in panels[::columns] else "")
        axes.set_xlim(0, longest * factor * 1.01)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    return figure


def _tails(data: DataTables, choice: Choice) -> Figure:
    rows = data["rollout_tail"]
    total = sum(row["rollout_s"] for row in rows)
    title = (
        f"{share(sum(row['tail80_s'] for row in rows) / total if total else 0)} of all rollout time "
        "goes to the last 20 % of the requests, "
        f"{share(sum(row['tail95_s'] for row in rows) / total if total else 0)} to the last 5 %"
    )
    about = (
        f"{choice.text()}: {len(rows)} rollouts, {sum(row['requests'] for row in rows):,} requests"
    )
    figure, panels = sheet(
        title,
        about,
        size=(11, 5),
        panels=(1, 2),
        notes=(
            "Idle slots: the part of (most requests in flight at once) times (length of the "
            "rollout) in which no request was in flight. Waiting workers: the part of the workers' "
            "time after their own last request."
        ),
    )
    steps = [row["step"] for row in rows]
    factor, unit = time_unit(max(row["rollout_s"] for row in rows))
    parts = [
        ("the first 80 %", [row["rollout_s"] - row["tail80_s"] for row in rows], 0.1),
        ("80 to 95 %", [row["tail80_s"] - row["tail95_s"] for row in rows], 0.4),
        ("95 to 99 %", [row["tail95_s"] - row["tail99_s"] for row in rows], 0.7),
        ("the last 1 %", [row["tail99_s"] for row in rows], 1.0),
    ]
    step_stack(
        panels[0],
        steps,
        [
            (name, [value * factor for value in values], tint(place))
            for name, values, place in parts
        ],
        f"time [{unit}]",
        "what the rollout waited for",
        legend_title="until done",
    )
    step_lines(
        panels[1],
        [
            (rows, "bubble_share", "idle slots", PHASE_COLORS["gen"]),
            (rows, "idle_share", "waiting workers", ACCENT),
        ],
        steps,
        "share",
        "idle capacity",
        form=percent,
        top=1,
    )
    return figure


_NO_REQUESTS = "no finished request was recorded there."
_BOTH = frozenset({"worker", "validate"})


VIEWS = (
    View(
        name="requests_in_flight",
        question="How many requests were in progress at each moment, and how long was the tail?",
        analysis=asking(requests_in_flight, rollout_tail),
        columns={
            "at_s": "time after the first request of the step started, in s",
            "in_flight": "requests in progress from then on",
            "fewest": "fewest requests in progress until the next row",
            "most": "most requests in progress until the next row",
            "merged": "number of changes that the row stands for",
        },
        draw=_flights,
        empty=_NO_REQUESTS,
        section="rollout",
        shows="""
            The number of requests that have started and not ended. Shaded: after 80 % and after
            95 % of them were done. Of many steps, the six with the longest rollouts.
        """,
        conclude="""
            - A plateau, then a steep fall: the batch fits the engines, and requests are alike.
            - A steep fall, then a long flat tail: a few requests keep everybody waiting; see
              `slowest_requests`.
            - A slow climb at the start: requests are dispatched slowly, or building prompts
              blocks the event loop.
            - A plateau below the batch size: something limits concurrency.
        """,
        limits="""
            Only finished requests: one that never ends is missing. In progress does not mean
            served: `engine_parts` has the queueing. A step with more than 2,000 changes is
            drawn in 2,000 spans of time, each from its fewest to its most requests; the plot
            has a note then.
        """,
        takes=_BOTH,
        example="--steps 5 --worker 2",
    ),
    View(
        name="rollout_tail",
        question="How much of each rollout goes to its last requests?",
        analysis=asking(rollout_tail),
        columns={
            "begin_us": "start of the first request on the run's clock, in µs",
            "rollout_s": "from the start of the first request to the end of the last, in s",
            "tail80_s": "from when 80 % of the requests were done to the end, in s",
            "tail95_s": "the same from 95 %, in s",
            "tail99_s": "the same from 99 %, in s",
            "tail80_share": "tail80_s as part of rollout_s",
            "tail95_share": "tail95_s as part of rollout_s",
            "tail99_share": "tail99_s as part of rollout_s",
            "peak": "most requests in progress at once",
            "bubble_share": "idle part of peak × rollout_s",
            "workers": "number of agent-loop workers",
            "idle_share": "part of the workers' time after their own last request",
            "last_request_id": "id of the request that ended last",
            "last_name": "its worker",
        },
        draw=_tails,
        empty=_NO_REQUESTS,
        section="rollout",
        shows="""
            Left: each rollout, divided where 80, 95 and 99 % of its requests were done. Right:
            idle slots and waiting workers.
        """,
        conclude="""
            - A large dark part: the last 1 % of the requests determine the length of the step.
              Shorter limits on response length or turns, or over-sampling with partial
              rollouts, pay off.
            - Idle slots without waiting workers: every worker has a tail of its own.
            - Waiting workers: the load is not balanced over agent-loop workers; `worker_phases`
              names the slow one.
        """,
        limits="""
            Idle slots refer to the most requests at once, not to the engines' capacity. With
            few requests the last 1 % is the last request. Requests that never end are left out.
        """,
        takes=_BOTH,
        example="--validate",
    ),
)
