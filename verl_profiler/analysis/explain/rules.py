"""The rules of findings, from `rules.md`: what each one measures, when it triggers, and what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from verl_profiler.events.vocabulary import contract

# The phase of segments after the end of a step, and the category of what no timer covers there.
BETWEEN = "between_steps"
# The rule whose categories precede the requests.
LATE_START = "late_start"
UNEXPLAINED = "unexplained"
# Of these a run may have several, each with a cause of its own.
CHANGES = ("grows", "changed")
# Names in `shows` that are tables of the report; the others are plots.
ONLY_IN_REPORT = frozenset(
    {
        *("rollout_tail", "reward_times", "routes", "token_rates", "request_timeline"),
        *("device_use", "phase_efficiency", "transfer_totals", "weight_transfers"),
    }
)


@dataclass(frozen=True)
class Rule:
    """A rule for one kind of finding; `rules.md` describes what its rows have in them.

    Args:
        sentence: The finding.
        advice: What to try.
        shows: Plots or tables with the evidence.
        cause: What is measured besides; empty if only the culprit has that.
        change: The replay whose gain is recoverable.
        categories: Of the critical path.
        least: The minimum share of a step.
        varies: A small gain needs an interval above 0.
        unseen: The replay has only bounds.
        measured: The culprit's own lost time counts alone.
        always: Triggers regardless of the time.
        dominates: No anomaly.
        pooled: Judged by the device time of an asynchronous run.
        named_advice: What to try if there is a single culprit, other than a phase.
        fixes: Names of `fixes.FIXES`.
        without: Rules that make this one superfluous.
    """

    sentence: str
    advice: str
    shows: tuple[str, ...]
    cause: str = ""
    change: str | None = None
    categories: tuple[str, ...] = ()
    least: float = 0.03
    varies: bool = False
    unseen: bool = False
    measured: bool = False
    always: bool = False
    dominates: bool = False
    pooled: bool = False
    named_advice: str | None = None
    fixes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Texts(NamedTuple):
    """Texts of a rule."""

    sentence: str = ""
    advice: str = ""
    cause: str = ""


_TABLES = contract(Path(__file__).with_name("rules.md"))
# By name and what they are of; "" is the rule itself.
TEXTS = {
    (name.strip("`"), of): Texts(*texts)
    for name, each, *texts in _TABLES["Texts"]
    for of in each.split(", ")
}
# Categories of the critical path other than verl's phases, and their meaning.
CATEGORIES = {name.strip("`"): meaning for name, meaning in _TABLES["Categories"]}
# Kind and name by finding, where the path's segments of its categories determine the culprit.
CULPRITS = {name.strip("`"): (kind, form) for name, kind, form in _TABLES["Culprits"]}
_GROUPS = {name.strip("`"): names.split(", ") for name, names in _TABLES["Groups"]}


def _names(cell: str) -> tuple[str, ...]:
    """Return the names in a cell, with those of groups."""
    names = (_GROUPS.get(name, [name]) for name in cell.split(", ") if name)
    return tuple(inner for each in names for inner in each)


def _rule(
    name: str,
    change: str,
    categories: str,
    least: str,
    marks: str,
    without: str,
    fixes: str,
    shows: str,
) -> Rule:
    sentence, advice, cause = TEXTS[name, ""]
    of_one = TEXTS.get((name, "one culprit"), Texts())
    return Rule(
        sentence,
        advice,
        _names(shows),
        cause,
        change or None,
        _names(categories),
        math.inf if least == "never" else float(least.removesuffix(" %")) / 100,
        named_advice=of_one.advice or None,
        fixes=_names(fixes),
        without=_names(without),
        **dict.fromkeys(_names(marks), True),
    )


RULES: dict[str, Rule] = {
    name: _rule(name, *cells)
    for named, *cells in _TABLES["Conditions"]
    for name in [named.strip("`")]
}


def other_texts(name: str, of: str, rule: Rule | None = None) -> Rule:
    """Return a rule, or one of no conditions, with the texts that it has there.

    Args:
        name: A key of `RULES`, or of a rule that there is only there.
        of: What the texts are of: `cycle`, `log` and the others in `rules.md`.
        rule: The rule, if not that of the name.
    """
    rule = rule or RULES.get(name) or Rule("", "", ())
    sentence, advice, cause = TEXTS.get((name, of), Texts())
    return replace(
        rule,
        sentence=sentence or rule.sentence,
        advice=advice or rule.advice,
        cause=cause or rule.cause,
    )
