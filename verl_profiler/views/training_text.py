"""Training phases by tokens, and sampled devices, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.units import counted, rate, seconds, share

__all__ = [
    "device_line",
    "device_text",
    "efficiency_text",
]

_Rows = Sequence[Mapping[str, Any]]
# A phase's growth from the first to the last third of the steps is explained from this share on, with at
# least so many steps.
_GREW, _STEPS = 0.1, 6
# Phases below this share of a run's idle time are left out of the line.
_SMALL, _NAMED = 0.05, 3


def _of_steps(rows: _Rows) -> _Rows:
    """Leave out start-up."""
    return [row for row in rows if row["step"] > 0]


def _idle_s(use: _Rows) -> float | None:
    known = [row["idle_s"] for row in use if row["idle_s"] is not None]
    return sum(known) if known else None


def _by_phase(rows: _Rows) -> dict[str, list[Mapping[str, Any]]]:
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        phases.setdefault(row["phase"], []).append(row)
    return phases


def device_line(rows: _Rows) -> str:
    """Return a run's sampled utilization in a line; empty without samples."""
    known = [row for row in _of_steps(rows) if row["idle_s"] is not None]
    idle = _idle_s(known)
    covered = sum(row["covered_s"] for row in known)
    if idle is None or not covered:
        return ""
    devices = len({(row["host"], row["device"]) for row in known})
    text = f"{counted(devices, 'device')} sampled: idle {share(idle / covered)} of the time"
    sums = {phase: sum(row["idle_s"] for row in own) for phase, own in _by_phase(known).items()}
    ranked = sorted(sums, key=lambda phase: -sums[phase])[:_NAMED]
    named = [
        f"{phase} {share(sums[phase] / idle)}" for phase in ranked if sums[phase] >= _SMALL * idle
    ]
    return f"{text} ({', '.join(named)} of that)" if named else text


def device_text(rows: _Rows) -> str:
    """Return a run's sampled devices by phase; empty without samples."""
    rows = _of_steps(rows)
    if not rows:
        return ""
    steps = len({row["step"] for row in rows})
    lines = [["", "device time", "utilization", "idle", "power", "energy"]]
    for phase, own in _by_phase(rows).items():
        covered = sum(row["covered_s"] for row in own)
        idle = _idle_s(own)
        watts = [row["energy_j"] for row in own if row["energy_j"] is not None]
        line = [
            phase,
            seconds(covered / steps),
            "-" if idle is None else share(1 - idle / covered) if covered else "-",
            "-" if idle is None else seconds(idle / steps),
            f"{rate(sum(watts) / covered)} W" if watts and covered else "-",
            f"{rate(sum(watts) / steps)} J" if watts else "-",
        ]
        lines.append(line)
    devices = len({(row["host"], row["device"]) for row in rows})
    title = f"device utilization by phase ({counted(devices, 'device')}, all together, per step)"
    return f"{title}\n{align(lines, left=(0,))}"


def efficiency_text(rows: _Rows) -> str:
    """Return the training phases of a run by tokens; empty without recorded tokens."""
    if not rows:
        return ""
    lines = [["", "time", "tokens", "per sequence", "per 1,000 tokens", "tokens/s", "MFU"]]
    sentences: list[str] = []
    for phase, own in _by_phase(rows).items():
        spent = sum(row["duration_s"] for row in own)
        tokens = sum(row["tokens"] for row in own)
        sequences = sum(row["sequences"] or 0 for row in own)
        utilized = [row for row in own if row["mfu"] is not None]
        mfu = sum(row["mfu"] * row["duration_s"] for row in utilized) / (
            sum(row["duration_s"] for row in utilized) or 1
        )
        lines.append(
            [
                phase,
                seconds(spent / len(own)),
                rate(tokens / len(own)),
                rate(tokens / sequences) if sequences else "-",
                seconds(spent / tokens * 1000) if tokens else "-",
                rate(tokens / spent) if spent else "-",
                share(mfu) if utilized else "-",
            ]
        )
        sentences += _growth(phase, own)
    title = "training phases by tokens (mean per step)"
    return "\n".join([title, align(lines, left=(0,)), *(f"  {each}" for each in sentences)])


def _growth(phase: str, rows: _Rows) -> list[str]:
    """Return whether a phase that grew became slower, or its sequences longer."""
    rows = [row for row in rows if row["tokens"]]
    if len(rows) < _STEPS:
        return []
    third = len(rows) // 3
    first, last = rows[:third], rows[-third:]

    def change(key: str) -> float:
        before, after = (sum(row[key] for row in part) / third for part in (first, last))
        return after / before - 1 if before else 0.0

    time, tokens, pace = change("duration_s"), change("tokens"), change("s_per_1k_tokens")
    if time < _GREW:
        return []
    reason = "more tokens, not a slower phase" if pace < time / 2 else "a slower phase"
    if pace >= time / 2 and tokens >= time / 4:
        reason += ", and more tokens"
    text = (
        f"{phase} grew by {share(time)} from the first to the last third of the steps: {reason} "
        f"(tokens {_signed(tokens)}, time per token {_signed(pace)})"
    )
    return [text]


def _signed(value: float) -> str:
    return share(value) if value < 0 else f"+{share(value)}"
