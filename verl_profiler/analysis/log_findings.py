"""What to do first, from the timers of a log alone: no requests, tools, engines or ranks are in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from verl_profiler.analysis.console_timers import (
    generation_times,
    logged_phases,
    logged_steps,
    per_token_times,
)
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
from verl_profiler.analysis.explain.rules import BETWEEN, RULES, Rule, other_texts
from verl_profiler.analysis.selection import Rows, nested
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.units import seconds, share

# The slowest request of a batch against the mean one, above which it is a tail.
_TAIL = 4.0
# The part of gen without a busy request, above which it is named.
_BESIDES = 0.1
_LOOP = "timing_s/agent_loop/"
# Timers inside gen that are generation itself.
_GENERATES = ("generate_sequences", "generation_timing")
# What verl measured besides times: the end of a metric's name, what it is, and how it is written.
_FACTS = (
    ("response_length/clip_ratio", "responses at the length limit", share),
    ("trainer/idle_ratio", "the trainer's step without samples", share),
    ("rollouter/idle_ratio", "a version's time since the rollouter's last pause began", share),
    ("partial/partial_ratio", "samples of several versions of the weights", share),
    ("agent_loop/num_preempted/mean", "preemptions of a request", "{:.3g}".format),
    ("trajectory_staleness/mean", "mean staleness of samples, in versions", "{:.3g}".format),
    ("trajectory_staleness/max", "staleness of a step's oldest sample", "{:.3g}".format),
    ("count/dropped_stale_samples", "samples dropped as too old, by now", "{:,.0f}".format),
)

# The figures of a log with the evidence.
_SHOWS = ("step_timing_breakdown", "per_token_timing", "generation_timing")

_UNSEEN = "A log does not show what is in it: requests, turns, tools, engines, ranks."
# Times per token with three decimals are exact to 2 % from here on.
_EXACT_MS = 0.025
_PHASE = Rule("{who} takes {lost_s} per step ({lost_share}){reason}.", _UNSEEN, _SHOWS)
_PREEMPTED = "More memory for the engine (gpu_memory_utilization), fewer requests at once (max_num_seqs), more replicas."
# Rules of logs that bound the step, from this share on.
_BOUNDS, _BOUND = ("rollout_bound", "trainer_bound"), 0.4
_KNOWN = {
    "testing": "validation",
    "save_checkpoint": "checkpoint",
    "unaccounted": "unexplained",
    "update_weights": "weight_sync",
    "param_sync": "weight_sync",
    "sync_rollout_weights": "weight_sync",
    BETWEEN: BETWEEN,
    "reward": "reward",
    **dict.fromkeys(
        ("update_actor", "update_critic", "update_critic_actor", "values", "train"), "trainer_bound"
    ),
    **dict.fromkeys(("gen", "gen_max", "wait_prev_gen", "train_wait"), "rollout_bound"),
}


def log_phases(run: LoggedRun) -> Rows:
    """Return where a mean step goes, from its timers.

    Returns:
        One row per phase inside the step or beside it, longest first: phase, place (`step`, `outside` or
        `overlapping`), mean_s (over all steps but those `left_out`, also those without it), steps (that
        have it), longest_s, longest_step and share (of a step and what is outside of it; None of what
        overlaps it).
    """
    phases = logged_phases(_steady(run))
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
    rows = logged_steps(_steady(run))
    lengths = [row["step_s"] if row["step_s"] is not None else row["accounted_s"] for row in rows]
    return {
        "run": run.label,
        "steps": len(run.lines),
        "left_out": left_out(run),
        "step_mean_s": fmean(lengths),
        "step_least_s": min(lengths),
        "step_most_s": max(lengths),
        "useful_share": None,
    }


def left_out(run: LoggedRun) -> list[int]:
    """Return the steps that means and findings leave out: the first of a launch, if two others remain."""
    first = run.lines[0].step
    return [first] if len(run.lines) > 2 and first in run.begins else []


def _steady(run: LoggedRun) -> LoggedRun:
    lines = run.lines[len(left_out(run)) :]
    begins = [each for each in run.begins if each >= lines[0].step] or [lines[0].step]
    return replace(run, lines=lines, begins=begins)


def log_findings(run: LoggedRun) -> Rows:
    """Rank what the steps of a log lose time to.

    Returns:
        Rows as those of a recorded run's findings; their seconds are per step, as means over the steps
        of the log that are not `left_out`. A log has no requests, ranks or hosts, so no culprit but a
        phase is named.
    """
    kept = _steady(run)
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
    again = [each for each in _batches(account, kept) if each.lost_s >= least_s]
    found = again + [
        each for each in _in_time(account, kept, bool(again)) if each.lost_s >= least_s
    ]
    loop = _requests(kept)
    taken = {phase: lost_s for each in found for phase, lost_s in each.accounts.items()}
    found += [
        each
        for each in (
            *_forwards(account),
            *_tail(account, loop),
            *_inside_gen(account, kept, loop),
            *_phases(account, kept, loop),
        )
        if each.recoverable_s >= least_s
        and each.lost_s - taken.get(next(iter(each.accounts)), 0.0) >= least_s
    ]
    return [each.row() for each in in_order([*found, *_host_memory(account, kept)])]


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
    bounds = name in _BOUNDS
    rule = replace(rule or other_texts(name, "log"), shows=_SHOWS, dominates=bounds)
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


def _in_time(account: Account, run: LoggedRun, again: bool) -> Iterator[Finding]:
    """Name what differs between the steps, as of a recorded run; a step's tokens are those of all phases.

    With `again` it is known why `gen` and the rewards in it do.
    """
    tokens = {
        row["step"]: row["total_tokens"] for row in logged_steps(run) if row["total_tokens"]
    } or _tokens_of_timers(run)
    phases, first = _lengths(account), account.steps[0]
    phases = {phase: each for phase, each in phases.items() if not again or phase not in _REPEATED}
    work = {
        phase: {step: (tokens[step], each / tokens[step] * 1e3) for step, each in by_step.items()}
        for phase, by_step in phases.items()
        if len(tokens) == len(account.steps)
        and phase in OF_TOKENS
        and tokens.keys() >= by_step.keys()
    }
    for name, lost, culprit in changes_in(phases, work, {}, first):
        lost_s = sum(lost.values())
        (place, *_) = culprit.evidence or [{"step": None, "who": culprit.who}]
        step = place["step"] if name == "stalled_step" else None
        mean_s = lost_s / len(account.steps)
        yield _found(account, name, place["who"], mean_s, culprit, step=step)


# What is done for each batch that is generated.
_REPEATED = ("gen", "reward")


def _batches(account: Account, run: LoggedRun) -> Iterator[Finding]:
    """Name batches that are generated again for those that are filtered out."""
    many = {line.step: line.values.get("train/num_gen_batches", 1.0) for line in run.lines}
    lost_s = sum(
        each * max(0.0, 1 - 1 / many[step])
        for phase, series in _lengths(account).items()
        for step, each in series.items()
        if phase in _REPEATED and many[step]
    )
    if not lost_s:
        return
    least, most = min(many.values()), max(many.values())
    reason = f"{least:.3g}{f' to {most:.3g}' if most > least else ''} per step"
    yield _found(account, "more_batches", "gen", lost_s / len(account.steps), reason=reason)


def _host_memory(account: Account, run: LoggedRun) -> Iterator[Finding]:
    """Name the memory of the trainer's host, if it grows by at least a GB a step."""
    held = {line.step: line.values.get("perf/cpu_memory_used_gb", 0.0) for line in run.lines}
    shape = shape_of(held, account.steps[0])
    (first, *_, last) = held if len(held) > 1 else (0, 1)
    if shape is None or shape.since is not None or held[last] - held[first] < last - first:
        return
    per_step = (held[last] - held[first]) / (last - first)
    text = (
        f"by {per_step:.1f} GB per step, from {held[first]:,.0f} GB in step {first} to "
        f"{held[last]:,.0f} GB in step {last} (perf/cpu_memory_used_gb, of the trainer's host)"
    )
    culprit = Culprit("host", "the trainer's host", text)
    yield finding_of(
        account, "host_memory", other_texts("host_memory", "log"), 0.0, {}, culprit, {}
    )


def _inside_gen(account: Account, run: LoggedRun, loop: _Loop | None) -> Iterator[Finding]:
    """Name what takes time inside gen besides generation: timers, tools, and what no request is busy with."""
    gen_s = account.means.get("gen", 0.0)
    parts: dict[str, list[float]] = {}
    for row in generation_times(run):
        if row["inside"] and row["timer"] not in _GENERATES and "/" not in row["timer"]:
            parts.setdefault(row["timer"], []).append(row["duration_s"])
    for timer, own in parts.items():
        lost_s = min(sum(own) / len(account.steps), gen_s)
        yield replace(
            _found(account, timer, "gen", lost_s, rule=_PHASE, reason=", inside gen"), who=timer
        )
    if loop is None or parts:
        return
    if loop.tools_s > loop.slowest_s:
        reason = f", and generates for {seconds(loop.slowest_s)}"
        lost_s = min(loop.tools_s, gen_s - loop.most_s)
        yield _found(account, "tool_time", "gen", lost_s, reason=reason)
    besides = [_besides_s(line.values) for line in run.lines if line.step in account.steps]
    known = [each for each in besides if each is not None]
    if len(known) == len(account.steps) and fmean(known) >= _BESIDES * gen_s:
        lost_s = fmean(known)
        reason = f" ({seconds(gen_s - lost_s)})"
        yield _found(account, "gen_besides", "gen", lost_s, reason=reason)


def _besides_s(values: Mapping[str, float]) -> float | None:
    """Return how much longer `gen` is than its longest request; None if one of them was not logged."""
    gen_s, most_s = (
        values.get(each) for each in ("timing_s/gen", f"{_LOOP}generate_sequences/max")
    )
    if gen_s is None or most_s is None:
        return None
    parts = (f"{_LOOP}slowest/{each}" for each in ("generate_sequences", "tool_calls"))
    return gen_s - max(most_s, sum(values.get(each, 0.0) for each in parts))


def _forwards(account: Account) -> Iterator[Finding]:
    for phase, more in forward_losses(_lengths(account)).items():
        both = phase, FORWARD[phase]
        text = ", ".join(f"{each} {seconds(account.means[each])}" for each in both)
        lost_s = sum(more.values()) / len(account.steps)
        yield _found(account, "forward_only", phase, lost_s, Culprit("phase", phase, text))


def _tail(account: Account, loop: _Loop | None) -> Iterator[Finding]:
    if (
        loop is not None
        and loop.most_s > _TAIL * loop.mean_s > 0
        and loop.tools_s <= loop.slowest_s
    ):
        lost_s = min(loop.most_s - loop.mean_s, account.means.get("gen") or loop.most_s)
        reason = f"{seconds(loop.most_s)}, mean {seconds(loop.mean_s)}{loop.text}"
        yield _found(account, "tail", "gen", lost_s, reason=reason)


class _Loop(NamedTuple):
    """A usual step's requests: the longest and the mean generation, and generation and tools of the slowest one."""

    most_s: float
    mean_s: float
    slowest_s: float
    tools_s: float
    preempted: float
    text: str


def _requests(run: LoggedRun) -> _Loop | None:
    """Return what verl measured of the requests of a usual step; None if it was not logged."""
    usual = partial(_usual, run)
    most_s = usual(f"{_LOOP}generate_sequences/max")
    if not most_s:
        return None
    slowest_s = usual(f"{_LOOP}slowest/generate_sequences", most_s)
    tokens, mean_tokens = usual(f"{_LOOP}slowest/response_length"), usual("response_length/mean")
    tools_s, preempted = (
        usual(f"{_LOOP}slowest/{each}") for each in ("tool_calls", "num_preempted")
    )
    text = (
        f"; {tokens:,.0f} response tokens, mean {mean_tokens:,.0f}"
        if tokens and mean_tokens
        else ""
    )
    text += f"; {seconds(tools_s)} in its tools" if tools_s else ""
    text += f"; preempted {preempted:,.0f} times" if preempted > 0 else ""
    mean_s = usual(f"{_LOOP}generate_sequences/mean")
    preempted = max(preempted, usual(f"{_LOOP}num_preempted/mean"))
    return _Loop(most_s, mean_s, slowest_s, tools_s, preempted, text)


def _usual(run: LoggedRun, name: str, otherwise: float = 0.0) -> float:
    """Return the median of a metric over the steps that have it."""
    values = [line.values[name] for line in run.lines if name in line.values]
    return median(values) if values else otherwise


# What does not run in each step.
_RARE = {"testing": "Validation takes", "save_checkpoint": "Saving a checkpoint takes"}
_ONE_STEP = " {lost_s} ({lost_share}) in the one step of this log; how often it runs is not known."


def _phases(account: Account, run: LoggedRun, loop: _Loop | None) -> Iterator[Finding]:
    """Name what bounds the step, and phases that usually take little, by the rules of recorded runs."""
    # What gen is in a fully asynchronous trainer.
    waits = any(name.startswith("fully_async/") for line in run.lines for name in line.values)
    mean, most = (_usual(run, f"response_length/{each}") for each in ("mean", "max"))
    lengths = (
        f"responses have {mean:,.0f} tokens on average, the longest {most:,.0f}"
        if mean and most
        else ""
    )
    for phase, mean_s in account.means.items():
        name = _KNOWN.get(phase, "")
        if phase == "gen" and waits:
            name = "waits_for_rollout"
        rule = other_texts(name, "log", RULES.get(name, _PHASE))
        least_s = _BOUND * account.step_s if name in _BOUNDS else 0.0
        if phase in FORWARD or mean_s < min(least_s, max(account.means.values())):
            continue
        steps, every = sum(each > 0 for each in account.by_step([phase]).values()), account.steps
        reason = f", in {steps} of {len(every)} steps" if steps < len(every) else ""
        of_gen = loop if phase == "gen" else None
        if of_gen is not None and of_gen.mean_s:
            own = f"generates for {seconds(of_gen.slowest_s)}, the mean one for {seconds(of_gen.mean_s)}"
            reason += f"; its slowest request {own}{of_gen.text}"
        elif name == "rollout_bound" and lengths:
            reason += f"; {lengths}"
        if of_gen is not None and of_gen.preempted >= 1:
            rule = replace(rule, advice=_PREEMPTED)
        reason += _of_slime(phase, account, run)
        if phase == "train":
            # slime's; the advice is for verl.
            rule = replace(rule, advice=_UNSEEN)
        if len(every) == 1 and phase in _RARE:
            rule = replace(rule, sentence=_RARE[phase] + _ONE_STEP)
        yield _found(account, name or phase, phase, mean_s, rule=rule, reason=reason)


# What slime does while it waits for samples, and while it trains.
_SLIME = {
    "train_wait": ("rollout", "update_weights", "wake_up", "sleep"),
    "train": ("data_preprocess", "ref_log_probs", "log_probs", "actor_train"),
}


def _of_slime(phase: str, account: Account, run: LoggedRun) -> str:
    """Return the parts of a phase of slime that take long, as the end of a sentence."""
    parts = {
        name: fmean(line.values.get(f"timing_s/slime/{name}", 0.0) for line in run.lines)
        for name in _SLIME.get(phase, ())
    }
    # A rollout that another step's training overlaps is longer than the wait for it.
    text = ", ".join(
        f"{name} {seconds(each)}"
        for name, each in parts.items()
        if LEAST * account.step_s <= each <= account.means[phase]
    )
    return f"; in it {text}" if text else ""
