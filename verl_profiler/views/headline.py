"""How a summary begins, of a run and of a log: how long its steps took, and the phases of a mean one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_profiler.render.text import align
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.text_tables import Rows

# Phases below this share of the steps are combined into one line.
_SMALL = 0.02
# The time from step to step is shown where it is longer than the steps by this share.
_BETWEEN = 0.03


def steps_text(
    name: str, lengths: Mapping[int, float], left_out: Sequence[int], apart_s: float = 0.0
) -> str:
    """Return how long the steps took, in a line.

    Args:
        name: Of the run or log.
        lengths: Seconds of each finished step.
        left_out: The steps that means leave out.
        apart_s: The mean time from the start of a step to the start of the next; 0 where it is not known.
    """
    text = f"{name}: {counted(len(lengths), 'step')}, {seconds(sum(lengths.values()))}"
    if len(lengths) < 2:
        return text
    kept = {step: each for step, each in lengths.items() if step not in left_out} or lengths
    mean_s = sum(kept.values()) / len(kept)
    longest = max(kept, key=lambda step: kept[step])
    text += (
        f"; mean {seconds(mean_s)}, {seconds(min(kept.values()))} to {seconds(kept[longest])} "
        f"(step {longest})"
    )
    if apart_s > (1 + _BETWEEN) * mean_s:
        text += f"; {seconds(apart_s)} from step to step"
    return text + "".join(
        f"; means without step {step} ({seconds(lengths[step])})"
        for step in left_out
        if step in lengths
    )


def phase_lines(
    rows: Rows, *, several: bool, count: int | None = None, whole: bool = False
) -> list[str]:
    """Return the lines of a table of the largest phases, and the sum of the others.

    Args:
        rows: Of `phase_totals`.
        several: They are means over several steps.
        count: So many lines of phases; None for all.
        whole: Small ones have lines, too.
    """
    if not rows:
        return []
    large = [row for row in rows if whole or (row["share"] or 0) >= _SMALL][:count]
    small = [row for row in rows if row not in large and row["mean_s"]]
    lines = [["phase", "mean" if several else "time", "share", *(["longest"] if several else [])]]
    lines += [
        [
            row["phase"],
            seconds(row["mean_s"]),
            share(row["share"]),
            *([f"{seconds(row['max_s'])} (step {row['max_step']})"] if several else []),
        ]
        for row in large
    ]
    if small:
        total = sum(row["mean_s"] for row in small)
        names = ", ".join(row["phase"].partition(" (")[0] for row in small[:4])
        names += ", …" * (len(small) > 4)
        lines.append([names, seconds(total), share(sum(row["share"] or 0 for row in small))])
    return align(lines, left=(0, 3), indent="").split("\n")
