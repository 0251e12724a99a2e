"""What to do first, from the timers of a log alone: no requests, tools, engines or ranks are in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from verl_profiler.analysis.console_timers import logged_phases, logged_steps, per_token_times
from verl_profiler.analysis.explain.concentration import Culprit
from verl_profiler.analysis.explain.finding import (
    LEAST,
    NOBODY,
    Account,
    Finding,
    finding_of,
    in_order,
)
from verl_profiler.analysis.explain.forward_passes import FORWARD, forward_losses
from verl_profiler.analysis.explain.over_time import OF_TOKENS, changes_in, shape_of
from verl_profiler.analysis.explain.rules import RULES, Rule
from verl_profiler.analysis.selection import Rows, nested
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.units import seconds, share

__all__ = ["left_out", "log_facts", "log_findings", "log_headline", "log_phases"]

# The slowest request of a batch against the mean one, above which it is a tail.
_TAIL = 4.0
_LOOP = "timing_s/agent_loop/"
# What verl measured besides times: the end of a metric's name, what it is, and how it is written.
_FACTS = (
    ("response_length/clip_ratio", "responses at the length limit", share),
    ("trainer/idle_ratio", "the trainer's step without samples", share),
    ("rollouter/idle_ratio", "the rollouter's time in a pause", share),
    ("partial/partial_ratio", "samples of several versions of the weights", share),
    ("trajectory_staleness/mean", "mean staleness of samples, in versions", "{:.3g}".format),
    ("trajectory_staleness/max", "staleness of a step's oldest sample", "{:.3g}".format),
    ("count/dropped_stale_samples", "samples dropped as too old, by now", "{:,.0f}".format),
)

# The figures of a log with the evidence.
_SHOWS = ("step_timing_breakdown", "per_token_timing", "generation_timing")

_UNSEEN = "A log does not show what is in it: requests, turns, tools, engines, ranks."
# Times per token with three decimals are exact to 2 % from here on.
_EXACT_MS = 0.025
_BOUNDS = "{who} bounds the step: {lost_s} per step ({lost_share}){reason}."
# Other sentences and advice than those of recorded runs, or rules that only a log has.
_RULES = {
    "tail": Rule(
        "The slowest request of a batch generates for {lost_s} longer than the mean one ({reason}).",
        "A log has no requests: which are slow, and whether turns, tools or engines make them so, is not in it.",
        _SHOWS,
    ),
    "stalled_step": replace(
        RULES["stalled_step"],
        advice="Check the logs of the trainer and of the nodes at that time. The other steps ran with the same "
        "settings.",
    ),
    "rollout_bound": Rule(_BOUNDS, _UNSEEN, _SHOWS, least=0.4, dominates=True),
    "trainer_bound": replace(RULES["trainer_bound"], least=0.4, sentence=_BOUNDS),
    "unexplained": Rule(
        "{lost_s} per step ({lost_share}) are outside all timers{reason}.",
        "A log does not show what it is; a recorded run has what lies between the timers, and `span(…)` in your code.",
        _SHOWS,
    ),
}
_PHASE = Rule("{who} takes {lost_s} per step ({lost_share}){reason}.", _UNSEEN, _SHOWS)
_KNOWN = {
    "testing": "validation",
    "save_checkpoint": "checkpoint",
    "unaccounted": "unexplained",
    "update_weights": "weight_sync",
    "param_sync": "weight_sync",
    **dict.fromkeys(
        ("update_actor", "update_critic", "update_critic_actor", "values", "train"), "trainer_bound"
    ),
    **dict.fromkeys(("gen", "gen_max", "train_wait"), "rollout_bound"),
}


def log_phases(run: LoggedRun) -> Rows:
    """Return where a mean step goes, from its timers.

    Returns:
        One row per phase inside the step or beside it, longest first: phase, place (`step`, `outside` or
        `overlapping`), mean_s (over all steps, also those without it), steps (that have it), longest_s,
        longest_step and share (of a step and what is outside of it; None of what overlaps it).
    """
    phases = logged_phases(run)
    lines = len({row["step"] for row in phases})
    rows: Rows = []
    for name, place in dict.fromkeys((row["phase"], row["place"]) for row in phases):
        own = {row["step"]: row["duration_s"] for row in phases if row["phase"] == name}
        longest = max(own, key=lambda step: own[step])
        rows.append(
            {
                "phase": name,
                "place": place,
                "mean_s": sum(own.values()) / lines,
                "steps": sum(each > 0 for each in own.values()),
                "longest_s": own[longest],
                "longest_step": longest,
            }
        )
    added = [row for row in rows if row["place"] != "overlapping"]
    whole_s = sum(row["mean_s"] for row in added)
    rows = [
        row | {"share": row["mean_s"] / whole_s if whole_s and row in added else None}
        for row in rows
    ]
    return sorted(rows, key=lambda row: -row["mean_s"])


def log_facts(run: LoggedRun) -> list[str]:
    """Return what verl measured besides times, as phrases; means over the steps that have it."""
    found: list[str] = []
    for end, what, written in _FACTS:
        by_step = [
            next((value for name, value in line.values.items() if name.endswith(end)), None)
            for line in run.lines
        ]
        values = [value for value in by_step if value is not None]
        # Every synchronous step has a staleness of 0.
        if any(values) or (values and end.endswith("idle_ratio")):
            value = values[-1] if end.startswith("count/") else fmean(values)
            found.append(f"{what} {written(value)}")
    steps = logged_steps(run)
    slowness = {row["step"]: 1 / each for row in steps if (each := row["tokens_per_s_per_gpu"])}
    shape = shape_of(slowness, run.lines[0].step)
    if shape is not None:
        since = f" since step {shape.since}" if shape.since is not None else ""
        rates = f"{1 / shape.first:,.0f} to {1 / shape.last:,.0f} tokens/s per GPU"
        found.append(f"throughput falls from {rates}{since}")
    return found


def log_headline(run: LoggedRun) -> dict[str, Any]:
    """Return the headline figures, as of a recorded run; the length is `timing_s/step`."""
    rows = logged_steps(run)
    lengths = [row["step_s"] if row["step_s"] is not None else row["accounted_s"] for row in rows]
    return {
        "run": run.label,
        "steps": len(rows),
        "left_out": [],
        "step_mean_s": fmean(lengths),
        "step_least_s": min(lengths),
        "step_most_s": max(lengths),
        "useful_share": None,
    }


def left_out(run: LoggedRun) -> list[int]:
    """Return the steps that findings leave out: the first of a launch, if two others remain."""
    first = run.lines[0].step
    return [first] if len(run.lines) > 2 and first in run.begins else []


def log_findings(run: LoggedRun) -> Rows:
    """Rank what the steps of a log lose time to.

    Returns:
        Rows as those of a recorded run's findings; their seconds are per step, as means over the steps
        of the log that are not `left_out`. A log has no requests, ranks or hosts, so no culprit but a
        phase is named.
    """
    lines = list(run.lines[len(left_out(run)) :])
    begins = [each for each in run.begins if each >= lines[0].step] or [lines[0].step]
    kept = LoggedRun(run.label, lines, begins, run.source)
    account = Account(
        run.label,
        [
            {**row, "category": row["phase"], "name": "", "event": row["phase"]}
            for row in logged_phases(kept)
            if row["place"] in ("step", "outside")
        ],
    )
    if not account.step_s:
        return []
    least_s = LEAST * account.step_s
    found = [each for each in _in_time(account, kept) if each.lost_s >= least_s]
    taken = {phase: lost_s for each in found for phase, lost_s in each.accounts.items()}
    found += [
        each
        for each in (*_forwards(account), *_tail(account, kept), *_phases(account, kept))
        if each.recoverable_s >= least_s
        and each.lost_s - taken.get(next(iter(each.accounts)), 0.0) >= least_s
    ]
    return [each.row() for each in in_order(found)]


def _found(
    account: Account,
    name: str,
    phase: str,
    lost_s: float,
    culprit: Culprit | None = None,
    *,
    rule: Rule | None = None,
    reason: str = "",
    step: int | None = None,
) -> Finding:
    rule = replace(rule or _RULES.get(name) or RULES[name], shows=_SHOWS)
    own = {phase: min(lost_s, account.means.get(phase) or lost_s)}
    more = {"who": None if culprit else phase, "reason": reason, "proof": None}
    return finding_of(
        account, name, rule, lost_s, own, culprit or NOBODY, {}, mostly_step=step, **more
    )


def _tokens_of_timers(run: LoggedRun) -> dict[int, float]:
    """Return the tokens of each step by its times per token, the only trace of them in verl before 0.4.

    These have three decimals: the longest is the most exact.
    """
    longest = {
        row["step"]: row
        for row in sorted(per_token_times(run), key=lambda row: row["ms_per_token"])
        if row["tokens"] == "all" and row["ms_per_token"] >= _EXACT_MS
    }
    lines = {line.step: line.values for line in run.lines}
    return {
        step: spent_s * 1e3 / row["ms_per_token"]
        for step, row in longest.items()
        if (spent_s := lines[step].get(f"timing_s/{row['timer']}"))
    }


def _lengths(account: Account) -> dict[str, dict[int, float]]:
    """Return the seconds of each phase in the steps that have it."""
    rows = (row for own in account.segments.values() for row in own)
    return nested(rows, "duration_s", "phase", "step")


def _in_time(account: Account, run: LoggedRun) -> Iterator[Finding]:
    """Name what differs between the steps, as of a recorded run; a step's tokens are those of all phases."""
    tokens = {
        row["step"]: row["total_tokens"] for row in logged_steps(run) if row["total_tokens"]
    } or _tokens_of_timers(run)
    phases, first = _lengths(account), account.steps[0]
    work = {
        phase: {step: (tokens[step], each / tokens[step] * 1e3) for step, each in by_step.items()}
        for phase, by_step in phases.items()
        if len(tokens) == len(account.steps) and phase in OF_TOKENS and shape_of(by_step, first)
    }
    for name, lost_s, culprit in changes_in(phases, work, {}, first):
        (place, *_) = culprit.evidence or [{"step": None, "who": culprit.who}]
        step = place["step"] if name == "stalled_step" else None
        mean_s = lost_s / len(account.steps)
        yield _found(account, name, place["who"], mean_s, culprit, step=step)


def _forwards(account: Account) -> Iterator[Finding]:
    for phase, more in forward_losses(_lengths(account)).items():
        both = phase, FORWARD[phase]
        text = ", ".join(f"{each} {seconds(account.means[each])}" for each in both)
        lost_s = sum(more.values()) / len(account.steps)
        yield _found(account, "forward_only", phase, lost_s, Culprit("phase", phase, text))


def _tail(account: Account, run: LoggedRun) -> Iterator[Finding]:
    most, mean, text = _slowest(run)
    if most > _TAIL * mean > 0:
        lost_s = min(most - mean, account.means.get("gen") or most)
        reason = f"{seconds(most)}, mean {seconds(mean)}{text}"
        yield _found(account, "tail", "gen", lost_s, reason=reason)


def _slowest(run: LoggedRun) -> tuple[float, float, str]:
    """Return how long the slowest and the mean request of a usual step generate, and what is known of them.

    The times are 0 if they were not logged.
    """

    def usual(name: str) -> float:
        values = [line.values[name] for line in run.lines if name in line.values]
        return median(values) if values else 0.0

    tokens, mean_tokens = usual(f"{_LOOP}slowest/response_length"), usual("response_length/mean")
    tools_s = usual(f"{_LOOP}slowest/tool_calls")
    text = (
        f"; {tokens:,.0f} response tokens, mean {mean_tokens:,.0f}"
        if tokens and mean_tokens
        else ""
    )
    text += f"; {seconds(tools_s)} in its tools" if tools_s else ""
    return usual(f"{_LOOP}generate_sequences/max"), usual(f"{_LOOP}generate_sequences/mean"), text


def _phases(account: Account, run: LoggedRun) -> Iterator[Finding]:
    """Name what bounds the step, and phases that usually take little, by the rules of recorded runs."""
    for phase, mean_s in account.means.items():
        name = _KNOWN.get(phase, "")
        rule = _RULES.get(name) or RULES.get(name) or _PHASE
        least_s = rule.least * account.step_s if rule.dominates else 0.0
        if phase in FORWARD or mean_s < min(least_s, max(account.means.values())):
            continue
        steps, every = sum(each > 0 for each in account.by_step([phase]).values()), account.steps
        reason = f", in {steps} of {len(every)} steps" if steps < len(every) else ""
        most, mean, text = _slowest(run) if phase == "gen" else (0.0, 0.0, "")
        if mean:
            reason += f"; its slowest request generates for {seconds(most)}, the mean one for {seconds(mean)}{text}"
        if phase == "train":
            # slime's; the advice is for verl.
            rule = replace(rule, advice=_UNSEEN)
        yield _found(account, name or phase, phase, mean_s, rule=rule, reason=reason)
