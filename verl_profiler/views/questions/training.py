"""The view of the trainer's phases by tokens: slower, or longer sequences."""

from __future__ import annotations

from verl_profiler.analysis.phase_efficiency import phase_efficiency
from verl_profiler.analysis.selection import grouped, summed
from verl_profiler.render.charts import Spec, chart, panel, step_lines
from verl_profiler.render.colors import color
from verl_profiler.units import counted, seconds
from verl_profiler.views.view import Choice, DataTables, known, view


@view(
    "phase_efficiency",
    "Did a phase of the trainer become slower, or its sequences longer?",
    phase_efficiency,
    empty="no batches with tokens were recorded there. Sequences must not be padded "
    "(verl's nested tensors), and profiler.events.exclude must not have workers.",
)
def _efficiency(data: DataTables, choice: Choice) -> Spec:
    rows = data["phase_efficiency"]
    steps = sorted({row["step"] for row in rows})
    phases = grouped(rows, "phase")
    spent = summed(rows, "duration_s", "phase")
    longest = next(iter(spent))
    tokens = sum(row["tokens"] for row in phases[longest])
    title = f"{longest} takes {seconds(spent[longest] / tokens * 1000)} per 1,000 tokens"
    shown = (
        ("s_per_1k_tokens", "time per 1,000 tokens", "s"),
        ("mean_length", "tokens per sequence", ""),
        ("mfu", "MFU", "%"),
    )
    panels: list[Spec] = []
    for key, label, form in shown:
        lines = [(phase, own, key, color(phase)) for phase, own in phases.items()]
        if known(rows, key):
            panels.append(panel(step_lines(steps, lines, label, form=form), height=150))
    return chart(
        title,
        f"{choice.text()}: {counted(len(steps), 'step')}",
        *panels,
        notes="Time of the trainer's phase, by the tokens of its workers' batches, padding left out.",
    )
