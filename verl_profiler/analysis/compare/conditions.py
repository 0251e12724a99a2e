"""Parse the conditions of `diff --fail-if`: a metric, a direction, and a change or a limit.

step.p50 > +5%             B's median step is significantly more than 5 % above A's
tool_call:search.p95 > +0.5s
generated_tokens_per_s < -10%
step.p50 > 90s             B's median step is above 90 s, regardless of A's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from verl_profiler.analysis.compare.comparison import Change, Metric, change
from verl_profiler.analysis.compare.step_metrics import PER_EVENT, PER_STEP
from verl_profiler.errors import ReadingError

_CONDITION = re.compile(
    r"(?P<metric>[^<>]+?)\s*(?P<sign>[<>])\s*(?P<change>[+-]?)\s*(?P<number>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>%|ms|s|)"
)
_FACTORS = {"%": 0.01, "ms": 0.001, "s": 1.0, "": 1.0}
_EXAMPLES = "For example --fail-if 'step.p50 > +5%' or --fail-if 'tool_call.p95 > 2s'"


@dataclass(frozen=True)
class Condition:
    """One `--fail-if` condition.

    Args:
        text: The argument as given.
        name: The metric, for example `step`.
        statistic: For example `p50`.
        above: Whether the limit is an upper one.
        relative: Whether the condition is about the change, or B's value.
        share: Whether the number is a share of A's value.
        number: In seconds, as a share, or without unit.
    """

    text: str
    name: str
    statistic: str
    above: bool
    relative: bool
    share: bool
    number: float

    def exceeded(self, found: Change) -> bool:
        """Return whether the point estimate is beyond the limit, regardless of noise."""
        value = found.b
        if self.relative:
            value = found.difference
            if self.share:
                if not found.a:
                    return value > 0 if self.above else value < 0
                value /= found.a
        return value > self.number if self.above else value < self.number

    def p(self, metric: Metric) -> float | None:
        """Return the one-sided p-value of a change beyond the limit; None with too few steps.

        The null hypothesis is a change of exactly the limit: A's values are moved by it, then compared.
        """
        moved = {
            step: value * (1 + self.number) if self.share else value + self.number
            for step, value in metric.a.items()
        }
        beyond = change(replace(metric, a=moved))
        if beyond.p is None:
            return None
        return beyond.p / 2 if (beyond.difference > 0) == self.above else 1 - beyond.p / 2

    def check(self, once: Mapping[str, bool]) -> None:
        """Check that both runs have this metric, with this statistic.

        Args:
            once: For every name in both runs, whether it occurs once per step.

        Raises:
            ReadingError: They do not.
        """
        if self.name not in once:
            near = get_close_matches(self.name, once, n=1) or ["step"]
            raise ReadingError(
                f"{self.text!r}: no metric {self.name} in both runs; did you mean "
                f"{near[0]}?\n`verl-profiler diff A B --all` lists them all",
                "no-such-metric",
            )
        if once[self.name] and self.statistic not in PER_STEP:
            raise ReadingError(
                f"{self.text!r}: {self.name} occurs once per step and has no {self.statistic}.\n"
                f"It has {', '.join(PER_STEP)}",
                "no-such-metric",
            )


def condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        ReadingError: The text is not a condition.
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
