"""What to do first: a ranked list of what steps lose time to, each with its culprit and its cost.

The findings of a run come out of the account of its time, from the start of each step to the start of the
next: each category of at least 3 % is accounted for by exactly one finding.  In an asynchronous run the account
is that of the trainer's devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_profiler.analysis.device_use import device_use
from verl_profiler.analysis.explain.asynchronous_findings import (
    ASYNCHRONOUS,
    asynchronous_findings,
    with_the_rest,
)
from verl_profiler.analysis.explain.concentration import Culprit, Found
from verl_profiler.analysis.explain.critical_cycle import critical_cycle
from verl_profiler.analysis.explain.critical_path import (
    between_segments,
    critical_segments,
    path_categories,
)
from verl_profiler.analysis.explain.culprits import culprit_rows, culprits
from verl_profiler.analysis.explain.finding import (
    LEAST,
    NOBODY,
    Account,
    Finding,
    in_order,
    needs_replay,
    of_rule,
    with_rest,
    without_superfluous,
)
from verl_profiler.analysis.explain.fixes import Facts
from verl_profiler.analysis.explain.ledger import bubble_ledger, by_timer
from verl_profiler.analysis.explain.rules import LATE_START, RULES
from verl_profiler.analysis.explain.stragglers import REASONS, straggler_requests, stragglers
from verl_profiler.analysis.explain.what_if import Cycle, cycles, synchronous_what_if
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, by_run, left_out, steps_of
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.analysis.steps import phase_efficiency
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import share


def explained(
    tables: Tables,
    steps: Steps = None,
    replays: Rows | None = None,
    known: Mapping[str, Cycle] | None = None,
) -> dict[str, Rows]:
    """Return all explanations of the step times but `what_if`, each computed once.

    Args:
        tables: Of the runs.
        steps: First and last step; None for all.
        replays: The rows of `what_if`, if they are known; else only what findings need is replayed.
        known: What `cycles` returns, if it was called.

    Returns:
        The rows of critical_segments, critical_path, stragglers, straggler_requests, culprits,
        bubble_ledger, critical_cycle, staleness, staleness_causes, device_use and phase_efficiency, by
        name; steady_path: critical_path without the warm-up, which stragglers and culprits also leave
        out; between_path: the same of the time between steps;
        and findings, see `ranked` and `Finding.row`.
    """
    if known is None:
        known = cycles(tables, steps)
    segments = critical_segments(tables, steps)
    steady, without = after_warm_up(tables, steps), left_out(tables, steps)
    lasting = (
        segments
        if steady is None
        else [row for row in segments if row["step"] not in without.get(row["run"], ())]
    )
    between = between_segments(tables, steady)
    account = lasting + between
    named = culprits(tables, account, steady, known)
    if replays is None:
        replays = synchronous_what_if(tables, steps, _needed(account, named))
    found = {
        "critical_segments": segments,
        "critical_path": path_categories(segments),
        "steady_path": path_categories(lasting),
        "between_path": path_categories(between),
        "stragglers": stragglers(tables, steady),
        "straggler_requests": straggler_requests(tables, steady, 10),
        "culprits": culprit_rows(named),
        "bubble_ledger": bubble_ledger(tables, steps),
        "critical_cycle": critical_cycle(tables, steps),
        "staleness": staleness(tables, steps),
        "staleness_causes": staleness_causes(tables, steps),
        "device_use": device_use(tables, steps),
        "phase_efficiency": phase_efficiency(tables, steps),
    }
    asynchronous = {row["run"] for row in tables.rows(ASYNCHRONOUS)}
    ledger = [row for row in found["bubble_ledger"] if row["run"] in asynchronous]
    ledger = by_timer(tables, ledger)
    listed = [
        *ranked(account, replays, found["stragglers"], named, starts=_starts(tables)),
        *with_the_rest(
            asynchronous_findings(tables, ledger, steady, named, known), ledger, steady, known
        ),
    ]
    facts = {
        run: Facts(tables, run, steps_of(steady, run)) for run in {each.run for each in listed}
    }
    found["findings"] = [each.row(facts[each.run]) for each in listed]
    return found


def _needed(account: Rows, named: Found) -> set[str]:
    """Return the changes whose replays decide whether a rule triggers, and what is recoverable."""
    accounts = [Account(run, segments) for run, segments in by_run(account).items()]
    return {
        rule.change
        for own in accounts
        for name, rule in RULES.items()
        if rule.change is not None and needs_replay(own, rule, named.get(own.run, {}).get(name))
    }


# The first finished step of each run whose start-up was recorded: workers and agent loops start in it.
_FIRST_STEPS = """
SELECT run, min(step) AS step FROM steps WHERE finished AND step > 0
    AND run IN (SELECT run FROM event_fields WHERE event = 'init') GROUP BY run
"""


def _starts(tables: Tables) -> dict[str, int]:
    return {row["run"]: row["step"] for row in tables.rows(_FIRST_STEPS)}


def ranked(
    account: Rows,
    replays: Rows,
    waits: Rows,
    named: Found,
    *,
    starts: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Rank the findings of synchronous runs: what the steps lose time to.

    Args:
        account: Rows of `critical_segments` and of `between_segments`.
        replays: Rows of `what_if`.
        waits: Rows of `stragglers`.
        named: What `culprits` returns.
        starts: The step of each run in which it starts, where that is recorded.

    Returns:
        One per run and rule that triggers, and per other category of `finding.LEAST`: first anomalies, then
        what merely dominates, most recoverable time first within each.  Gains are not additive;
        `accounts` are: each category of `finding.LEAST` is in those of exactly one finding of its run.
    """
    listed: list[Finding] = []
    changes, why = by_run(replays), by_run(waits)
    for run, segments in by_run(account).items():
        culprits = named.get(run, {})
        own = Account(run, _set_apart(segments, culprits), (starts or {}).get(run))
        replay_of = {row["what"]: row for row in changes.get(run, ())}
        reason = _reason(why.get(run, []))
        found: dict[str, Finding] = {}
        for name in dict.fromkeys((*RULES, *culprits)):
            rule = RULES[name.split(" ")[0]]
            if rule.pooled or not own.step_s or (own.only_starts and name == LATE_START):
                continue
            known = culprits.get(name)
            made = of_rule(own, name.split(" ")[0], rule, replay_of.get(rule.change), known)
            if made is not None:
                found[name] = replace(made, reason=reason)
        listed += with_rest(own, without_superfluous(found, own))
    return in_order(listed)


_STALLED, _SLOW_TRANSFERS = "stalled_step", "slow_transfers"


def _set_apart(segments: Rows, culprits: Mapping[str, tuple[Culprit, float | None]]) -> Rows:
    """Give what a step stands still for, and the transfers of a slow worker, categories of their own."""
    slow, slow_s = culprits.get(_SLOW_TRANSFERS, (NOBODY, None))
    enough = (slow_s or 0.0) >= LEAST * sum(row["duration_s"] for row in segments)
    segments = [
        {**row, "category": _SLOW_TRANSFERS}
        if enough
        and row["category"] == "transfer"
        and f"{row['event']} in {row['name']}" == slow.who
        else row
        for row in segments
    ]
    culprit, lost_s = culprits.get(_STALLED, (NOBODY, None))
    if not lost_s:
        return segments
    (stall,) = culprit.evidence

    def inside(row: Mapping[str, Any]) -> bool:
        return (row["step"], row["phase"]) == (stall["step"], stall["who"])

    whole_s = sum(row["duration_s"] for row in segments if inside(row))
    part = min(lost_s / whole_s, 1.0) if whole_s else 0.0
    found: Rows = []
    for row in segments:
        if inside(row):
            usual = {**row, "duration_s": (1 - part) * row["duration_s"]}
            stood = {**row, "category": _STALLED, "duration_s": part * row["duration_s"]}
            found += [usual, stood]
        else:
            found.append(row)
    return found


def _reason(waits: Rows) -> str:
    """Return the main reason for straggling, as the end of a sentence; empty if it is not known."""
    worst = next((row for row in waits if row["kind"] == "request"), None)
    if worst is None:
        return ""
    return (
        f"; {share(worst['share'])} of the waiting for requests is because {REASONS[worst['who']]}"
    )
