"""Where devices are idle although their phase should keep them busy: device, host or phase."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from verl_profiler.analysis.device_use import device_use
from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Named,
    Place,
    concentration,
    identity,
    places_of,
)
from verl_profiler.analysis.explain.work import Earlier
from verl_profiler.analysis.selection import Rows, by_run, grouped

__all__ = ["COMPUTING", "idle_devices"]

# Phases of the trainer in which all devices compute.
COMPUTING = ("old_log_prob", "ref", "values", "update_critic", "update_actor")


def idle_devices(earlier: Earlier) -> Iterator[Named]:
    """Find the device, host or phase with the idle time of computing phases.

    Lost time is what the average device was idle: that much earlier would the phases end if all were busy.
    """
    rows = [
        row
        for row in device_use(earlier.tables, earlier.steps)
        if row["phase"] in COMPUTING and row["idle_s"] is not None and row["step"] > 0
    ]
    for run, own in by_run(rows).items():
        lost_s = sum(_mean_by_phase(own).values())
        if lost_s:
            yield Named(run, "gpu_idle", _culprit(own), lost_s)


def _mean_by_phase(rows: Rows) -> dict[tuple[int, str], float]:
    """Return the mean idle time of the devices, by step and phase."""
    groups = grouped(rows, "step", "phase").items()
    return {key: fmean(row["idle_s"] for row in own) for key, own in groups}


def _culprit(rows: Rows) -> Culprit:
    several = len({row["host"] for row in rows}) > 1
    rows = [
        {**row, "device": f"{row['device']} on {row['host']}" if several else str(row["device"])}
        for row in rows
    ]
    for kind in ("device", "host"):
        idle: dict[tuple[int, str], dict[str, float]] = {}
        for (step, phase, who), own in grouped(rows, "step", "phase", kind).items():
            idle.setdefault((step, phase), {})[str(who)] = fmean(row["idle_s"] for row in own)
        members = {who for each in idle.values() for who in each}
        # Only what a member is idle beyond the least idle one is its own.
        places = [
            Place(step, {who: lost - min(each.values()) for who, lost in each.items()}, phase)
            for (step, phase), each in idle.items()
            if len(each) == len(members) > 1
        ]
        culprit = concentration(kind, places, len(members), unit="phase", verb="most idle")
        if culprit.who is not None:
            return culprit
    means = _mean_by_phase(rows)
    places = places_of((step, phase, lost) for (step, phase), lost in means.items())
    return identity("phase", places, verb="most idle")
