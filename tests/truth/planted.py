"""One planted fault at a time, of many kinds, severities and seeds, and how the findings name it.

The truth is the same simulated run without the fault: `simulated_training`.
"""

import re
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from truth.sampled_runs import record_again
from truth.simulated_training import Plan, Training, write


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its severities, what a right finding's text matches, and the smaller faults beside it."""

    severities: tuple[dict, ...]
    right: str
    steps: int = 8
    beside: tuple[str, ...] = ()


def _each(name, *values, **more):
    return tuple({name: value, **more} for value in values)


def _flowing(severities, right, beside=()):
    """Return the kind of a fault in an asynchronous run, whose trainer would hardly wait without it."""
    flows = {"ahead": 32, "per_call": 0.0002}
    return Kind(tuple({**flows, **each} for each in severities), right, 20, beside)


_TAILED = r"long|tail|tokens|response"
KINDS = {
    "adv": Kind(_each("adv", 3.0, 12.0, 40.0), r"\badv\b"),
    "offload": Kind(_each("moving", 1.0, 3.0, 8.0), r"offload|load(s|ing)? "),
    "dump": Kind(_each("dump", 3.0, 12.0, 38.0), r"dump|between steps"),
    "checkpoint": Kind(_each("checkpoint", 6.0, 20.0, 60.0), r"checkpoint"),
    "validation": Kind(_each("testing", 20.0, 60.0), r"[Vv]alidation"),
    "prompt_build": Kind(_each("build", 0.5, 1.5, 4.0), r"prompt.?build|[Tt]okeniz|first prompt"),
    "slow_tool": Kind(_each("slow_tool", 8.0, 20.0, 60.0), r"browse"),
    "failing_tool": Kind(_each("failing", (0.06, 20.0), (0.15, 30.0)), r"fail|TimeoutError"),
    "tool_of_worker": Kind(_each("slow_tool", 8.0, 20.0, 40.0, slow_tool_worker=3), r"browse"),
    "long_prompts": Kind(
        _each("long_prompts", ((3, 2.0),), ((3, 3.5), (9, 2.5)), ((3, 6.0),), shuffle=False),
        r"prompt group|[Pp]rompts? ",
    ),
    "routing_55": Kind(
        _each("per_call", 0.0012, 0.002, route=(0.55, 0.15, 0.15, 0.15)), r"[Rr]out"
    ),
    "routing_one": Kind(_each("route", (1.0, 0.0, 0.0, 0.0)), r"[Rr]out"),
    "slow_replica": Kind(_each("speeds", *((1, s, 1, 1) for s in (1.3, 1.6, 2.5))), r"engine_1"),
    "small_cache": Kind(
        _each("capacity", *((10**9, 10**9, c, 10**9) for c in (10000, 6000, 4500))),
        r"(KV|retract).*engine_2|engine_2.*(KV|retract)",
    ),
    "retractions": Kind(_each("capacity", *((c,) * 4 for c in (11000, 8000, 5000))), r"retract|KV"),
    "limit": Kind(_each("slots", 8, 4, 2), r"queue"),
    "limit_untimed": Kind(_each("slots", 8, 4, 2, timed=False), r"queue|engine_timing"),
    "tail": Kind(_each("long_tail", (2, 4.0), (6, 6.0), (12, 10.0)), _TAILED),
    "lognormal": Kind(_each("lognormal", (0.8, 4000), (1.2, 8000)), _TAILED),
    "slow_rank": Kind(_each("slow_rank", 1.4, 2.0, 4.0, collective=False), r"actor_5"),
    "slow_passes": Kind(_each("slow_rank", 1.4, 2.0, 4.0, own_passes=True), r"actor_5"),
    "slow_host": Kind(_each("late_host", 3.0, 10.0, 40.0), r"host node-2"),
    "uneven_tokens": Kind(_each("uneven", 0.4, 1.0, 2.0), r"tokens of the ranks|tokens .*rank"),
    "speed_grows": Kind(_each("speed_grows", 0.04, 0.1), r"each step|grow|slower", 12),
    "update_grows": Kind(_each("update_grows", 0.1, 0.3), r"each step|grow|slower", 12),
    "tokens_grow": Kind(_each("token_grows", 0.05, 0.12), r"more tokens|tokens grow|tokens", 12),
    "tool_grows": Kind(_each("tool_grows", 1.0, 4.0), r"grow|step to step", 8),
    "stalled_step": Kind(_each("stall", (5, 60.0), (5, 600.0), (5, 7200.0)), r"step 5"),
    "change_point": Kind(_each("changes_at", (7, 1.3), (7, 1.8)), r"since step 7|from step 7", 12),
    "third_gap": Kind(_each("third_gap", 8.0, 30.0), r"between steps"),
    "first_prefill": Kind(_each("first_prefill", 4.0, 20.0, 120.0), r"[Pp]refill"),
    "one_at_a_time": Kind(_each("one_at_a_time", True), r"one request|in flight|at a time"),
    "slow_reward": Kind(_each("reward", 4.0, 20.0, reward_workers=64), r"[Rr]eward|[Ss]cor"),
    "few_rewarders": Kind(_each("reward", 1.0, 3.0), r"[Rr]eward|[Ss]cor"),
    "blocking_tool": Kind(
        _each("search", 1.0, 3.0, blocking=True), r"my_tools:search", beside=("search",)
    ),
    "event_loop": Kind(_each("block", 0.5, 1.5), r"event loop|blocked"),
    "slow_loader": Kind(_each("slow_loader", 2.0, 8.0, 30.0), r"actor_5"),
    "transfers": Kind(_each("transfer", 2.0, 8.0), r"[Tt]ransfer"),
    "put_of_worker": Kind(_each("put", 8.0, 20.0, put_worker=3), r"tq_put in worker_3"),
    "slow_put": Kind(_each("put", 4.0, 15.0), r"[Tt]ransfer|tq_put"),
    "reward_timeouts": Kind(
        _each("reward_timeouts", (0.05, 30.0), (0.2, 60.0), reward_workers=64), r"[Rr]eward|[Ss]cor"
    ),
    "sync_grows": Kind(_each("sync_grows", 0.3, 1.0), r"update_weights|weight sync", 12),
    "cache_lost": Kind(_each("cache_lost", 2, 6, prefill_token=2e-3), r"[Pp]refix|cached"),
    "test_in_step": Kind(_each("testing_inside", 5.0, 20.0), r"[Vv]alidation"),
    "slow_optimizer": Kind(_each("optimizer", 3.0, 12.0), r"optimizer"),
    "prepare": Kind(_each("prepare", 4.0, 20.0), r"prepare_step"),
    # What no rule was written for.
    "tool_and_adv": Kind(_each("slow_tool", 20.0, 40.0, adv=9.0), r"browse", beside=("adv",)),
    "adv_and_tool": Kind(
        _each("adv", 20.0, 40.0, slow_tool=8.0), r"\badv\b", beside=("slow_tool",)
    ),
    "replica_and_rank": Kind(
        _each("speeds", *((1, s, 1, 1) for s in (1.6, 2.5)), slow_rank=1.3, collective=False),
        r"engine_1",
        beside=("slow_rank",),
    ),
    "validated_tool": Kind(_each("tested", 20.0, 60.0), r"[Vv]alidation"),
    "slow_url": Kind(_each("slow_url", 8.0, 20.0, 60.0), r"url_07"),
    "many_turns": Kind(
        _each("many_turns", (3, 6), (3, 10), shuffle=False), r"prompts? (group )?3\b|more turns"
    ),
    "ref_apart": Kind(_each("ref_ranks", 4, 2, 1), r"\bref\b"),
    "driver_reward": Kind(_each("driver_reward", 4.0, 20.0), r"[Rr]eward|[Ss]cor"),
    "large_tensors": Kind(_each("put", 4.0, 15.0, transfer=6.0), r"[Tt]ransfer|tq_"),
    "slow_receiver": Kind(
        _each("slow_receiver", 4.0, 20.0), r"engine_3|update_weights|[Ww]eight sync"
    ),
    "busy_host": Kind(_each("busy_host", 2.0, 4.0), r"node-2|host"),
    "longer_since": Kind(_each("longer_since", (7, 1.4), (7, 2.0)), r"since step 7", 12),
    "host_tools": Kind(_each("host_tools", 8.0, 30.0), r"host node-2"),
    "host_puts": Kind(_each("host_puts", 8.0, 30.0), r"host node-2"),
    "late_worker": Kind(_each("late_worker", 8.0, 30.0), r"worker_3"),
    "halted_replica": Kind(_each("halt", (4, 60.0), (4, 600.0)), r"step 4.*engine_1"),
    "halted_beside_tail": Kind(
        _each("halt", (4, 60.0), (4, 120.0), lognormal=(0.8, 4000)),
        r"step 4.*engine_1",
        beside=("lognormal",),
    ),
    "unequal_slots": Kind(_each("slots_of", *((256, 256, s, 256) for s in (6, 3))), r"engine_2"),
    "pauses": Kind(_each("pauses", (0.1, 2.0), (0.2, 5.0)), r"event loop|stall"),
    "late_ranks": Kind(_each("late_rank", 2.0, 8.0, collective=False), r"ranks wait"),
    "in_turn": Kind(
        _each("slow_tool", 20.0, 40.0, long_tail=(2, 3.0), in_turn=True),
        r"browse",
        12,
        ("long_tail", "in_turn"),
    ),
    "tool_limit": Kind(_each("tools_at_once", 4, 2, 1), r"\bsearch\b|\bcode\b|tool calls"),
    "slow_epoch": Kind(_each("slow_batch", (4, 30.0), (4, 90.0)), r"prepare_step", 12),
    "handover": Kind(
        _each("handover", 1.0, 4.0), r"dispatch/collect|during the trainer's phases|handover"
    ),
    "throttled": Kind(
        _each("speeds", *((1, s, 1, 1) for s in (2.0, 4.0)), speeds_in=(4, 5, 6)), r"engine_1", 12
    ),
    "tool_since": Kind(_each("tool_since", (7, 10.0), (7, 30.0)), r"calls of code", 12),
    "loops": Kind(_each("loops", (0.05, 8), (0.05, 16)), r"in \d+ turns"),
    "idle_replica": Kind(_each("route", (0.34, 0.33, 0.33, 0.0)), r"serves none"),
    "fifth_prompts": Kind(_each("fifth_prompts", 10.0, 40.0), r"in the other steps", 12),
    "long_inputs": Kind(
        _each(
            "long_inputs",
            (1, 20.0),
            (1, 40.0),
            prefill_token=4e-4,
            prefill_stops=True,
            per_held=4e-7,
        ),
        r"times the prompt tokens",
        beside=("prefill_token",),
    ),
    "long_context": Kind(_each("prefill_token", 2e-2, 5e-2), r"[Pp]refill"),
    # Asynchronous runs: what a step waits for was dispatched by several.
    "flowing_tool": _flowing(_each("slow_tool", 20.0, 40.0, 80.0), "browse"),
    "flowing_failures": _flowing(_each("failing", (0.06, 40.0), (0.15, 60.0)), "fail|TimeoutError"),
    "flowing_tool_since": _flowing(_each("tool_since", (9, 20.0), (9, 40.0)), "calls of code"),
    "flowing_replica": _flowing(_each("speeds", *((1, s, 1, 1) for s in (2, 3, 5))), "engine_1"),
    "flowing_prompts": _flowing(
        _each("long_prompts", ((3, 6.0),), ((3, 9.0),), shuffle=False), r"prompt group|[Pp]rompts? "
    ),
    "flowing_reward": _flowing(
        _each("reward", 20.0, 40.0, reward_workers=256), r"[Rr]eward|[Ss]cor"
    ),
    "flowing_routes": _flowing(
        _each("route", (0.7, 0.1, 0.1, 0.1), (1.0, 0.0, 0.0, 0.0)), "[Rr]out"
    ),
    "flowing_prefill": _flowing(_each("first_prefill", 20.0, 40.0), "[Pp]refill"),
    "flowing_speed": _flowing(_each("speed_grows", 0.1, 0.2), "grow|slower|step to step"),
    "flowing_rank": _flowing(_each("slow_rank", 1.4, 2.0, collective=False), "actor_5"),
    "flowing_tokens": _flowing(_each("uneven", 1.0, 2.0), r"tokens of the ranks|tokens .*rank"),
    "flowing_adv": _flowing(_each("adv", 12.0, 40.0), r"\badv\b"),
    "flowing_dump": _flowing(_each("dump", 3.0, 38.0), "dump"),
    "flowing_gap": _flowing(_each("third_gap", 8.0, 30.0), "between steps"),
    "flowing_gets": _flowing(_each("transfer", 2.0, 8.0), "[Tt]ransfer"),
    "flowing_puts": _flowing(_each("put", 15.0, 30.0), "tq_put"),
    "flowing_handover": _flowing(_each("handover", 1.0, 4.0), "handover"),
    "flowing_ref": _flowing(_each("ref_ranks", 4, 2), r"\bref\b"),
    "flowing_late_ranks": _flowing(
        _each("late_rank", 2.0, 8.0, collective=False), "ranks wait for the slowest"
    ),
    "flowing_build": _flowing(_each("build", 4.0), "prompt_build"),
    "flowing_cache": _flowing(
        _each("capacity", *((10**9, 10**9, c, 10**9) for c in (10000, 6000))), "engine_2"
    ),
    "flowing_cold": _flowing(_each("cache_lost", 2, prefill_token=2e-3), "cached"),
    "flowing_tail": _flowing(_each("long_tail", (6, 6.0), (12, 10.0)), "requests with .* times"),
    "flowing_hard": _flowing(
        _each("hard_prompts", (1, 5.0), (1, 8.0), spread=0.7), "requests with .* times"
    ),
    "flowing_context": _flowing(_each("prefill_token", 5e-2), "[Pp]refill"),
    "flowing_loops": _flowing(_each("loops", (0.05, 8), (0.05, 16)), r"in \d+ turns"),
    "flowing_blocks": _flowing(
        _each("search", 3.0, blocking=True), "my_tools:search", beside=("search",)
    ),
    "clean": Kind(
        (
            *({}, {"steps": 12}, {"spread": 0.4}, {"workers": 16, "samples": 2}),
            *({"tool": 2.5, "tool_spread": each} for each in (0.7, 1.0)),
            # A slow first step is none of the others.
            {"slow_first": 60.0},
            {"steps": 20, "ahead": 32, "per_call": 0.0002},
        ),
        r"$^",
    ),
}
_WITHOUT = Plan()
# Many faults are held against the same run.
_simulated = cache(Training)


def pair(kind, severity, seed):
    """Return the run with a fault and the same run without it."""
    planted = replace(Plan(steps=KINDS[kind].steps, seed=seed), **KINDS[kind].severities[severity])
    # What only makes room for the fault stays.
    kept = {"shuffle", "steps", "per_call", "reward_workers", "workers", "samples", "spread"}
    kept |= {"timed", "collective", "own_passes", "seed", "ahead", "prefill_stops", "per_held"}
    kept |= {*KINDS[kind].beside}
    kept |= {"prefill_token"} if "cache_lost" in KINDS[kind].severities[severity] else set()
    sound = replace(planted, **{k: v for k, v in vars(_WITHOUT).items() if k not in kept})
    return Training(planted), _simulated(sound)


_PLACES = ("worker", "replica", "rank", "host", "prompt group", "tool", "call")


def judge(kind, rows, cost_s):
    """Say how findings name a fault: clean, first, later, wrongly or not; and recoverable / truth."""
    texts = [
        f"{row['message']} {row['culprit_kind']} {row['culprit_text']} {row['cause']} {row['advice']}"
        for row in rows
    ]
    if kind == "clean":
        named = [row for row in rows if row["culprit_kind"] in _PLACES and row["culprit"]]
        return ("wrongly" if named else "clean"), None
    right = [bool(re.search(KINDS[kind].right, text)) for text in texts]
    if right and right[0]:
        return "first", rows[0]["recoverable_s"] / cost_s
    blamed = rows and rows[0]["culprit_kind"] in _PLACES and rows[0]["culprit"]
    if blamed and rows[0]["recoverable_s"] > cost_s / 4:
        return "wrongly", None
    if any(right):
        return "later", rows[right.index(True)]["recoverable_s"] / cost_s
    return "not", None


def findings_of(training, detail_share=1.0):
    """Read a training's files and return its findings, as `summary` has them, with details of a share of requests."""
    from verl_profiler.analysis.registry import explained
    from verl_profiler.reading.reader import load

    with tempfile.TemporaryDirectory() as folder:
        written = write(training, Path(folder) / "run")
        if detail_share < 1:
            record_again(written, Path(folder) / "part", detail_share=detail_share)
            written = Path(folder) / "part"
        run = load(written, cache=False)
        try:
            return explained(run.tables)["findings"]
        finally:
            run.close()
