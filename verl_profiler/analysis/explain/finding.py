"""Findings and the account that they come out of, of synchronous and asynchronous runs alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from verl_profiler.analysis.explain.concentration import EVIDENCE, Culprit, Place, identity
from verl_profiler.analysis.explain.fixes import Facts, fixes_of
from verl_profiler.analysis.explain.rules import (
    BETWEEN,
    CATEGORIES,
    CHANGES,
    LATE_START,
    RULES,
    TEXTS,
    Rule,
    Texts,
)
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.units import seconds, share, some

NOBODY = Culprit("", None, "")
# Minimum share of a step for a gain to be a finding even if its interval contains 0.
LARGE = 0.1
# More than this part of the time, in steps with more than this many times the median of all.
_MOSTLY, _FEW = 0.5, 3
# So many of these steps are named.
_STEPS = 6
# Each category of the account with this share of the time is accounted for by a finding.
LEAST = 0.03
# What a step is for, by what it is listed under: a finding of its own only where a rule triggers.
_WORK: dict[str, tuple[str, ...]] = {
    "generation": ("decode", "engine", "prefill", "tool"),
    "training": ("update_actor", "update_critic", "old_log_prob", "ref", "values"),
    "weight sync": ("update_weights",),
    "validation": ("testing", "validation"),
}
_WORKS = frozenset(category for each in _WORK.values() for category in each)
_SPLIT = "What happens inside was not recorded: put span(…) around its parts."
# The rules that a category alone triggers, but only if it takes long enough.
_RULE_OF = {
    category: (name, rule)
    for name, rule in RULES.items()
    if not rule.dominates and not rule.pooled
    for category in rule.categories
}


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
        between: Whether all of it lies between steps.
        proof: A command that fails on the changed run if less than half of the gain was achieved.
        ranked_s: The seconds that determine its place among others, if not recoverable_s.
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
    between: bool = False
    proof: str | None = None
    ranked_s: float | None = None

    def row(self, facts: Facts | None = None) -> dict[str, Any]:
        """Return the finding as it is printed, with what to paste into a run of these facts, if they are known."""
        rule, culprit = self.rule, self.culprit
        part = self.lost_s / self.step_s if self.lost_share is None else self.lost_share
        filled = {
            "lost_s": seconds(self.lost_s),
            "lost_share": share(part),
            "who": (culprit.text or "no single one") if self.who is None else self.who,
            "work": "The work of requests" if culprit.kind == "work" else "A phase",
            "reason": self.reason,
        }
        placed = culprit.who is not None and culprit.kind not in ("phase", "request")
        # Without a single culprit, its text has several.
        sentence = (
            rule.sentence if culprit.who else rule.sentence.replace("(most: {who})", "({who})")
        )
        names = rule.fixes if culprit.fixable else ()
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
            "cause": culprit.because or rule.cause,
            "advice": ((placed and rule.named_advice) or rule.advice).format(**filled),
            "proof": self.proof,
            "shows": list(rule.shows),
            "overrides": overrides,
            "files": files,
        }


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
    return {"where": f"mostly {every}in steps {some(map(str, few), _STEPS)}"}


def in_order(listed: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most recoverable time first, whatever their run; what bounds a step last.

    What healthy steps show too, and blames nobody, comes after what is out of the ordinary; a bare wait after what
    it is for.
    """

    def place(each: Finding) -> tuple[bool, bool, bool, float]:
        usual = each.rule.varies and each.culprit.who is None
        usual = usual and (each.replayed is not None or each.culprit.kind == "request")
        ranked_s = each.recoverable_s if each.ranked_s is None else each.ranked_s
        bounds = each.rule.dominates or each.ranked_s == 0
        return bounds, each.name in ("work", "pool_work"), usual, -ranked_s

    return sorted(listed, key=place)


class Account:
    """The time from the start of each step to the start of the next, by category.

    Means are per step: of what lies in steps over all of them, of what lies between steps over those
    whose successor was recorded, so that the categories add up to the mean time from step to step.

    Attributes:
        work: The name of the rule of what is no loss.
        kinds: The categories of that, by what they are listed under.
        member: What a category is as a culprit.
    """

    work: ClassVar[str] = "work"
    kinds: ClassVar[Mapping[str, Sequence[str]]] = _WORK
    member: ClassVar[str] = "phase"

    def __init__(self, run: str, segments: Rows, start: int | None = None) -> None:
        self.run = run
        self.segments = grouped(segments, "category")
        self.steps = sorted({row["step"] for row in segments})
        # Whether what precedes requests is that of the run's start, and no steps without it are enough.
        late = self.by_step(self.segments.keys() & RULES[LATE_START].categories)
        others_s = sum(spent for step, spent in late.items() if step != start)
        self.only_starts = (
            start in self.steps and len(self.steps) < 3 and others_s < sum(late.values()) / 10
        )
        gaps = {row["step"] for row in segments if row["phase"] == BETWEEN}
        gaps |= {step for step in self.steps if step + 1 in self.steps}
        self._counts = {True: len(gaps), False: len(self.steps)}
        self.means = {category: self._mean(rows) for category, rows in self.segments.items()}
        self.step_s = sum(self.means.values())
        self.duration_s = self._mean(row for row in segments if row["phase"] != BETWEEN)
        self._trainers = {
            row["name"] for row in segments if row["event"] in ("step", "gen", BETWEEN)
        }
        names = {row["name"] for row in segments if row["phase"] in _WORKS}
        self._has_ranks = bool(names - self._trainers)

    def _mean(self, rows: Iterable[Mapping[str, Any]]) -> float:
        return sum(row["duration_s"] / self._counts[row["phase"] == BETWEEN] for row in rows)

    def of(self, categories: Iterable[str]) -> dict[str, float]:
        """Return the seconds per step of those categories that occur."""
        return {each: self.means[each] for each in categories if each in self.means}

    def cells(self) -> dict[tuple[str, str], float]:
        """Return the seconds per step by phase and category."""
        every = [row for rows in self.segments.values() for row in rows]
        return {key: self._mean(rows) for key, rows in grouped(every, "phase", "category").items()}

    def spent(self, *categories: str) -> float:
        """Return the seconds per step of categories together."""
        return sum(self.of(categories).values())

    def between(self, categories: Iterable[str]) -> bool:
        """Return whether all of their time lies between steps."""
        return all(
            row["phase"] == BETWEEN for category in categories for row in self.segments[category]
        )

    def _on_trainer(self, category: str) -> bool:
        """Return whether the trainer alone works in a category while ranks are recorded elsewhere."""
        names = {row["name"] for row in self.segments[category]}
        return self._has_ranks and names <= self._trainers

    def rule_of(self, category: str) -> tuple[str, Rule]:
        """Return name and rule of a category that no other finding explains: what was measured of it."""
        name, rule = _RULE_OF.get(category, (category, None))
        starts = self.only_starts and name == LATE_START
        if rule is not None and not starts:
            return name, rule
        where, texts = "", TEXTS.get((category, "category"), Texts())
        advice = texts.advice or _SPLIT
        if starts:
            where = " in the first step, in which workers and agent loops start"
            advice = "Record more steps: of three, the first one is left out."
        elif self.between([category]):
            where = " between steps"
        elif category in CATEGORIES:
            where = f" of the last request to finish: {CATEGORIES[category]}"
        elif self._on_trainer(category):
            where = " in the trainer's process, while no rank is active"
        # Names are the user's, and may have braces.
        quoted = category.replace("{", "{{").replace("}", "}}")
        sentence = f"{quoted} takes {{lost_s}} per step ({{lost_share}}){where}."
        sentence = texts.sentence or sentence
        return category, Rule(sentence, advice, ("critical_path", "step_durations"))

    def by_step(self, categories: Iterable[str]) -> dict[int, float]:
        """Return the seconds of each step."""
        sums = dict.fromkeys(self.steps, 0.0)
        for category in categories:
            for row in self.segments.get(category, ()):
                sums[row["step"]] += row["duration_s"]
        return sums


def finding_of(
    account: Account,
    name: str,
    rule: Rule,
    gain: float,
    own: Mapping[str, float],
    culprit: Culprit = NOBODY,
    by_step: Mapping[int, float] | None = None,
    **more: Any,
) -> Finding:
    """Return a finding of `gain` seconds per step, with the seconds of each step if `own` and evidence lack them."""
    between = bool(own) and account.between(own)
    metric, whole_s = ("step_to_step", account.step_s) if between else ("step", account.duration_s)
    proof = f"verl-profiler diff BEFORE AFTER --fail-if '{metric} > {whole_s - gain / 2:.4g}s'"
    if by_step is None:
        by_step = account.by_step(own) if own else _by_step(account.steps, culprit.evidence)
    made = Finding(
        run=account.run,
        name=name,
        rule=rule,
        steps=len(account.steps),
        step_s=account.step_s,
        recoverable_s=gain,
        lost_s=gain,
        culprit=culprit,
        accounts=own,
        between=between,
        # The sum over devices is not the length of a step.
        proof=None if rule.dominates or not gain or account.member != "phase" else proof,
        **in_few(by_step),
    )
    return replace(made, **more)


def _by_step(steps: Iterable[int], evidence: Rows) -> dict[int, float]:
    """Return the seconds of each step; nothing if the evidence may be a part of all."""
    sums = dict.fromkeys(steps, 0.0)
    for row in evidence:
        sums[row["step"]] = sums.get(row["step"], 0.0) + row["seconds"]
    return sums if len(evidence) < EVIDENCE else {}


def needs_replay(account: Account, rule: Rule, known: tuple[Culprit, float | None] | None) -> bool:
    """Whether the replay of a rule's change decides anything: not where the loss is measured, or there is none."""
    _, lost_s = known or (NOBODY, None)
    category_s = sum(account.of(rule.categories).values())
    return lost_s is None and not rule.pooled and (category_s > 0 or not rule.categories)


def of_rule(
    account: Account,
    name: str,
    rule: Rule,
    replay: Mapping[str, Any] | None,
    known: tuple[Culprit, float | None] | None,
) -> Finding | None:
    """Return the finding of a rule, or None if it does not trigger."""
    steps, step_s = len(account.steps), account.step_s
    culprit, lost_s = known or (NOBODY, None)
    own = account.of(rule.categories)
    largest = max(own, key=lambda category: own[category], default="")
    if rule.sentence.startswith("{who}") and own:
        own = {largest: own[largest]}
    category_s = sum(own.values())
    if rule.change is not None and rule.categories and not category_s:
        # What the replay leaves out was not recorded here.
        return None
    named = culprit.who is not None
    own_s = None if lost_s is None else lost_s / steps
    gain, resampled = _gain(rule, replay, category_s, own_s)
    enough = category_s if rule.unseen else gain
    # What costs less than the path shows, because others end as late, accounts for its categories all the same.
    accounts = own_s is not None and not rule.measured and category_s >= rule.least * step_s
    # What one rank, replica or host costs counts where what all cost is as usual.
    placed = named and culprit.kind in ("rank", "replica", "host")
    least = min(rule.least, LEAST) if placed else rule.least
    if not (named if rule.always else accounts or enough >= least * step_s):
        return None
    if rule.varies and _may_be_chance(resampled, gain, step_s):
        return None
    if rule.dominates and known is None:
        culprit = replace(culprit, text=largest)
    return finding_of(
        account,
        name,
        rule,
        gain,
        own,
        culprit,
        lost_s=category_s if own and not rule.measured and (rule.unseen or not resampled) else gain,
        bound_s=None if culprit.most_s is None else max(gain, culprit.most_s / steps),
        low_s=resampled["low_s"] if resampled else None,
        high_s=resampled["high_s"] if resampled else None,
        replayed=resampled["steps"] if resampled else None,
    )


def _gain(
    rule: Rule, replay: Mapping[str, Any] | None, category_s: float, lost_s: float | None
) -> tuple[float, Mapping[str, Any] | None]:
    """Return the recoverable time per step, and the replay that it comes from.

    A measured loss comes from no replay, and neither does the time of a category.
    """
    if lost_s is not None:
        return lost_s, None
    if rule.change is None:
        return 0.0 if rule.measured else category_s, None
    if replay is None or replay["expected_s"] is None:
        # Without a replay, as with sampled details, the time of the category is an upper bound.
        return category_s if rule.unseen else 0.0, None
    return replay["expected_s"], replay


def _may_be_chance(replay: Mapping[str, Any] | None, gain: float, step_s: float) -> bool:
    """Return whether a replay's gain is small and its interval contains 0.

    A large gain is a finding regardless: a stall in one of many steps has such an interval.
    """
    if replay is None or replay["low_s"] is None or gain >= LARGE * step_s:
        return False
    return replay["low_s"] <= 0


def _superfluous(finding: Finding, found: Mapping[str, Finding]) -> str | None:
    """Return the name of the finding that makes this one superfluous, if one does."""
    rule, gain = finding.rule, finding.recoverable_s
    others = {name: each.recoverable_s for name, each in found.items() if each.name in rule.without}
    most = max(others, key=lambda name: others[name], default=None)
    if rule.dominates:
        less = sum(others.values())
        return most if gain - less < rule.least * (finding.step_s - less) else None
    # The same one, of which it was measured what it does; a phase may lose time to several things.
    own = finding.culprit.who if finding.culprit.kind != "phase" else None
    alike = [name for name in others if own in (found[name].culprit.who or "").split(", ")]
    if alike:
        return max(alike, key=lambda name: others[name])
    # What changes is a cause of the same tool's slowness only.
    others = {name: each for name, each in others.items() if found[name].name not in CHANGES}
    most = max(others, key=lambda name: others[name], default=None)
    return most if most is not None and others[most] >= gain / 2 > 0 else None


def _claimed(account: Account, found: Mapping[str, Finding]) -> dict[str, str]:
    """Return by finding the one that costs the same seconds, where others cost most of them: none counts twice."""
    every = account.cells()
    left = dict(every)
    owners: dict[tuple[str, str], str] = {}
    heirs: dict[str, str] = {}
    for name, each in sorted(found.items(), key=lambda item: -item[1].recoverable_s):
        cells = {cell: lost_s / each.steps for cell, lost_s in each.culprit.cells.items()}
        if not cells and not each.rule.dominates:
            cells = {cell: spent for cell, spent in every.items() if cell[1] in each.accounts}
        taken = {cell: min(spent, left.get(cell, 0.0)) for cell, spent in cells.items()}
        owner = owners.get(max(cells, key=lambda cell: cells[cell], default=("", "")))
        if owner is not None and 2 * sum(taken.values()) < sum(cells.values()):
            heirs[name] = owner
            continue
        for cell, spent in taken.items():
            left[cell] = left.get(cell, 0.0) - spent
            owners.setdefault(cell, name)
    return heirs


def without_superfluous(
    found: Mapping[str, Finding], account: Account | None = None
) -> list[Finding]:
    """Return findings by name without the superfluous ones; what makes one superfluous accounts for its time."""
    heirs = {name: _superfluous(each, found) for name, each in found.items()}
    if account is not None:
        claimed = _claimed(account, {name: found[name] for name in found if heirs[name] is None})
        heirs |= claimed
        found = {**found}
        for name, heir in claimed.items():
            culprit = found[heir].culprit
            text = f"{culprit.because} {found[name].row()['message']}".strip()
            found[heir] = replace(found[heir], culprit=replace(culprit, because=text))
    accounts = {name: dict(found[name].accounts) for name, heir in heirs.items() if heir is None}
    for name, each in found.items():
        passed = [name]
        while (heir := heirs[passed[-1]]) is not None and heir not in passed:
            passed.append(heir)
        accounts.get(passed[-1], {}).update(each.accounts)
    return [replace(found[name], accounts=own) for name, own in accounts.items()]


def with_rest(account: Account, listed: Iterable[Finding]) -> list[Finding]:
    """Give findings of a run what they alone account for, and add others until each category of `LEAST` is in one."""
    rest = dict(account.means)
    found: list[Finding] = []
    for each in listed:
        own = sorted(each.accounts.keys() & rest.keys())
        taken = {category: rest.pop(category) for category in own}
        found.append(replace(each, accounts=taken))
    works = {category for of in account.kinds.values() for category in of}
    done: dict[str, float] = {}
    for category, spent in rest.items():
        if not spent >= LEAST * account.step_s > 0:
            continue
        if category in works:
            done[category] = spent
        else:
            name, rule = account.rule_of(category)
            culprit = in_account(account, category, account.member if rule.pooled else "phase")
            # What was not measured of the culprit is not known to be what the fixes are for.
            culprit = replace(culprit, fixable=not rule.measured)
            found.append(finding_of(account, name, rule, spent, {category: spent}, culprit))
    if done:
        text = _shares_of_work(done, account)
        whole_s = sum(done.values())
        rule = RULES[account.work]
        found.append(finding_of(account, account.work, rule, whole_s, done, reason=text))
    return found


def in_account(account: Account, category: str, kind: str) -> Culprit:
    """Return a category as a culprit of this kind."""
    places = [Place(step, {category: each}) for step, each in account.by_step([category]).items()]
    return replace(identity(kind, places), where="")


def _shares_of_work(work: Mapping[str, float], account: Account) -> str:
    """Return what work is, in shares of the time from step to step, by what it is listed under."""
    texts: list[str] = []
    for name, categories in account.kinds.items():
        own = {key: work[key] for key in categories if key in work}
        parts = sorted(own, key=lambda key: -own[key])
        if parts:
            listed = ", ".join(f"{key} {share(own[key] / account.step_s)}" for key in parts)
            whole = f"{name} {share(sum(own.values()) / account.step_s)}"
            texts.append(f"{whole} ({listed})" if len(parts) > 1 else listed)
    return "; ".join(texts)
