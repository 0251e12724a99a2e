"""Views of rollouts and workers: the tail, idle capacity, and who waited for whom."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, grouped, summed
from verl_profiler.analysis.workers import most_waited, worker_balance, worker_phases
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    layer,
    name_bars,
    names,
    panel,
    ramp,
    steps_axis,
)
from verl_profiler.render.colors import GRID, color
from verl_profiler.units import counted, seconds
from verl_profiler.views.view import Choice, DataTables, NothingToDraw, view

# Phases with less waiting than this part of the most are named, not drawn.
_LITTLE = 0.05
_PANELS = 3
# Phases of a role, and roles, with less of the time than this part are not drawn in one step.
_NOTHING = 0.001
_WAITED = "waited"
# Of a heat map.
_ROWS = 64
_COLUMNS = 100


@view(
    "worker_phases",
    "Which worker was the slowest in each phase, and how long did the others wait for it?",
    worker_phases,
    worker_balance,
    empty="no agent-loop worker or rank was recorded there.",
    example="--steps 7",
)
def _workers(data: DataTables, choice: Choice) -> Spec:
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
    worst = most_waited(shared)
    if not worst["waited_s"]:
        return "All processes of a role were done at the same time: none waited for another"
    name, phase, waited = worst["name"], worst["phase"], seconds(worst["waited_s"])
    others = worst["processes"] - 1
    who = "the other" if others == 1 else f"the {others} others together"
    if worst["steps"] == 1:
        step = f" of step {worst['step']}" if steps > 1 else ""
        return f"{name} was the slowest at {phase}{step}: {who} waited {waited} for it"
    slowest = f"{name} was the slowest at {phase} in {worst['times']} of {worst['steps']} steps"
    if worst["times"] == 1:
        slowest = f"Another worker was the slowest at {phase} in each of {worst['steps']} steps"
    return f"{slowest}; {who} waited {waited} per step for the slowest"


def _workers_of_step(rows: Rows, title: str, choice: Choice) -> Spec:
    shared = {row["role"] for row in rows if row["waited_s"] > 0}
    rows = [row for row in rows if row["role"] in shared] or rows
    lengths = summed(rows, "duration_s", "role")
    least_s = _NOTHING * max(lengths.values())
    rows = [row for row in rows if lengths[row["role"]] >= least_s]
    roles = grouped(rows, "role")
    panels: list[Spec] = []
    for role in sorted(roles, key=lambda role: (role != "agent_loop", role)):
        mine = roles[role]
        processes = sorted({row["name"] for row in mine}, key=_by_number)
        phases = sorted({row["phase"] for row in mine}, key=_by_order)
        times = {(row["name"], row["phase"]): row["duration_s"] for row in mine}
        waited = summed(mine, "waited_s", "name")
        waits = [waited[name] for name in processes]
        total = sum(times.values())
        series: list[Series] = [
            (phase, [times.get((name, phase), 0) for name in processes], color(phase))
            for phase in phases
            if sum(times.get((name, phase), 0) for name in processes) > _NOTHING * total
        ]
        series.append((_WAITED, waits, GRID))
        texts = [
            f"waited {seconds(wait)}" if wait > 0.0005 else "waited for none" for wait in waits
        ]
        panels.append(name_bars(processes, series, "time", above=role, texts=texts))
    return chart(
        title,
        f"{choice.text()}: {counted(len({row['name'] for row in rows}), 'process', 'processes')}",
        *panels,
        notes=(
            "Waited: how much sooner it finished than the slowest process of the role, phase by "
            "phase; it waits that long if the next phase needs all processes."
        ),
    )


def _workers_over_steps(rows: Rows, balance: Rows, title: str, choice: Choice) -> Spec:
    shared = (row for row in balance if row["processes"] > 1)
    waits = summed(shared, "waited_s", "role", "phase")
    order = sorted((key for key in waits if waits[key]), key=lambda key: (-waits[key], key))
    if not order:
        raise NothingToDraw(
            f"{choice.text()}: no process waited for another of its role in any phase."
        )
    chosen = [key for key in order[:_PANELS] if waits[key] >= _LITTLE * waits[order[0]]]
    phases = grouped(rows, "role", "phase")
    count = len({row["step"] for row in rows})
    rest = [
        f"{phase} of {role} ({seconds(waits[role, phase] / count)} per step)"
        for role, phase in order[len(chosen) :]
    ]
    return chart(
        title,
        f"{choice.text()}: {count} steps; waiting by phase, the most first",
        *[_heat(phases[key], *key) for key in chosen],
        notes=[
            (
                "Strong: the others waited for this process. Faint: it finished first and waited the "
                "longest. Gray: not recorded. The latest process is on top."
            ),
            *([f"Not drawn, less waiting: {', '.join(rest)}."] if rest else []),
        ],
    )


def _heat(rows: Rows, role: str, phase: str) -> Spec:
    """Draw how much later than the first each process finished, the latest process on top.

    Of many processes the latest are drawn, and of many steps neighbors share a column, which has the
    latest of them.
    """
    steps = sorted({row["step"] for row in rows})
    most = max(row["waited_s"] for row in rows) or 0.001
    each = -(-(steps[-1] - steps[0] + 1) // _COLUMNS)
    cells: Rows = []
    for own in grouped(rows, "step").values():
        first = max(row["waited_s"] for row in own)
        for row in own:
            start = steps[0] + (row["step"] - steps[0]) // each * each - 0.5
            cells.append(
                {"process": row["name"], "step": row["step"], "later": first - row["waited_s"]}
                | {"from": start, "to": min(start + each, steps[-1] + 0.5)}
            )
    sums = summed(cells, "later", "process")
    processes = sorted(sums, key=lambda name: (-sums[name], _by_number(name)))[:_ROWS]
    drawn = [
        max(own, key=lambda cell: cell["later"])
        for (name, _), own in grouped(cells, "process", "from").items()
        if name in processes
    ]
    cut = "" if len(sums) == len(processes) else f", the {_ROWS} latest of {len(sums)}"
    if each > 1:
        cut += f"; the latest of {each} steps in a column"
    map_ = layer(
        drawn,
        "rect",
        tip=("process", "step", "later"),
        x=steps_axis(steps, "from", room=0.5),
        x2={"field": "to"},
        y=names("process", processes),
        color=ramp("later", "later by", most),
    )
    title = f"{phase} of {role}: how much later than the first to finish{cut}"
    return {**panel(map_, title=title), "view": {"fill": GRID, "stroke": None}}


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
