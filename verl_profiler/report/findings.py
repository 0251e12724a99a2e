"""What to do first: a ranked list of what steps lose time to, each with its cost and its evidence.

`RULES` is the whole of it: a rule names a replay of `what_if` or an owner of `critical_path`, the
part of a step from which on it speaks, and what it says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.stragglers import REASONS
from verl_profiler.analysis.what_if import CHANGES
from verl_profiler.report.text import printable, seconds, share

__all__ = ["EVIDENCE", "RULES", "Rule", "finding_list", "finding_texts", "findings"]

# What findings are made from: the rows of these analyses, by name.
EVIDENCE = ("critical_path", "what_if", "stragglers")


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong.

    Args:
        says: The sentence; may name {owner_s} and {owner_share} (of the path, per step), {who} and
            {who_share} (the worst straggler of `kind`; of requests, the reason).
        cause: What usually causes it.
        advice: What to try, with the setting's name.
        shows: Plots or tables with the evidence, the best first.
        change: The replay whose gain is recoverable.
        owners: Owners of the critical path; without a change, `part` of their time is recoverable.
        kind: The kind of straggler that the sentence names.
        part: See `owners`.
        least: From which share of a step on it speaks.
        unseen: The replay has bounds only, so the owners' time says whether it speaks.
    """

    says: str
    cause: str
    advice: str
    shows: tuple[str, ...]
    change: str | None = None
    owners: tuple[str, ...] = ()
    kind: str | None = None
    part: float = 1.0
    least: float = 0.03
    unseen: bool = False


RULES: dict[str, Rule] = {
    "polling": Rule(
        "Every request had ended, and the trainer found out {owner_s} later.",
        "verl's replay buffer sleeps 2 s between two looks for finished samples (poll_interval, "
        "which verl 0.9.1 has no setting for), so gen is a multiple of that.",
        "A sampler of your own: trainer.v1.sampler.custom_sampler.path and .name, a subclass of "
        "verl's ReplayBuffer that hands poll_interval=0.2 to its parent.",
        ("critical_path", "requests_in_flight"),
        change="no_polling",
        owners=("polling",),
    ),
    "tail": Rule(
        "The slowest 5 % of the requests keep all others waiting. Why the last ones are late: {who} "
        "({who_share} of the waiting).",
        "A few prompts that take many turns or long responses, while the engines have little left "
        "to do.",
        "Lower data.max_response_length or rollout.multi_turn.max_assistant_turns; sample more "
        "prompts than needed and drop or postpone the last ones.",
        ("rollout_tail", "stragglers", "slowest_requests"),
        change="slowest_5_percent",
        kind="request",
    ),
    "slow_tools": Rule(
        "The slow calls of tools hold the step up; most waiting is for {who} ({who_share}).",
        "A tool with a long tail: a sandbox that starts cold, a search without a time limit, "
        "retries.",
        "A time limit near the tool's 95th percentile; more workers behind the tool; a cache.",
        ("tool_latencies", "stragglers"),
        change="tools_at_median",
        kind="tool",
    ),
    "uneven_replicas": Rule(
        "Replicas share the generate calls unevenly; most waiting is for {who} ({who_share}).",
        "Requests stay with the replica of their first turn, wherever the long ones are.",
        "Balance by load and not by request where prefix caching does not matter; more, smaller "
        "replicas.",
        ("token_rates", "stragglers"),
        change="even_replicas",
        kind="replica",
    ),
    "uneven_workers": Rule(
        "The event loops of the agent-loop workers have unequal work; most waiting is for {who} "
        "({who_share}).",
        "Requests with large prompts or tool results in one worker; a tool that computes inside "
        "the event loop.",
        "More agent-loop workers (rollout.agent.num_workers); tools in processes of their own.",
        ("worker_phases", "loop_suspects"),
        change="even_workers",
        kind="worker",
    ),
    "slow_ranks": Rule(
        "In the trainer's phases, ranks wait for the slowest one.",
        "Sequences of unequal length in the ranks' batches, or a slow device.",
        "trainer.balance_batch=true and actor.use_dynamic_bsz=true; if it is always the same rank, "
        "its device or host.",
        ("worker_phases", "stragglers"),
        change="even_ranks",
    ),
    "engine_queue": Rule(
        "The request that ends last waits {owner_s} per step in the engine's queue.",
        "More requests than a replica runs at once, or too little room for their key-value cache.",
        "Raise rollout.max_num_seqs or rollout.gpu_memory_utilization; more replicas.",
        ("engine_parts", "what_if"),
        change="no_queue",
        owners=("queue",),
        unseen=True,
    ),
    "way_to_engine": Rule(
        "The request that ends last spends {owner_s} per step on the way to the engine and back.",
        "The load balancer is one process; large prompts are serialized; the worker's event loop is "
        "busy.",
        "More agent-loop workers (rollout.agent.num_workers); look at the event-loop lags.",
        ("engine_parts", "loop_suspects"),
        owners=("server_acquire", "transport"),
    ),
    "event_loop": Rule(
        "A worker's event loop stands still for {owner_s} per step while the last request waits "
        "for it.",
        "Code that computes or blocks inside a coroutine: a tool, a reward function, tokenizing.",
        "asyncio.to_thread or a process for what computes; more agent-loop workers.",
        ("loop_suspects",),
        owners=("event_loop",),
    ),
    "host_stall": Rule(
        "For {owner_s} per step a whole host stood still, with all of its processes at once.",
        "The machine or its container was paused, throttled or swapping: a virtual machine that was "
        "moved, a CPU limit, memory that ran out, more busy processes than cores.",
        "Look at steal time, nr_throttled in cpu.stat and swap in those seconds; leave these steps "
        "out of comparisons.",
        ("critical_path", "loop_suspects"),
        owners=("host_stall",),
    ),
    "late_start": Rule(
        "{owner_s} per step pass before the request that ends last begins.",
        "The trainer reads the batch and hands prompts out one after the other; a worker is busy, "
        "or, in the first step, still starting.",
        "More agent-loop workers (rollout.agent.num_workers); more dataloader workers; smaller "
        "prompts in the batch.",
        ("critical_path", "requests_in_flight"),
        owners=("dispatch", "prepare_step"),
    ),
    "reward": Rule(
        "Scoring holds the step up for {owner_s}.",
        "A reward function that runs after the rollout, or for a long time for the last request.",
        "Score inside the agent loop; more reward workers; a time limit in the reward function.",
        ("reward_times", "critical_path"),
        owners=("reward",),
    ),
    "transfer": Rule(
        "TransferQueue calls hold the step up for {owner_s}.",
        "Large fields that every phase fetches again, or one storage unit for all.",
        "Fewer or smaller fields; more storage units (transfer_queue.backend.SimpleStorage.num_data_storage_units).",
        ("transfer_rates", "critical_path"),
        owners=("transfer",),
        least=0.05,
    ),
    "weight_sync": Rule(
        "The weight sync takes {owner_s} per step, {owner_share} of it.",
        "Weights go through host memory or in many small pieces.",
        "A faster rollout.checkpoint_engine; larger update_weights_bucket_megabytes; check that it "
        "does not run over the slow network.",
        ("weight_sync",),
        owners=("update_weights",),
        part=0.5,
        least=0.05,
    ),
    "checkpoint": Rule(
        "Saving checkpoints takes {owner_s} per step on average.",
        "Checkpoints are written to a slow file system, or too often.",
        "A larger trainer.save_freq; asynchronous saving; a local disk.",
        ("step_durations", "critical_path"),
        owners=("save_checkpoint",),
    ),
    "handover": Rule(
        "For {owner_s} per step the trainer's phases run with no rank at work.",
        "Batches are serialized and sent to the ranks and back by the trainer's one process.",
        "Fewer fields in the batch; TransferQueue, where it is off.",
        ("critical_path", "worker_phases"),
        owners=("handover",),
    ),
    "unexplained": Rule(
        "For {owner_s} per step ({owner_share}) nothing was recorded that explains the time.",
        "Code of your own between verl's timers, or probes that are off.",
        "span(…) around your own code; switch all families of profiler.events on.",
        ("critical_path",),
        owners=("unexplained",),
        least=0.05,
    ),
}


def findings(found: Mapping[str, Rows]) -> Rows:
    """Rank what the steps lose time to.

    Args:
        found: The rows of the analyses in `EVIDENCE`, by name.

    Returns:
        One row per run and rule that speaks, most recoverable first: run, finding (a key of
        `RULES`), recoverable_s (per step, on average), share (of the mean step), low_s and high_s (of
        the replay, None where nothing was resampled), unseen (whether these are mainly the bounds of
        what loads do that were never seen), step_s (the mean step), mostly_step
        (the step with more than half of it, where there are three or more), says, cause, advice,
        shows (names of plots and tables).  Gains overlap: they do not add up.
    """
    rows: Rows = []
    paths = _by_run(found["critical_path"])
    replays = _by_run(found["what_if"])
    waits = _by_run(found["stragglers"])
    for run, path in paths.items():
        steps = len({row["step"] for row in path})
        step_s = sum(row["duration_s"] for row in path) / steps
        own: Rows = []
        for name, rule in RULES.items():
            replay = next((r for r in replays.get(run, ()) if r["what"] == rule.change), None)
            by_step: dict[int, float] = {}
            for row in path:
                if row["owner"] in rule.owners:
                    by_step[row["step"]] = by_step.get(row["step"], 0.0) + row["duration_s"]
            owner_s = sum(by_step.values()) / steps
            worst = max(by_step, key=lambda step: (by_step[step], -step), default=None)
            gain = _gain(rule, replay, owner_s)
            if not step_s or (owner_s if rule.unseen else gain) < rule.least * step_s:
                continue
            own.append(
                {
                    "run": run,
                    "finding": name,
                    "recoverable_s": gain,
                    "share": gain / step_s,
                    "low_s": replay["low_s"] if replay else None,
                    "high_s": replay["high_s"] if replay else None,
                    "unseen": rule.unseen,
                    "step_s": step_s,
                    "mostly_step": worst
                    if steps > 2 and worst is not None and by_step[worst] > owner_s * steps / 2
                    else None,
                    "says": rule.says.format(**_words(rule, owner_s, step_s, waits.get(run, []))),
                    "cause": rule.cause,
                    "advice": rule.advice,
                    "shows": list(rule.shows),
                }
            )
        rows += sorted(own, key=lambda row: -row["recoverable_s"])
    return rows


# Where a plot's numbers are in the page; others are in the section of the critical path.
_SECTIONS = {
    "engine_parts": "rollout",
    "loop_suspects": "lags",
    "requests_in_flight": "rollout",
    "reward_times": "requests",
    "rollout_tail": "rollout",
    "slowest_requests": "requests",
    "step_durations": "steps",
    "token_rates": "workers",
    "tool_latencies": "tools",
    "transfer_rates": "transfers",
    "weight_sync": "weights",
    "worker_phases": "workers",
}


def finding_texts(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows of `findings` as texts: says, gain, why, try, see (names and page sections)."""
    several = len({row["run"] for row in rows}) > 1
    return [_texts(row, f" of {row['run']}" if several else "") for row in rows]


def _texts(row: Mapping[str, Any], of: str) -> dict[str, Any]:
    gain = f"{seconds(row['recoverable_s'])} per step ({share(row['share'])}){of}"
    if not row["unseen"] or row["low_s"] is None:
        gain = f"up to {gain}"
    else:
        gain += (
            f", from {seconds(row['low_s'])} if replicas give no more tokens per second than they "
            f"did to {seconds(row['high_s'])} if more calls do not slow each other down"
        )
    if row["mostly_step"] is not None:
        gain += f", mostly in step {row['mostly_step']}"
    return {
        "says": row["says"],
        "gain": gain,
        "why": row["cause"],
        "try": row["advice"],
        "see": [(name, _SECTIONS.get(name, "path")) for name in row["shows"]],
    }


def finding_list(rows: Rows) -> str:
    """Write the findings for a terminal; nothing when there are none."""
    lines = []
    for number, text in enumerate(finding_texts(rows), 1):
        lines.append(f"{number}. {text['says']}")
        see = ", ".join(name for name, _ in text["see"])
        told = {"recoverable": text["gain"], "why": text["why"], "try": text["try"], "see": see}
        for label, each in told.items():
            lines += textwrap.wrap(
                each, 92, initial_indent=f"   {label}: ", subsequent_indent="        "
            )
    return "\n".join(["Findings", *map(printable, lines)]) if lines else ""


def _gain(rule: Rule, replay: Mapping[str, Any] | None, owner_s: float) -> float:
    if rule.change is None:
        return owner_s * rule.part
    if replay is None:
        return 0.0
    # Where the trainer polls, one step's gain is nothing or two seconds; many steps' is this.
    return replay["earlier_s"] if CHANGES[rule.change].polls else replay["saved_s"]


def _words(rule: Rule, owner_s: float, step_s: float, waits: Rows) -> dict[str, str]:
    worst = next((row for row in waits if row["kind"] == rule.kind), None)
    who = worst["who"] if worst else "one of them"
    return {
        "owner_s": seconds(owner_s),
        "owner_share": share(owner_s / step_s),
        "who": REASONS[who] if rule.kind == "request" and worst else who,
        "who_share": share(worst["share"]) if worst else "-",
    }


def _by_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, Rows]:
    runs: dict[str, Rows] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(dict(row))
    return runs
