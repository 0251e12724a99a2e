"""Training phases by tokens, and sampled devices, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.selection import grouped, summed
from verl_profiler.units import added, counted, share
from verl_profiler.views.text_tables import table_text

__all__ = [
    "device_line",
    "device_text",
    "efficiency_text",
]

_Rows = Sequence[Mapping[str, Any]]
# Phases below this share of a run's idle time are left out of the line.
_SMALL, _NAMED = 0.05, 3


def _of_steps(rows: _Rows) -> _Rows:
    """Leave out start-up."""
    return [row for row in rows if row["step"] > 0]


def _idle_s(use: _Rows) -> float | None:
    known = [row["idle_s"] for row in use if row["idle_s"] is not None]
    return sum(known) if known else None


def device_line(rows: _Rows) -> str:
    """Return a run's sampled utilization in a line; empty without samples."""
    known = [row for row in _of_steps(rows) if row["idle_s"] is not None]
    idle = _idle_s(known)
    covered = sum(row["covered_s"] for row in known)
    if idle is None or not covered:
        return ""
    devices = len({(row["host"], row["device"]) for row in known})
    text = f"{counted(devices, 'device')} sampled: idle {share(idle / covered)} of the time"
    ranked = [*summed(known, "idle_s", "phase").items()][:_NAMED]
    named = [f"{phase} {share(spent / idle)}" for phase, spent in ranked if spent >= _SMALL * idle]
    return f"{text} ({', '.join(named)} of that)" if named else text


def device_text(rows: _Rows) -> str:
    """Return a run's sampled devices by phase; empty without samples."""
    rows = _of_steps(rows)
    if not rows:
        return ""
    steps = len({row["step"] for row in rows})
    shown: list[dict[str, Any]] = []
    for phase, own in grouped(rows, "phase").items():
        covered = sum(row["covered_s"] for row in own)
        idle = _idle_s(own)
        joules = added(row["energy_j"] for row in own)
        shown.append(
            {
                "phase": phase,
                "covered_s": covered / steps,
                "busy_share": None if idle is None or not covered else 1 - idle / covered,
                "idle_s": None if idle is None else idle / steps,
                "power_w": joules / covered if joules and covered else None,
                "energy_j": None if joules is None else joules / steps,
            }
        )
    devices = len({(row["host"], row["device"]) for row in rows})
    title = f"device utilization by phase ({counted(devices, 'device')}, all together, per step)"
    return table_text(title, shown, [*shown[0]], "device_use")


def efficiency_text(rows: _Rows) -> str:
    """Return the training phases of a run by tokens; empty without recorded tokens."""
    if not rows:
        return ""
    shown: list[dict[str, Any]] = []
    for phase, own in grouped(rows, "phase").items():
        spent = sum(row["duration_s"] for row in own)
        tokens = sum(row["tokens"] for row in own)
        sequences = sum(row["sequences"] or 0 for row in own)
        utilized = [row for row in own if row["mfu"] is not None]
        weights = sum(row["duration_s"] for row in utilized)
        mfu = sum(row["mfu"] * row["duration_s"] for row in utilized)
        shown.append(
            {
                "phase": phase,
                "duration_s": spent / len(own),
                "tokens": tokens / len(own),
                "mean_length": tokens / sequences if sequences else None,
                "s_per_1k_tokens": spent / tokens * 1000 if tokens else None,
                "tokens_per_s": tokens / spent if spent else None,
                "mfu": mfu / weights if weights else None,
            }
        )
    title = "training phases by tokens (mean per step)"
    return table_text(title, shown, [*shown[0]], "phase_efficiency")
