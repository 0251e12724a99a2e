"""One finding, of synchronous and asynchronous runs alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from verl_profiler.analysis.explain.concentration import Culprit
from verl_profiler.analysis.explain.fixes import Facts, fixes_of
from verl_profiler.analysis.explain.rules import Rule
from verl_profiler.units import seconds, share

__all__ = ["NOBODY", "Finding", "in_few", "in_order", "shares_of_work"]

NOBODY = Culprit("", None, "")
# More than this part of the time, in steps with more than this many times the median of all.
_MOSTLY, _FEW = 0.5, 3


@dataclass(frozen=True)
class Finding:
    """What steps lose time to; times are means per step.

    Args:
        run: Label of the run.
        name: A key of `RULES`, or the category of the account.
        rule: Its sentence, advice and fixes.
        steps: How many steps it is of.
        step_s: The mean time from the start of a step to the start of the next.
        recoverable_s: An upper bound unless there is a bound_s.
        lost_s: What the sentence measures.
        culprit: Who is behind it.
        accounts: The seconds that it accounts for, by category.
        who: The culprit in the sentence, if not its text.
        reason: The end of the sentence or of the advice.
        lost_share: What the sentence measures as a share, if not of step_s.
        bound_s: The upper bound where recoverable_s is an estimate.
        low_s: Lower end of the 90 % interval of the replay.
        high_s: Upper end.
        replayed: Number of replayed steps; None if not from a replay.
        mostly_step: The step with more than half of it, of three or more.
        where: Where it is, if not where the culprit is.
        cause: What was measured besides.
        between: Whether all of it lies between steps.
        proof: A command that fails on the changed run if less than half of the gain was achieved.
        pastes: Whether the rule's fixes are for this case.
    """

    run: str
    name: str
    rule: Rule
    steps: int
    step_s: float
    recoverable_s: float
    lost_s: float
    culprit: Culprit = NOBODY
    accounts: Mapping[str, float] = field(default_factory=dict[str, float])
    who: str | None = None
    reason: str = ""
    lost_share: float | None = None
    bound_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    replayed: int | None = None
    mostly_step: int | None = None
    where: str | None = None
    cause: str = ""
    between: bool = False
    proof: str | None = None
    pastes: bool = True

    def row(self, facts: Facts | None = None) -> dict[str, Any]:
        """Return the finding as it is printed, with what to paste into a run of these facts, if they are known."""
        rule, culprit = self.rule, self.culprit
        part = self.lost_s / self.step_s if self.lost_share is None else self.lost_share
        filled = {
            "lost_s": seconds(self.lost_s),
            "lost_share": share(part),
            "who": (culprit.text or "no single one") if self.who is None else self.who,
            "reason": self.reason,
        }
        # Without a single culprit, its text has several.
        sentence = (
            rule.sentence if culprit.who else rule.sentence.replace("(most: {who})", "({who})")
        )
        names = rule.fixes if self.pastes else ()
        overrides, files = fixes_of(names, facts) if facts is not None else (list[str](), {})
        return {
            "run": self.run,
            "finding": self.name,
            "dominates": rule.dominates,
            "recoverable_s": self.recoverable_s,
            "bound_s": self.bound_s,
            "share": self.recoverable_s / self.step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "unseen": rule.unseen,
            "steps": self.steps,
            "replayed": self.replayed,
            "step_s": self.step_s,
            "accounts": dict(self.accounts),
            "between": self.between,
            "mostly_step": self.mostly_step,
            "culprit": culprit.who,
            "culprit_kind": culprit.kind or None,
            "culprit_text": culprit.text,
            "code": culprit.code or None,
            "where": culprit.where if self.where is None else self.where,
            "evidence": culprit.evidence,
            "message": sentence.format(**filled),
            "cause": self.cause or culprit.because or rule.cause,
            "advice": ((culprit.who and rule.named_advice) or rule.advice).format(**filled),
            "proof": self.proof,
            "shows": list(rule.shows),
            "overrides": overrides,
            "files": files,
        }


def shares_of_work(
    work: Mapping[str, float], step_s: float, kinds: Mapping[str, Sequence[str]]
) -> str:
    """Return what work is, in shares of the time from step to step, by what it is listed under."""
    texts: list[str] = []
    for name, categories in kinds.items():
        own = {key: work[key] for key in categories if key in work}
        parts = sorted(own, key=lambda key: -own[key])
        if parts:
            listed = ", ".join(f"{key} {share(own[key] / step_s)}" for key in parts)
            whole = f"{name} {share(sum(own.values()) / step_s)}"
            texts.append(f"{whole} ({listed})" if len(parts) > 1 else listed)
    return "; ".join(texts)


def in_few(by_step: Mapping[int, float]) -> dict[str, Any]:
    """Return mostly_step and where of a finding whose time is in few of at least three steps."""
    typical, whole = median(by_step.values()) if by_step else 0.0, sum(by_step.values())
    few = sorted(step for step, each in by_step.items() if each > _FEW * typical)
    if len(by_step) < 3 or sum(by_step[step] for step in few) <= _MOSTLY * whole:
        return {}
    if len(few) == 1:
        return {"mostly_step": few[0], "where": ""}
    passed = few[1] - few[0]
    even = all(b - a == passed for a, b in pairwise(few)) and passed > 1
    every = f"every {passed} steps, " if even else ""
    return {"where": f"mostly {every}in steps {', '.join(map(str, few))}"}


def in_order(listed: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most recoverable time first, whatever their run; what bounds a step last.

    What healthy steps show too, and blames nobody, comes after what is out of the ordinary.
    """

    def place(each: Finding) -> tuple[bool, bool, bool, float]:
        usual = each.rule.varies and each.replayed is not None and each.culprit.who is None
        return each.rule.dominates, each.name == "work", usual, -each.recoverable_s

    return sorted(listed, key=place)
