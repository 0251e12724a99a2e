"""One step of the summary as text: its phases, requests, engine, tools, workers and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, quantile_texts, seconds, share, size

__all__ = [
    "TAIL_REQUESTS",
    "lag_weight",
    "of_step",
    "of_which",
    "slowest_text",
    "step_block",
    "step_name",
    "tail_text",
]

Rows = Sequence[Mapping[str, Any]]

# From so many requests on, the tail is that of the last 5 %, else of the last 20 %.
TAIL_REQUESTS = 40


def step_block(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any], *, several: bool
) -> str:
    """Write everything about one step."""
    lines = [
        [phase["phase"], seconds(phase["duration_s"]), share(phase["share"])]
        for phase in of_step(tables["step_phases"], row)
    ] or [["phases", "not recorded (no trainer events)"]]
    parts = [align(lines, left=(0,)), *_request_lines(row, tables, about)]
    parts += [
        *_engine_lines(row, tables, about),
        *_tool_lines(row, tables, about),
        *_worker_lines(row, tables),
        *_other_lines(row, tables, about),
    ]
    title = step_name(row, several=several)
    duration = row["duration_s"]
    total = (
        f"  {seconds(duration)}" if duration is not None else f"  ({seconds(row['seen_s'])} seen)"
    )
    return visible(title + total) + "\n" + "\n".join(parts)


def _request_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    times = of_step(tables["request_times"], row, validate=False)
    if not times:
        missing = "none in this step" if "request" in about["recorded"] else "not recorded"
        return [_fact("requests", missing)]
    time = times[0]
    count = counted(time["requests"], "request")
    if time["unfinished"]:
        count += f" ({time['unfinished']} without an end)"
    if time["failed"]:
        count += f" ({time['failed']} failed)"
    result: list[str] = []
    if time["p50_s"] is not None:
        count += f"  {_quantiles(time, 'p50', 'p95', 'p99', 'max')}"
    result.append(_fact("requests", count))
    if time["mean_turns"] is not None:
        tokens = ""
        if time["generated_tokens"] is not None:
            tokens = f"; {time['generated_tokens']:,} generated tokens"
            if time["tool_tokens"]:
                tokens += f", {time['tool_tokens']:,} tool tokens"
            if row["generated_tokens_per_s"] is not None:
                tokens += f"; {row['generated_tokens_per_s']:,.0f} generated tokens/s of the step"
        turns = f"{time['mean_turns']:.1f} per request, at most {time['max_turns']}{tokens}"
        result.append(_fact("turns", turns))
    shares = [
        f"{part['part']} {share(part['share'])}"
        for part in of_step(tables["request_parts"], row, validate=False)
        if part["share"] is not None and part["share"] >= 0.001
    ]
    if shares:
        result.append(_fact("components", ", ".join(shares)))
    tail = of_step(tables["step_tail"], row)
    if tail:
        part = 95 if tail[0]["requests"] >= TAIL_REQUESTS else 80
        text = (
            f"{tail_text(tail[0], part)} from the end of {part} % of the requests to the last"
            if tail[0][f"after_p{part}_s"] is not None
            else f"too few requests for an end of {part} % of them"
        )
        if tail[0]["poll_s"] is not None:
            text += f"; gen ended {seconds(tail[0]['poll_s'])} after the last"
        result.append(_fact("tail", text))
    slowest = of_step(tables["slowest_requests"], row)
    if slowest:
        request = slowest[0]
        pieces = [
            f"{key.removesuffix('_s')} {seconds(request[key])}"
            for key in sorted(
                (key for key in request if key in _PARTS and (request[key] or 0) > 0),
                key=lambda key: -request[key],
            )[:4]
        ]
        where = f"{request['name']}, {counted(request['turns'] or 0, 'turn')}"
        result.append(_fact("slowest", f"{slowest_text(request)} ({where}: {', '.join(pieces)})"))
    return result


_PARTS = {
    "engine_s": "engine calls",
    "tool_s": "tools",
    "prompt_build_s": "building the prompt",
    "tool_parsing_s": "parsing tool calls",
    "token_merge_s": "merging tokens",
    "postprocess_s": "postprocessing",
    "reward_s": "its reward",
    "other_s": "unattributed time",
}


def _engine_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    times = of_step(tables["engine_times"], row, validate=False)
    if not times:
        return [] if "engine_call" in about["recorded"] else [_fact("engine", "not recorded")]
    engine = times[0]
    text = f"{_about(engine)}{counted(engine['calls'], 'call')}  {_quantiles(engine, 'p50', 'p95', 'max')}"
    if engine["engine_tokens_per_s"] is not None:
        text += f"; {engine['engine_tokens_per_s']:,.0f} engine tokens/s"
    result = [_fact("engine", text)]
    split = [
        f"{name} {share(engine[f'{name}_s'] / engine['total_s'])}"
        for name in ("queue", "prefill", "decode")
        if engine[f"{name}_s"] is not None and engine["total_s"]
    ]
    missing = [name for name in ("queue", "prefill", "decode") if engine[f"{name}_s"] is None]
    if not engine["served"]:
        split.append("its servers were not recorded")
    elif missing:
        split.append(f"{', '.join(missing)} time not reported by the engine")
    if engine["outside_s"] is not None and engine["total_s"]:
        split.append(f"outside the engine {share(engine['outside_s'] / engine['total_s'])}")
    result.append(_fact("", ", ".join(split)))
    return result


def _tool_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    tools = of_step(tables["tool_times"], row, validate=False)
    if not tools:
        if about["recorded"] & {"tool_call", "tool_execution"}:
            return []
        return [_fact("tools", "no tool call recorded")]
    lines: list[str] = []
    for position, tool in enumerate(tools[:5]):
        failed = f", {tool['failed']} failed" if tool["failed"] else ""
        text = (
            f"{tool['tool']}: {_about(tool)}{counted(tool['calls'], 'call')}{failed}, "
            f"{_about(tool)}{seconds(tool['total_s'])} "
            f"in total, {_quantiles(tool, 'p50', 'p95', 'max')}"
        )
        lines.append(_fact("" if position else "tools", text))
    if len(tools) > 5:
        lines.append(_fact("", f"and {len(tools) - 5} more tools"))
    return lines


def _worker_lines(row: Mapping[str, Any], tables: Mapping[str, Rows]) -> list[str]:
    result: list[str] = []
    workers = of_step(tables["rollout_balance"], row)
    if len(workers) > 1:
        slowest = workers[0]
        result.append(
            _fact(
                "workers",
                f"{slowest['name']} finished last, after {seconds(slowest['busy_s'])}, "
                f"{seconds(slowest['behind_s'])} after the median of {len(workers)}",
            )
        )
    ranks = [
        rank
        for rank in of_step(tables["rank_balance"], row)
        if rank["ranks"] > 1 and rank["event"] in _RANK_EVENTS
    ]
    for position, rank in enumerate(ranks):
        text = (
            f"{rank['event']}: slowest {rank['slowest']} {seconds(rank['slowest_s'])}, median "
            f"{seconds(rank['median_s'])}, fastest {seconds(rank['fastest_s'])}"
        )
        result.append(_fact("" if position else "ranks", text))
    return result


# Work that contains the rest of a rank's work.
_RANK_EVENTS = {
    "update_actor",
    "update_critic",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "update_weights",
}


def _other_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    result: list[str] = []
    for sync in of_step(tables["weight_sync"], row):
        pieces = [
            f"{label} {seconds(sync[key])}"
            for label, key in (
                ("trainer", "trainer_s"),
                (f"slowest rank ({sync['slowest_rank']})", "slowest_rank_s"),
                ("transfer", "transfer_s"),
                ("memory released", "release_s"),
                ("resumed", "resume_s"),
            )
            if sync[key] is not None
        ]
        result.append(_fact("weight sync", ", ".join(pieces)))
    transfers = of_step(tables["transfer_totals"], row)
    if transfers:
        moved = sum(each["size_bytes"] or 0 for each in transfers)
        spent = sum(each["total_s"] or 0 for each in transfers)
        slow = max(transfers, key=lambda each: each["max_s"] or 0)
        calls = sum(each["calls"] for each in transfers)
        text = (
            f"{counted(calls, 'call')}, {size(moved)}, {seconds(spent)} summed over callers; "
            f"longest {slow['event']} in {slow['role']} {seconds(slow['max_s'])}"
        )
        result.append(_fact("TransferQueue", text))
    lags = [lag for lag in of_step(tables["loop_lags"], row) if lag["role"] not in COMPUTING_ROLES]
    if lags:
        worst = max(lags, key=lag_weight)
        text = (
            f"{worst['name']} stalled {counted(worst['lags'], 'time')}, "
            f"longest {seconds(worst['max_s'])}"
        )
        others = len({each["name"] for each in lags}) - 1
        if others > 0:
            text += f", and {counted(others, 'other process', 'other processes')}"
        result.append(_fact("event loop", text))
    for position, peak in enumerate(of_step(tables["memory_peaks"], row)):
        used = peak["used_bytes"] or peak["reserved_bytes"] or peak["allocated_bytes"]
        of = "" if not peak["total_bytes"] else f" of {size(peak['total_bytes'])}"
        text = f"{peak['role']}: {size(used)}{of} in {peak['name']} ({peak['at']})"
        result.append(_fact("" if position else "memory peak", text))
    for cost in of_step(tables["profiler_cost"], row):
        text = f"{seconds(cost['costliest_s'])} in {cost['costliest']}"
        if cost["share"] is not None:
            text += f", {share(cost['share'])} of the step"
        if cost["costliest_cpu_s"] is not None:
            text += f" ({seconds(cost['costliest_cpu_s'])} of CPU time)"
        text += f"; {seconds(cost['wrapper_s'])} in all {cost['processes']} processes"
        if cost["events"] is not None:
            text += f", {cost['events']:,} events"
        if cost["dropped"]:
            text += f", {cost['dropped']} dropped"
        result.append(_fact("profiler", text))
    if not of_step(tables["profiler_cost"], row) and "profiler_cost" not in about["recorded"]:
        result.append(_fact("profiler", "its cost was not recorded"))
    return result


def of_which(request: Mapping[str, Any]) -> str:
    """Describe what a row of `slowest_requests` consists of: its largest part.

    Returns:
        Text to append, with the longest single call where it is of that part; empty if no part is known.
    """
    spent = {part: request.get(key) or 0.0 for key, part in _PARTS.items()}
    most = max(spent, key=lambda part: spent[part])
    longest, turn = request["longest"], request["longest_turn"]
    if longest is not None and most == ("engine calls" if longest == "engine" else "tools"):
        named = {"engine": "one engine call", "tool": "tools"}
        what = named.get(longest, f"tool {longest}") + ("" if turn is None else f" (turn {turn})")
        return f", {seconds(request['longest_s'])} of it in {what}"
    return f", {seconds(spent[most])} of it in {most}" if spent[most] else ""


def slowest_text(request: Mapping[str, Any]) -> str:
    """Return the id of a request, its duration, and its largest part."""
    text = f"{_short(request['request_id'])}: {seconds(request['duration_s'])}"
    return f"{text}{of_which(request)}"


def lag_weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what sorts rows of lags: a stall where requests wait matters most, then a long one."""
    waits = row["role"] in ("agent_loop", "engine", "reward", "trainer")
    return waits and (row["step"] or 0) > 0, row["max_s"]


def tail_text(tail: Mapping[str, Any], part: int) -> str:
    """Return the time after `part` % of the requests had ended."""
    length = tail[f"after_p{part}_s"]
    return "too few" if length is None else seconds(length)


def of_step(rows: Rows, row: Mapping[str, Any], **equal: Any) -> list[Mapping[str, Any]]:
    """Return the rows of the same run and step."""
    return [
        each
        for each in rows
        if each["run"] == row["run"]
        and each["step"] == row["step"]
        and each.get("validate", False) in (equal.get("validate", False), None)
    ]


def step_name(row: Mapping[str, Any], *, several: bool) -> str:
    """Return the step's name, with its run if there are several."""
    return f"step {row['step']}" + (f" of {row['run']}" if several else "")


def _about(row: Mapping[str, Any]) -> str:
    """Return the mark of an estimate."""
    return "≈ " if row["estimated"] else ""


def _quantiles(row: Mapping[str, Any], *names: str) -> str:
    texts = quantile_texts(row, *names)
    return "  ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _fact(name: str, text: str) -> str:
    return visible(f"  {name:<14}{text}").rstrip()


def _short(request_id: str | None) -> str:
    return "(no id)" if request_id is None else request_id[:8]
