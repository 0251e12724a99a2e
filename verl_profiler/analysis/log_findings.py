"""What to do first, from the timers of a log alone: no requests, tools, engines or ranks are in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from verl_profiler.analysis.console_timers import logged_phases, logged_steps, per_token_times
from verl_profiler.analysis.explain.concentration import Culprit
from verl_profiler.analysis.explain.finding import NOBODY, Finding, in_order
from verl_profiler.analysis.explain.forward_passes import FORWARD, forward_losses
from verl_profiler.analysis.explain.over_time import OF_TOKENS, changes_in, shape_of
from verl_profiler.analysis.explain.rules import RULES, Rule
from verl_profiler.analysis.selection import Rows, nested
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.units import seconds, share

__all__ = ["log_facts", "log_findings", "log_headline", "log_phases"]

# The least share of the time from step to step, as for recorded runs.
_LEAST = 0.03
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
_TAIL_RULE = Rule(
    "The slowest request of a batch generates for {lost_s} longer than the mean one ({reason}).",
    "A log has no requests: which are slow, and whether turns, tools or engines make them so, is not in it.",
    _SHOWS,
)
_ROLLOUT_BOUND = Rule(
    "{who} bounds the step: {lost_s} per step ({lost_share}){reason}.",
    _UNSEEN,
    _SHOWS,
    least=0.4,
    dominates=True,
)
_TRAINER_BOUND = replace(
    RULES["trainer_bound"],
    least=0.4,
    sentence="{who} bounds the step: {lost_s} per step ({lost_share}){reason}.",
)
_PHASE = Rule(
    "{who} takes {lost_s} per step ({lost_share}){reason}.",
    _UNSEEN,
    _SHOWS,
)
_UNACCOUNTED = Rule(
    "{lost_s} per step ({lost_share}) are outside all timers{reason}.",
    "A log does not show what it is; a recorded run has what lies between the timers, and `span(…)` in your code.",
    _SHOWS,
)
_LOG_RULES = {
    "stalled_step": replace(
        RULES["stalled_step"],
        advice="Check the logs of the trainer and of the nodes at that time. The other steps ran with the same "
        "settings.",
    ),
    "rollout_bound": _ROLLOUT_BOUND,
    "trainer_bound": _TRAINER_BOUND,
    "unexplained": _UNACCOUNTED,
}
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


def log_findings(run: LoggedRun) -> Rows:
    """Rank what the steps of a log lose time to.

    Returns:
        Rows as those of a recorded run's findings; their seconds are per step, as means over the steps
        of the log without the first, if two others remain. A log has no requests, ranks or hosts, so
        no culprit but a phase is named.
    """
    lines = list(run.lines[1:] if len(run.lines) > 2 else run.lines)
    kept = LoggedRun(
        run.label,
        lines,
        [each for each in run.begins if each >= lines[0].step] or [lines[0].step],
        run.source,
    )
    series = _Series.of(kept)
    if not series.whole_s:
        return []
    least_s = _LEAST * series.whole_s
    found = [each for each in _in_time(series) if each.lost_s >= least_s]
    taken = {phase: lost_s for each in found for phase, lost_s in each.accounts.items()}
    found += [
        each
        for each in (*_forwards(series), *_tail(series, kept), *_phases(series, kept))
        if each.recoverable_s >= least_s
        and each.lost_s - taken.get(next(iter(each.accounts)), 0.0) >= least_s
    ]
    return [each.row() for each in in_order(found)]


@dataclass(frozen=True)
class _Series:
    """The times of each phase by step, in seconds, and what the steps have besides."""

    run: str
    phases: Mapping[str, Mapping[int, float]]
    steps: Sequence[int]
    tokens: Mapping[int, float]
    whole_s: float

    @classmethod
    def of(cls, run: LoggedRun) -> _Series:
        added = (row for row in logged_phases(run) if row["place"] in ("step", "outside"))
        phases: dict[str, dict[int, float]] = nested(added, "duration_s", "phase", "step")
        steps = [line.step for line in run.lines]
        tokens = {
            row["step"]: row["total_tokens"] for row in logged_steps(run) if row["total_tokens"]
        } or _tokens_of_timers(run)
        whole_s = sum(sum(each.values()) for each in phases.values()) / max(len(steps), 1)
        return cls(run.label, phases, steps, tokens, whole_s)

    def mean(self, phase: str) -> float:
        return sum(self.phases.get(phase, {}).values()) / len(self.steps)

    def found(
        self, name: str, rule: Rule, phase: str, lost_s: float, *,
        reason: str = "", step: int | None = None, culprit: Culprit | None = None,
    ) -> Finding:  # fmt: skip
        return Finding(
            run=self.run, name=name, rule=replace(rule, shows=_SHOWS), steps=len(self.steps),
            step_s=self.whole_s, recoverable_s=lost_s, lost_s=lost_s,
            accounts={phase: min(lost_s, self.mean(phase) or lost_s)}, reason=reason,
            culprit=culprit or NOBODY, who=None if culprit else phase, mostly_step=step,
        )  # fmt: skip


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


def _in_time(series: _Series) -> Iterator[Finding]:
    """Name what differs between the steps, as of a recorded run; a step's tokens are those of all phases."""
    tokens = series.tokens if len(series.tokens) == len(series.steps) else dict[int, float]()
    work = {
        phase: {step: (tokens[step], each / tokens[step] * 1e3) for step, each in by_step.items()}
        for phase, by_step in series.phases.items()
        if tokens and phase in OF_TOKENS and shape_of(by_step, series.steps[0]) is not None
    }
    for name, lost_s, culprit in changes_in(series.phases, work, {}, series.steps[0]):
        stalled = name == "stalled_step"
        (first, *_) = culprit.evidence or [{"step": None, "who": culprit.who}]
        yield series.found(
            name, _LOG_RULES.get(name, RULES[name]), first["who"], lost_s / len(series.steps),
            culprit=culprit, step=first["step"] if stalled else None,
        )  # fmt: skip


def _forwards(series: _Series) -> Iterator[Finding]:
    for phase, more in forward_losses(series.phases).items():
        phases = phase, FORWARD[phase]
        text = ", ".join(f"{each} {seconds(series.mean(each))}" for each in phases)
        lost_s = sum(more.values()) / len(series.steps)
        culprit = Culprit("phase", phase, text)
        yield series.found("forward_only", RULES["forward_only"], phase, lost_s, culprit=culprit)


def _tail(series: _Series, run: LoggedRun) -> Iterator[Finding]:
    most, mean, text = _slowest(run)
    if most > _TAIL * mean > 0:
        yield series.found(
            "tail", _TAIL_RULE, "gen", min(most - mean, series.mean("gen") or most),
            reason=f"{seconds(most)}, mean {seconds(mean)}{text}",
        )  # fmt: skip


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


def _phases(series: _Series, run: LoggedRun) -> Iterator[Finding]:
    """Name what bounds the step, and phases that usually take little, by the rules of recorded runs."""
    means = {phase: series.mean(phase) for phase in series.phases}
    for phase, mean_s in means.items():
        times = sum(each > 0 for each in series.phases[phase].values())
        name = _KNOWN.get(phase, "")
        rule = _LOG_RULES.get(name) or RULES.get(name)
        least_s = 0.0 if rule is None or not rule.dominates else rule.least * series.whole_s
        if mean_s < min(least_s, max(means.values())):
            continue
        reason = f", in {times} of {len(series.steps)} steps" if times < len(series.steps) else ""
        most, mean, text = _slowest(run) if phase == "gen" else (0.0, 0.0, "")
        if mean:
            reason += f"; its slowest request generates for {seconds(most)}, the mean one for {seconds(mean)}{text}"
        if phase == "train" and rule is not None:
            # slime's; the advice is for verl.
            rule = replace(rule, advice=_UNSEEN)
        if phase not in FORWARD:
            yield series.found(name or phase, rule or _PHASE, phase, mean_s, reason=reason)
