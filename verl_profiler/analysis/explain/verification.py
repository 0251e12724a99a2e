"""Check whether a change achieved the gain that a finding predicted."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from verl_profiler.analysis.intervals import LEAST_STEPS, mean_difference
from verl_profiler.analysis.selection import Rows

# Requests per step must match before and after for steps to be comparable; the tolerance.
_ALIKE = 0.05
# Minimum share of the predicted gain for the verdict `kept`.
_KEPT = 0.5


def verified(
    predicted: Mapping[str, Any], before: Rows, after: Rows, remaining_s: float | None
) -> dict[str, Any]:
    """Compare a finding's prediction with the measurements of a changed run.

    Args:
        predicted: The finding: a row of `findings`.
        before: Rows of `step_times` of the run with the finding, without warm-up.
        after: Those of the changed run.
        remaining_s: Recoverable time of the same finding in the changed run; None without it.

    Returns:
        finding, culprit_text, verdict (`kept`, `not kept` or `undecided`), reason, predicted_s, low_s and
        high_s (of the prediction; None if it has no interval), measured_s (before minus after, per
        step), measured_low_s and measured_high_s (95 %; None with too few steps), miss_s (measured minus
        predicted), remaining_s, steps_before and steps_after (how many), before_s and after_s (means),
        work_changes (by name: the change as a share).
    """
    column = "to_next_s" if predicted["between"] else "duration_s"
    first, second = (
        {row["step"]: row[column] for row in rows if row[column] is not None}
        for rows in (before, after)
    )
    change = mean_difference(first, second)
    gain = fmean(first.values()) - fmean(second.values())
    low, high = (None, None) if change is None else change.interval()
    wanted = _KEPT * predicted["recoverable_s"]
    requests = [fmean(row["requests"] for row in rows) for rows in (before, after)]
    more = requests[1] / requests[0] - 1 if all(requests) else 0.0
    work = {"requests": more} if abs(more) > _ALIKE else {}
    if low is None or high is None:
        verdict = "undecided"
        reason = f"an interval needs {LEAST_STEPS} steps of each run after the warm-up"
    elif work:
        verdict, reason = "undecided", "the two runs do different amounts of work"
    elif -high >= wanted:
        verdict, reason = "kept", "at least half of the predicted gain was achieved, beyond noise"
    elif -low < wanted:
        verdict, reason = "not kept", "the gain is less than half of the prediction, beyond noise"
    else:
        verdict, reason = "undecided", "the steps vary too much; compare more of them"
    return {
        "finding": predicted["finding"],
        "culprit_text": predicted["culprit_text"],
        "verdict": verdict,
        "reason": reason,
        "predicted_s": predicted["recoverable_s"],
        "low_s": predicted["low_s"],
        "high_s": predicted["high_s"],
        "measured_s": gain,
        "measured_low_s": None if high is None else -high,
        "measured_high_s": None if low is None else -low,
        "miss_s": gain - predicted["recoverable_s"],
        "remaining_s": remaining_s,
        "steps_before": len(first),
        "steps_after": len(second),
        "before_s": fmean(first.values()),
        "after_s": fmean(second.values()),
        "work_changes": work,
    }
