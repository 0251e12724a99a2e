"""Read the conditions of `diff --fail-if`: a metric, a direction, and a change or a limit.

step.p50 > +5%             B's median step is more than 5 % above A's, and significantly so
tool_call:search.p95 > +0.5s
generated_tokens_per_s < -10%
step.p50 > 90s             B's median step is above 90 s, whatever A's is
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from verl_profiler.analysis.compare.comparison import ALPHA, Change
from verl_profiler.analysis.compare.step_metrics import PER_EVENT, PER_STEP
from verl_profiler.errors import ReadingError

__all__ = ["Condition", "condition", "statistic_of"]

_CONDITION = re.compile(
    r"(?P<metric>[^<>]+?)\s*(?P<sign>[<>])\s*(?P<change>[+-]?)\s*(?P<number>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>%|ms|s|)"
)
_FACTORS = {"%": 0.01, "ms": 0.001, "s": 1.0, "": 1.0}
_EXAMPLES = "For example --fail-if 'step.p50 > +5%' or --fail-if 'tool_call.p95 > 2s'"


@dataclass(frozen=True)
class Condition:
    """One `--fail-if`.

    Args:
        text: As it was given.
        name: What, for example `step`.
        statistic: For example `p50`.
        above: Whether more is meant, or less.
        relative: Whether a change is meant, or B's value.
        share: Whether the number is a share of A's value.
        number: In seconds, as a share, or bare.
    """

    text: str
    name: str
    statistic: str
    above: bool
    relative: bool
    share: bool
    number: float

    def exceeded(self, found: Change) -> bool:
        """Whether the point is beyond the limit, noise or not."""
        value = found.b
        if self.relative:
            value = found.difference
            if self.share:
                if not found.a:
                    return value > 0 if self.above else value < 0
                value /= found.a
        return value > self.number if self.above else value < self.number

    def fails(self, found: Change, conditions: int) -> bool:
        """Whether the condition is met, and significantly so where it is about a change.

        Args:
            found: The metric's change.
            conditions: How many are tested at once; they share the false alarms.
        """
        if not self.relative or not self.exceeded(found):
            return self.exceeded(found)
        if found.p is None or (found.difference > 0) != self.above:
            return False
        return found.p <= ALPHA / conditions


def condition(text: str) -> Condition:
    """Read a condition.

    Raises:
        ReadingError: It is not one.
    """
    match = _CONDITION.fullmatch(text.strip())
    if match is None:
        raise ReadingError(
            f"{text!r} is not a condition.\nWrite METRIC > +CHANGE, METRIC < -CHANGE, or METRIC > "
            f"LIMIT.  {_EXAMPLES}",
            "bad-condition",
        )
    above, sign, unit = match["sign"] == ">", match["change"], match["unit"]
    if unit == "%" and not sign:
        raise ReadingError(
            f"{text!r} has a percentage without a sign.\n"
            f"Write +{match['number']}% or -{match['number']}% for a change.",
            "bad-condition",
        )
    name, _, statistic = match["metric"].rpartition(".")
    if not name or statistic not in PER_EVENT:
        name, statistic = match["metric"], "mean"
    number = float(match["number"]) * _FACTORS[unit] * (-1 if sign == "-" else 1)
    return Condition(text.strip(), name, statistic, above, bool(sign), unit == "%", number)


def statistic_of(asked: Condition, once: Mapping[str, bool]) -> str:
    """Return over what the metric's values are taken; see `comparison.Metric`.

    Args:
        asked: The condition.
        once: For every name in both runs, whether it occurs once per step.

    Raises:
        ReadingError: There is no such metric.
    """
    if asked.name not in once:
        near = get_close_matches(asked.name, once, n=1) or ["step"]
        raise ReadingError(
            f"{asked.text!r}: there is no metric {asked.name} in both runs; did you mean "
            f"{near[0]}?\n`verl-profiler diff A B --all` lists them all",
            "no-such-metric",
        )
    if not once[asked.name]:
        return "mean"
    if asked.statistic not in PER_STEP:
        raise ReadingError(
            f"{asked.text!r}: {asked.name} occurs once per step and has no {asked.statistic}.\n"
            f"It has {', '.join(PER_STEP)}",
            "no-such-metric",
        )
    return asked.statistic
