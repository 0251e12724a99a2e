"""Test whether lost time is concentrated in one member of a group.

In a healthy run every rank, worker, replica or host is equally likely to be the slowest of its group.
A member is named only if it leads significantly more often; members that differ by nature, such as
tools or operations, are named if they account for most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# At most so many rows of evidence.
EVIDENCE = 5
# Significance level, over all members of a group; where the leader is clearly apart from the others.
_CHANCE, _CHANCE_IF_CLEAR = 0.01, 0.05
# A named member has at least this share of the lost time, and leads at least this often.
_MOST = 0.5
_LEADS = 0.5
# Members that differ by nature need this share of the time.
_OWN = 0.6


@dataclass(frozen=True)
class Place:
    """One occurrence: a step, or a phase of one.

    Args:
        step: verl's global step.
        lost_s: Lost time by member.
        what: A phase, an operation or a request.
    """

    step: int
    lost_s: Mapping[str, float]
    what: str | None = None

    @property
    def leader(self) -> str:
        """The member with the most lost time."""
        return max(self.lost_s, key=lambda who: (self.lost_s[who], who))


def places_of(lost: Iterable[tuple[int, str, float]]) -> list[Place]:
    """Add up step, member and seconds to a place for each step."""
    steps: dict[int, dict[str, float]] = {}
    for step, who, seconds in lost:
        own = steps.setdefault(step, {})
        own[who] = own.get(who, 0.0) + seconds
    return [Place(step, own) for step, own in steps.items()]


@dataclass(frozen=True)
class Culprit:
    """The culprit of a finding.

    Args:
        kind: `rank`, `worker`, `replica`, `device`, `host`, `tool`, `prompt group`, `operation`, `phase`, `step`
            or `setting`.
        who: Its name; None if no single member stands out.
        text: The name, or why there is none, for display.
        where: How often it led: `last in 9 of 9 phases of 3 steps`.
        chance: p-value of leading this often if all members were alike; None for
            members that differ by nature.
        evidence: Rows of step, who, seconds and what, most time first.
        because: A sentence on what was measured of it; empty if nothing was.
        fixable: Whether the fixes of the finding's rule are for this culprit.
        code: `file:line` of a blocking function; empty if it was not recorded.
        most_s: What it may cost at most, in all steps together; None if that is what is lost to it.
        cells: Where in the account it costs what, in all steps together, by phase and category, if that is known.
    """

    kind: str
    who: str | None
    text: str
    where: str = ""
    chance: float | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    because: str = ""
    fixable: bool = True
    code: str = ""
    most_s: float | None = None
    cells: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


class Named(NamedTuple):
    """The culprit of a possible finding (a key of `rules.RULES`) of a run.

    `lost_s` are the seconds lost to it alone in all steps together: the saving if it were as fast as the
    next of its kind; None if not measured.
    """

    run: str
    finding: str
    culprit: Culprit
    lost_s: float | None = None


# By run and finding: the culprit, and the seconds lost to it.
Found: TypeAlias = "dict[str, dict[str, tuple[Culprit, float | None]]]"


def lost_in(places: Iterable[Place]) -> float:
    """Return the seconds of all places."""
    return sum(sum(place.lost_s.values()) for place in places)


def lost_to(
    run: str, finding: str, kind: str, who: str, places: Sequence[Place], **more: Any
) -> Named:
    """Return a culprit that costs the seconds of these places; `more` is of `Culprit`."""
    own = [Place(place.step, {who: lost_in([place])}, place.what) for place in places]
    known: dict[str, Any] = {"text": who, "evidence": _evidence(own, who), **more}
    return Named(run, finding, Culprit(kind, who, **known), lost_in(places))


def concentration(
    kind: str,
    places: Sequence[Place],
    shares: Mapping[str, float] | int,
    *,
    unit: str = "step",
    verb: str = "last",
    clear: bool = False,
) -> Culprit:
    """Test whether one member of a group accounts for the lost time.

    Args:
        kind: The kind of member.
        places: Independent occurrences.
        shares: Expected share of places that each member leads if all are alike, which sum to 1; or how
            many members have equal ones.
        unit: The name of a place, for display.
        verb: The meaning of leading, for display.
        clear: The leader is apart from the others by much more than they are among each other.
    """
    totals = _totals(places)
    whole = sum(totals.values())
    if not places or not whole:
        return Culprit(kind, None, f"no single {kind}: no difference")
    top = max(totals, key=lambda who: (totals[who], who))
    often, part = sum(place.leader == top for place in places), totals[top] / whole
    members = shares if isinstance(shares, int) else len(shares)
    share = 1 / max(shares, 1) if isinstance(shares, int) else shares.get(top, 0.0)
    chance = min(_at_least(often, len(places), share) * members, 1.0)
    evidence = _evidence(places, top)
    where = _where(verb, often, places, unit)
    level = _CHANCE_IF_CLEAR if clear else _CHANCE
    if members > 1 and chance < level and part >= _MOST and often >= _LEADS * len(places):
        return Culprit(kind, top, top, where, chance, evidence)
    mostly = f"{top} {where}"
    if members < 2:
        text = f"{top}, the only {kind}"
    elif often == len(places):
        text = f"not significant: {mostly}, possibly by chance"
    else:
        text = f"no single {kind}: spread over {members} ({mostly})"
    return Culprit(kind, None, text, where, chance, evidence)


def identity(kind: str, places: Sequence[Place], *, verb: str = "most time") -> Culprit:
    """Name the member with most of the lost time, for members that differ by nature."""
    totals = _totals(places)
    whole = sum(totals.values())
    if not whole:
        return Culprit(kind, None, f"no single {kind}")
    ranked = sorted(totals, key=lambda who: (-totals[who], who))
    top = ranked[0]
    leads = sum(place.leader == top for place in places)
    where = _where(verb, leads, places, "step")
    evidence = _evidence(places, top)
    listed = ", ".join(f"{who} {totals[who] / whole:.0%}".replace("%", " %") for who in ranked[:3])
    named = totals[top] >= _OWN * whole
    who, text = (top, top) if named else (None, f"no single {kind}: {listed}")
    return Culprit(kind, who, text, where, None, evidence)


def _totals(places: Iterable[Place]) -> dict[str, float]:
    """Add up the lost time of each member."""
    totals: dict[str, float] = {}
    for place in places:
        for who, lost in place.lost_s.items():
            totals[who] = totals.get(who, 0.0) + lost
    return totals


def _at_least(often: int, places: int, share: float) -> float:
    """Return the binomial probability of leading at least this often, with independent places."""
    if often == 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    yes, no, all_ = math.log(share), math.log1p(-share), math.lgamma(places + 1)
    return math.fsum(
        math.exp(
            all_
            - math.lgamma(count + 1)
            - math.lgamma(places - count + 1)
            + count * yes
            + (places - count) * no
        )
        for count in range(often, places + 1)
    )


def _where(verb: str, often: int, places: Sequence[Place], unit: str) -> str:
    steps = len({place.step for place in places})
    text = f"{verb} in {often} of {len(places)} {unit}{'s' * (len(places) != 1)}"
    return text if unit == "step" else f"{text} of {steps} step{'s' * (steps != 1)}"


def _evidence(places: Sequence[Place], top: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"step": place.step, "who": top, "seconds": place.lost_s[top], "what": place.what}
        for place in places
        if place.lost_s.get(top)
    ]
    return sorted(rows, key=lambda row: -row["seconds"])[:EVIDENCE]
