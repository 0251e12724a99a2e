"""What to do first: a ranked list of what steps lose time to, each with its culprit and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl_profiler.analysis.device_use import device_use
from verl_profiler.analysis.explain.asynchronous_findings import asynchronous_findings
from verl_profiler.analysis.explain.critical_cycle import critical_cycle
from verl_profiler.analysis.explain.critical_path import critical_segments, path_categories
from verl_profiler.analysis.explain.culprits import culprits
from verl_profiler.analysis.explain.fixes import Facts, fixes_of
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.rules import RULES, Rule
from verl_profiler.analysis.explain.stragglers import REASONS, straggler_requests, stragglers
from verl_profiler.analysis.explain.what_if import asynchronous_what_if, replays_and_averages
from verl_profiler.analysis.phase_efficiency import phase_efficiency
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, left_out, steps_of
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import share

__all__ = ["explanations", "in_order", "ranked"]

# Minimum share of a step for a gain to be a finding even if its interval contains 0.
_LARGE = 0.1
# Minimum share of a step that a single rank or host costs.
_NAMED = 0.03


def explanations(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return all explanations of the step times, each computed once.

    Returns:
        The rows of critical_segments, critical_path, step_replays, what_if, stragglers,
        straggler_requests, culprits, bubble_ledger, critical_cycle, asynchronous_what_if, staleness,
        staleness_causes, device_use and phase_efficiency, by name; steady_path:
        critical_path without the warm-up, which what_if, stragglers and culprits also leave out;
        and findings, see `ranked`, with overrides (of Hydra) and files, by name, instead of fixes.
    """
    replays, averages = replays_and_averages(tables, steps)
    segments = critical_segments(tables, steps)
    steady, without = after_warm_up(tables, steps), left_out(tables, steps)
    lasting = (
        segments
        if steady is None
        else [row for row in segments if row["step"] not in without.get(row["run"], ())]
    )
    found = {
        "critical_segments": segments,
        "critical_path": path_categories(segments),
        "steady_path": path_categories(lasting),
        "step_replays": replays,
        "what_if": averages,
        "stragglers": stragglers(tables, steady),
        "straggler_requests": straggler_requests(tables, steady),
        "culprits": culprits(tables, lasting, steady),
        "bubble_ledger": bubble_ledger(tables, steps),
        "critical_cycle": critical_cycle(tables, steps),
        "asynchronous_what_if": asynchronous_what_if(tables, steps),
        "staleness": staleness(tables, steps),
        "staleness_causes": staleness_causes(tables, steps),
        "device_use": device_use(tables, steps),
        "phase_efficiency": phase_efficiency(tables, steps),
    }
    found["findings"] = ranked(found) + asynchronous_findings(
        tables, found["bubble_ledger"], steady
    )
    facts = {
        run: Facts(tables, run, steps_of(steady, run))
        for run in {row["run"] for row in found["findings"]}
    }
    for row in found["findings"]:
        row["overrides"], row["files"] = fixes_of(row.pop("fixes"), facts[row["run"]])
    return found


def ranked(found: Mapping[str, Rows]) -> Rows:
    """Rank the findings: what the steps lose time to.

    Args:
        found: The rows of steady_path, what_if, stragglers and culprits, by name.

    Returns:
        One row per run and rule that triggers: first anomalies, then those that merely dominate,
        most recoverable time first within each.  run, finding (a key of `RULES`), dominates,
        recoverable_s (per step, on average: an upper bound unless there is a bound_s), bound_s (the
        upper bound where recoverable_s is an estimate, else None), share (of the mean step), low_s
        and high_s (90 % interval of the replay, None with too few steps), unseen (whether these are
        mainly the bounds of loads that were never seen), steps (how many), replayed (how many of
        them the gain is from; None if not from a replay), step_s (their mean), mostly_step (the
        step with more than half of it, if there are three or more), culprit (a name; None if no
        single one), culprit_kind, culprit_text (for display), where, evidence (rows of step, who,
        seconds, what), message, cause and advice (templates for `values`; cause may be
        empty), values, fixes (names of `FIXES`), proof (a command that fails on the changed run if less than
        half of the gain was achieved), shows (names of plots and tables).  Gains are not additive.
    """
    rows: Rows = []
    paths = _by_run(found["steady_path"])
    replays = _by_run(found["what_if"])
    waits = _by_run(found["stragglers"])
    named = _by_run(found["culprits"])
    for run, path in paths.items():
        steps = len({row["step"] for row in path})
        step_s = sum(row["duration_s"] for row in path) / steps
        known = {row["finding"]: row for row in named.get(run, ())}
        own: Rows = []
        for name, rule in RULES.items():
            if rule.pooled:
                continue
            replay = next((r for r in replays.get(run, ()) if r["what"] == rule.change), None)
            by_step, categories = _of_categories(path, rule)
            category_s = sum(by_step.values()) / steps
            culprit = known.get(name, _NOBODY)
            gain, resampled = _gain(rule, replay, category_s, culprit, steps)
            if not step_s or not _triggers(rule, gain, category_s, step_s, culprit):
                continue
            if rule.varies and _may_be_chance(resampled, gain, step_s):
                continue
            worst = max(by_step, key=lambda step: (by_step[step], -step), default=None)
            if rule.dominates and name not in known:
                culprit = {
                    **culprit,
                    "text": max(categories, key=lambda category: categories[category]),
                }
            who = culprit["culprit"]
            replayed = resampled is not None and not rule.unseen
            lost_s = category_s if rule.categories and not replayed else gain
            values = {
                "lost_s": lost_s,
                "lost_share": lost_s / step_s,
                "who": culprit["text"] or "no single one",
                "reason": _reason(waits.get(run, [])),
            }
            own.append(
                {
                    "run": run,
                    "finding": name,
                    "dominates": rule.dominates,
                    "recoverable_s": gain,
                    "bound_s": max(gain, float(culprit["lost_s"] or 0.0) / steps)
                    if rule.bounded
                    else None,
                    "share": gain / step_s,
                    "low_s": resampled["low_s"] if resampled else None,
                    "high_s": resampled["high_s"] if resampled else None,
                    "unseen": rule.unseen,
                    "steps": steps,
                    "replayed": resampled["steps"] if resampled else None,
                    "step_s": step_s,
                    "mostly_step": worst
                    if steps > 2 and worst is not None and by_step[worst] > category_s * steps / 2
                    else None,
                    "culprit": who,
                    "culprit_kind": culprit["kind"],
                    "culprit_text": culprit["text"],
                    "where": culprit["where"],
                    "evidence": culprit["evidence"],
                    "values": values,
                    "message": rule.sentence,
                    "cause": culprit["because"] or rule.cause,
                    "advice": (who and rule.named_advice) or rule.advice,
                    "fixes": rule.fixes if culprit["fixable"] else (),
                    "proof": None
                    if rule.dominates or rule.between or not gain
                    else _proof(step_s, gain),
                    "shows": list(rule.shows),
                }
            )
        gains = {row["finding"]: row["recoverable_s"] for row in own}
        rows += (row for row in own if not _superfluous(RULES[row["finding"]], row, gains))
    return in_order(rows)


def in_order(rows: Rows) -> Rows:
    """Return findings with the most recoverable time first, whatever their run; what bounds a step last.

    What healthy steps show too, and blames nobody, comes after what is out of the ordinary.
    """

    def place(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        replayed = row.get("replayed") is not None and row.get("culprit") is None
        usual = replayed and RULES[row["finding"]].varies
        return row["dominates"], usual, -row["recoverable_s"]

    return sorted(rows, key=place)


_NOBODY: dict[str, Any] = {
    "kind": None,
    "culprit": None,
    "text": "",
    "where": "",
    "lost_s": None,
    "evidence": [],
    "because": "",
    "fixable": True,
}


def _proof(step_s: float, gain: float) -> str:
    limit = f"{step_s - gain / 2:.4g}s"
    return f"verl-profiler diff BEFORE AFTER --fail-if 'step > {limit}'"


def _of_categories(path: Rows, rule: Rule) -> tuple[dict[int, float], dict[str, float]]:
    """Add up the time of a rule's categories by step and by category; of phases, the longest only."""
    categories: dict[str, float] = {}
    for row in path:
        if row["category"] in rule.categories:
            categories[row["category"]] = categories.get(row["category"], 0.0) + row["duration_s"]
    counted = set(categories)
    if rule.sentence.startswith("{who}") and categories:
        counted = {max(categories, key=lambda category: categories[category])}
    by_step: dict[int, float] = {}
    for row in path:
        if row["category"] in counted:
            by_step[row["step"]] = by_step.get(row["step"], 0.0) + row["duration_s"]
    return by_step, categories


def _gain(
    rule: Rule,
    replay: Mapping[str, Any] | None,
    category_s: float,
    culprit: Mapping[str, Any],
    steps: int,
) -> tuple[float, Mapping[str, Any] | None]:
    """Return the recoverable time per step, and the replay that it comes from.

    A measured loss comes from no replay, and neither does the time of a category.
    """
    named = rule.change is None and not rule.bounded and culprit["culprit"] is not None
    if (rule.measured or named) and culprit["lost_s"] is not None:
        return culprit["lost_s"] / steps, None
    if rule.change is None:
        return 0.0 if rule.measured else category_s, None
    if replay is None or replay["expected_s"] is None:
        return 0.0, None
    return replay["expected_s"], replay


def _triggers(
    rule: Rule, gain: float, category_s: float, step_s: float, culprit: Mapping[str, Any]
) -> bool:
    if rule.always:
        return culprit["culprit"] is not None
    # What one rank or host costs counts where what all cost is as usual.
    placed = culprit["kind"] in ("rank", "host") and culprit["culprit"] is not None
    least = min(rule.least, _NAMED) if placed else rule.least
    return (category_s if rule.unseen else gain) >= least * step_s


def _may_be_chance(replay: Mapping[str, Any] | None, gain: float, step_s: float) -> bool:
    """Return whether a replay's gain is small and its interval contains 0.

    A large gain is a finding regardless: a stall in one of many steps has such an interval.
    """
    if replay is None or replay["low_s"] is None or gain >= _LARGE * step_s:
        return False
    return replay["low_s"] <= 0


def _superfluous(rule: Rule, row: Mapping[str, Any], gains: Mapping[str, float]) -> bool:
    if rule.dominates:
        less = sum(gains.get(other, 0.0) for other in rule.without)
        return row["recoverable_s"] - less < rule.least * (row["step_s"] - less)
    return any(gains.get(other, 0.0) >= row["recoverable_s"] / 2 > 0 for other in rule.without)


def _reason(waits: Rows) -> str:
    """Return the main reason for straggling, as the end of a sentence; empty if it is not known."""
    worst = next((row for row in waits if row["kind"] == "request"), None)
    if worst is None:
        return ""
    return (
        f"; {share(worst['share'])} of the waiting for requests is because {REASONS[worst['who']]}"
    )


def _by_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, Rows]:
    runs: dict[str, Rows] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(dict(row))
    return runs
