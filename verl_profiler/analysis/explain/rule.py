"""What a rule for one kind of finding consists of."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rule"]


@dataclass(frozen=True)
class Rule:
    """A rule for one kind of finding.

    Every sentence but the advice is of what was measured.

    Args:
        sentence: The finding; may contain {lost_s} and {lost_share} (per step), {who} (the culprit, or
            "no single one") and {reason} (the main reason for straggling).
        advice: What to try, with the setting's name; what changes the training is named as such.
        shows: Plots or tables with the evidence, the best first.
        cause: What is measured besides; empty if only the culprit has that.
        change: The replay whose gain is recoverable.
        categories: Of the critical path; without a change, all of their time is recoverable.
        measured: The culprit's own lost time is recoverable; without a culprit, the rule does not
            trigger unless `change` is set too.
        bounded: The categories' time is an estimate, and the culprits' own lost time an upper bound:
            the last request may wait for more than the path shows.
        least: The minimum share of a step for the rule to trigger.
        varies: Healthy steps show this by chance too: a small gain needs an interval above 0.
        unseen: The replay has only bounds, so the categories' time determines whether the rule triggers.
        dominates: No anomaly; this bounds the step.
        always: Triggers regardless of the time.
        named_advice: What to try if there is a single culprit.
        fixes: What to paste: names of `fixes.FIXES`.
        pooled: Of an asynchronous run: judged by its device time, `asynchronous_findings`; the
            fixes are for pools with devices of their own.
        without: Rules that make this one superfluous if they recover at least half as much; with
            `dominates`, rules whose gains are subtracted.
    """

    sentence: str
    advice: str
    shows: tuple[str, ...]
    cause: str = ""
    change: str | None = None
    categories: tuple[str, ...] = ()
    measured: bool = False
    bounded: bool = False
    least: float = 0.03
    varies: bool = False
    unseen: bool = False
    dominates: bool = False
    always: bool = False
    named_advice: str | None = None
    fixes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    pooled: bool = False
