"""The view of workers: which was the slowest at what, and who waited for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.workers import worker_balance, worker_phases
from verl_profiler.render.axes import legend, step_axis, time_unit
from verl_profiler.render.bars import bar_texts, bars
from verl_profiler.render.colors import color
from verl_profiler.render.figure import colorbar, colormap, sheet, short
from verl_profiler.units import seconds
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, NothingToDraw, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLES", "VIEWS"]

# Phases with less waiting than this part of the most are named, not drawn.
_LITTLE = 0.05
_PANELS = 3


def _workers(data: DataTables, choice: Choice) -> Figure:
    rows = [row for row in data["worker_phases"] if row["step"]] or data["worker_phases"]
    steps = sorted({row["step"] for row in rows})
    # The barrier of the original logger is itself waiting: who spends most there waits most.
    balance = [
        row
        for row in data["worker_balance"]
        if row["step"] in set(steps) and row["phase"] != "barrier_wait"
    ]
    title = _worker_title(balance, len(steps))
    if len(steps) == 1:
        return _workers_of_step(rows, title, choice)
    return _workers_over_steps(rows, balance, title, choice)


def _worker_title(balance: Rows, steps: int) -> str:
    shared = [row for row in balance if row["processes"] > 1]
    if not shared:
        return "One process per role: none waits for another"
    waits: dict[tuple[str, str], float] = {}
    for row in shared:
        key = row["role"], row["phase"]
        waits[key] = waits.get(key, 0.0) + row["waited_s"]
    if not any(waits.values()):
        return "All processes of a role were done at the same time: none waited for another"
    role, phase = max(waits, key=lambda key: (waits[key], key))
    same = [row for row in shared if (row["role"], row["phase"]) == (role, phase)]
    names = [row["slowest"] for row in same]
    most = max(sorted(set(names)), key=names.count)
    others = max(row["processes"] for row in same) - 1
    waited = sum(row["waited_s"] for row in same) / len(same)
    who = "the other" if others == 1 else f"the {others} others together"
    if steps == 1:
        return f"{most} was the slowest at {phase}: {who} waited {seconds(waited)} for it"
    return (
        f"{most} was the slowest at {phase} in {names.count(most)} of {len(same)} steps; "
        f"{who} waited {seconds(waited)} per step for the slowest"
    )


def _workers_of_step(rows: Rows, title: str, choice: Choice) -> Figure:
    shared = {row["role"] for row in rows if row["waited_s"] > 0}
    rows = [row for row in rows if row["role"] in shared] or rows
    roles = sorted({row["role"] for row in rows}, key=lambda role: (role != "agent_loop", role))
    names = {
        role: sorted({r["name"] for r in rows if r["role"] == role}, key=_by_number)
        for role in roles
    }
    figure, panels = sheet(
        title,
        f"{choice.text()}: {sum(len(each) for each in names.values())} processes",
        size=(10.5, 1.7 + sum(0.75 + 0.26 * len(names[role]) for role in roles)),
        panels=(len(roles), 1),
        height_ratios=[len(names[role]) + 1.6 for role in roles],
        notes=(
            "Hatched: how much sooner it finished than the slowest process of the role, phase by "
            "phase; it waits that long if the next phase needs all processes."
        ),
    )
    for axes, role in zip(panels, roles, strict=True):
        mine = [row for row in rows if row["role"] == role]
        phases = sorted({row["phase"] for row in mine}, key=_by_order)
        value = {(row["name"], row["phase"]): row for row in mine}
        zero = {"duration_s": 0.0, "waited_s": 0.0}
        ends = [
            sum(value.get((name, phase), zero)["duration_s"] for phase in phases)
            for name in names[role]
        ]
        waits = [
            sum(value.get((name, phase), zero)["waited_s"] for phase in phases)
            for name in names[role]
        ]
        factor, unit = time_unit(max(end + wait for end, wait in zip(ends, waits, strict=True)))
        series = [
            (
                phase,
                [value.get((name, phase), zero)["duration_s"] * factor for name in names[role]],
                color(phase),
            )
            for phase in phases
            if sum(row["duration_s"] for row in mine if row["phase"] == phase) > 0.001 * sum(ends)
        ]
        series.append(("waited", [wait * factor for wait in waits], "#F4F4F4"))
        lengths = bars(
            axes, [short(name, 20) for name in names[role]], series, hatched={"waited": "////"}
        )
        texts = [
            f"waited {seconds(wait)}" if wait > 0.0005 else "waited for none" for wait in waits
        ]
        bar_texts(axes, lengths, texts, f"time [{unit}]", room=1.2)
        legend(axes)
        axes.set_title(role)
    return figure


def _workers_over_steps(rows: Rows, balance: Rows, title: str, choice: Choice) -> Figure:
    waits: dict[tuple[str, str], float] = {}
    for row in balance:
        if row["processes"] > 1:
            key = row["role"], row["phase"]
            waits[key] = waits.get(key, 0.0) + row["waited_s"]
    order = sorted((key for key in waits if waits[key]), key=lambda key: (-waits[key], key))
    if not order:
        raise NothingToDraw(
            f"{choice.text()}: no process waited for another of its role in any phase."
        )
    chosen = [key for key in order[:_PANELS] if waits[key] >= _LITTLE * waits[order[0]]]
    count = len({row["step"] for row in rows})
    rest = [
        f"{phase} of {role} ({seconds(waits[role, phase] / count)} per step)"
        for role, phase in order[len(chosen) :]
    ]
    names = {
        key: sorted({r["name"] for r in rows if (r["role"], r["phase"]) == key}, key=_by_number)
        for key in chosen
    }
    figure, panels = sheet(
        title,
        f"{choice.text()}: {count} steps; waiting by phase, the most first",
        size=(11, 1.5 + sum(1.0 + min(0.22 * len(names[key]), 3.0) for key in chosen)),
        panels=(len(chosen), 1),
        height_ratios=[min(len(names[key]), 14) + 3 for key in chosen],
        notes=[
            (
                "Dark: the others waited for this process. White: it finished first and waited the "
                "longest. Gray: not recorded."
            ),
            *([f"Not drawn, less waiting: {', '.join(rest)}."] if rest else []),
        ],
    )
    for axes, key in zip(panels, chosen, strict=True):
        mine = [row for row in rows if (row["role"], row["phase"]) == key]
        steps = sorted({row["step"] for row in mine})
        first, last = steps[0], steps[-1]
        most = max((row["waited_s"] for row in mine), default=0.0) or 0.001
        factor, unit = time_unit(most)
        places = {name: place for place, name in enumerate(names[key])}
        nothing = float("nan")
        cells = [[nothing] * (last - first + 1) for _ in places]
        fastest = {
            step: max(row["waited_s"] for row in mine if row["step"] == step) for step in steps
        }
        for row in mine:
            ahead = fastest[row["step"]] - row["waited_s"]
            cells[places[row["name"]]][row["step"] - first] = ahead * factor
        scale = colorbar(
            figure,
            axes,
            (0, most * factor),
            f"later by [{unit}]",
            white=True,
            pad=0.01,
            aspect=12,
            bins=4,
        )
        axes.imshow(
            cells,
            aspect="auto",
            cmap=colormap(white=True),
            norm=scale,
            interpolation="nearest",
            extent=(first - 0.5, last + 0.5, len(places) - 0.5, -0.5),
        )
        axes.set_facecolor("#E4E4E4")
        axes.grid(visible=False)
        listed = names[key] if len(names[key]) <= 16 else names[key][:: len(names[key]) // 16 + 1]
        axes.set_yticks([places[name] for name in listed], [short(name, 18) for name in listed])
        step_axis(axes, steps)
        axes.set_xlim(first - 0.5, last + 0.5)
        axes.set_title(f"{key[1]} of {key[0]}: how much later than the first to finish")
    return figure


# The order in which a step runs them.
_ORDER = (
    "rollout",
    "memory_release",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "update_critic",
    "update_actor",
    "update_weights",
    "memory_resume",
)


def _by_order(phase: str) -> tuple[int, str]:
    return (_ORDER.index(phase) if phase in _ORDER else len(_ORDER), phase)


def _by_number(name: str) -> tuple[str, int, str]:
    """Order names as people count: worker_2 before worker_10."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number), "") if number.isdecimal() else (name, -1, name)


VIEWS = (
    View(
        name="worker_phases",
        question="Which worker was the slowest in each phase, and how long did the others wait for it?",
        analysis=asking(worker_phases, worker_balance),
        columns=common("run step role name")
        | {
            "phase": (
                "what it did; of agent-loop workers `rollout`, from the step's first request to "
                "the worker's last end"
            ),
            "duration_s": "time spent on it, in s",
            "waited_s": (
                "how much sooner than the slowest process of the role it finished, piece by piece, "
                "in s: what it waits if the next piece needs all"
            ),
            "slowest": "whether it waits least of its role; one process per phase",
        },
        draw=_workers,
        empty="no agent-loop worker or rank was recorded there.",
        section="workers",
        shows="""
            Of one step: a bar per process, phase by phase; hatched, how much sooner it finished
            than the slowest. Of several steps: a grid of processes and steps for up to three phases
            with the most waiting (the other phases are named below); dark is the process that the
            others waited for. The phase `rollout` lasts from the step's first request to the end of
            the worker's last one; ranks have their outermost intervals.
        """,
        conclude="""
            - One dark row: the same process is always last. Compare its prompts, its GPU and its node
              with the others'.
            - Dark cells all over: the slow process differs between steps.
            - Ranks differ at `update_actor`: compare their tokens.
            - All ranks take equally long: a slow one cannot be seen, since collectives make the others
              wait.
        """,
        limits="""
            Waiting is not recorded but computed from the end times. It delays the step only if the
            next phase needs all processes. Work inside a collective takes as long as its
            slowest participant on every rank. In files of the original logger the phases
            include `barrier_wait`.
        """,
        example="--steps 7",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "worker_balance": common("run step role processes")
    | {
        "phase": "what they did; of agent-loop workers `rollout`",
        "slowest": "process that the others wait for most",
        "slowest_s": "time of the slowest process at each piece of work, summed, in s",
        "median_s": "time of the median process at each piece, summed, in s",
        "fastest_s": "time of the fastest process at each piece, summed, in s",
        "waited_s": "what all others together wait for the slowest, in s",
        "waited_share": "waited_s as part of the time of all processes until the slowest was done",
    },
    "rank_balance": common("run step role event")
    | {
        "ranks": "number of ranks",
        "slowest": "process that the others wait for most",
        "slowest_s": "time of the slowest rank at each piece of work, summed, in s",
        "median_s": "time of the median rank at each piece, summed, in s",
        "fastest_s": "time of the fastest rank at each piece, summed, in s",
        "waste_s": "what all ranks together wait for the slowest, if they wait, in s",
    },
    "rollout_balance": common("run step requests")
    | {
        "name": "agent-loop worker",
        "busy_s": "from the start of the step's first request to the worker's last end, in s",
        "mean_s": "mean duration of its requests, in s",
        "behind_s": "how much longer than the median worker, in s",
    },
}
