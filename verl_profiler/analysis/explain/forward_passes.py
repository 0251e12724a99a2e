"""Phases that take longer than a forward pass should, compared with the update that has a backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

# A forward pass alone, and the phase that has a backward pass, too.
FORWARD = {"old_log_prob": "update_actor", "ref": "update_actor", "values": "update_critic"}
# Without and with backward pass: a third; not as long as this part of it.
_USUAL, _LONG = 1 / 3, 0.6


def forward_losses(
    spent: Mapping[str, Mapping[int, float]],
) -> dict[str, dict[int, float]]:
    """Return what phases without a backward pass take beyond the usual part of their update.

    Args:
        spent: Seconds by phase and step.

    Returns:
        Seconds by phase and step, of the phases that take much longer than usual.
    """
    found: dict[str, dict[int, float]] = {}
    for phase, update in FORWARD.items():
        own, whole = spent.get(phase, {}), spent.get(update, {})
        steps = [step for step in own if whole.get(step)]
        if steps and median(own[step] / whole[step] for step in steps) >= _LONG:
            found[phase] = {step: max(own[step] - _USUAL * whole[step], 0.0) for step in steps}
    return found
