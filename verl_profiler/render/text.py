"""Tables as text for a terminal: a summary that says the conclusion first."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.render.visible import visible

__all__ = [
    "align",
    "counted",
    "of_which",
    "quantile_texts",
    "seconds",
    "share",
    "size",
    "step_blocks",
    "summary",
]

Rows = Sequence[Mapping[str, Any]]

# More steps than this get one line each, and only the longest of them a block of their own.
_BLOCKS = 5
_PROBLEMS = 40
_MANY = 40


def seconds(value: float | None) -> str:
    """Write a length of time with two or three digits: `0.4 ms`, `312 ms`, `6.7 s`, `12 min 5 s`."""
    if value is None:
        return "-"
    if abs(value) < 0.000_000_5:
        return "0 s"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 0.0095:
        return f"{value * 1e3:.1f} ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def quantile_texts(row: Mapping[str, Any], *names: str) -> list[str]:
    """Write quantiles of lengths of time, `too few` where there are fewer than a quantile needs.

    Args:
        row: With columns such as `p50_s`, `p95_s` and `max_s`, in seconds.
        names: Of the columns, without `_s`; the maximum, which shows whether there are any, last.
    """
    some = row[f"{names[-1]}_s"] is not None
    return [
        "too few" if some and row[f"{name}_s"] is None else seconds(row[f"{name}_s"])
        for name in names
    ]


def share(value: float | None) -> str:
    """Write a share as percent: `61 %`, `0.3 %`, `<0.1 %`, `-12 %`, `>-0.1 %`."""
    if value is None:
        return "-"
    percent = value * 100
    if 0 < abs(percent) < 0.05:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    whole = abs(percent) >= 9.95 or percent == 0
    return f"{percent or 0.0:.0f} %" if whole else f"{percent:.1f} %"


def size(value: float | None) -> str:
    """Write a number of bytes: `512 B`, `1.4 GB`, in powers of 1000."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def align(rows: Iterable[Sequence[str]], *, left: Iterable[int] = (0,), indent: str = "  ") -> str:
    """Lay cells out in columns, numbers to the right.

    Args:
        rows: Cells; rows may differ in length.
        left: Columns that are set to the left.
        indent: Put before every line.
    """
    cells = [[visible(cell) for cell in row] for row in rows]
    flush_left = set(left)
    widths = [
        max(_width(row[column]) for row in cells if column < len(row))
        for column in range(max((len(row) for row in cells), default=0))
    ]
    lines = []
    for row in cells:
        laid = [
            cell + gap if column in flush_left else gap + cell
            for column, cell in enumerate(row)
            for gap in [" " * (widths[column] - _width(cell))]
        ]
        lines.append((indent + "  ".join(laid)).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    """Return how many columns a terminal gives the text: two for a Chinese character."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def summary(tables: Mapping[str, Rows], about: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Write what happened in a run.

    Args:
        tables: The rows of the analyses, by name.
        about: `runs` (labels), `events` (how many), `recorded` (names of events that occur),
            `findings` (their text).
        problems: Plain sentences; they come last.
    """
    steps = tables["step_times"]
    several = len(about["runs"]) > 1
    blocks = [_headline(tables, about), about["findings"]]
    trained = [row for row in steps if row["step"] or row["requests"] or row["finished"]] or steps
    if len(trained) > _BLOCKS:
        blocks.append(_step_lines(trained, tables, several=several))
        longest = sorted(trained, key=lambda row: -(row["duration_s"] or row["seen_s"]))[:_BLOCKS]
        chosen = [row for row in trained if any(row is each for each in longest)]
        blocks.insert(2, f"longest: {_conclusion(longest[0], tables, several=several)}")
        blocks.append(
            f"The {_BLOCKS} longest of {len(trained)} steps follow; --step N shows any other."
        )
    else:
        chosen = trained
        blocks.append("\n".join(_conclusion(row, tables, several=several) for row in trained))
    blocks += [_step_block(row, tables, about, several=several) for row in chosen]
    validation = _validation(tables, several=several)
    if validation:
        blocks.append(validation)
    blocks.append(_problem_list(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def step_blocks(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Write everything about each step; for the arguments see `summary`."""
    several = len(about["runs"]) > 1
    blocks = [_step_block(row, tables, about, several=several) for row in tables["step_times"]]
    return "\n\n".join([*blocks, _validation(tables, several=several)]).rstrip() + "\n"


def _headline(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    steps = [row for row in tables["step_times"] if row["finished"]]
    requests = sum(row["requests"] for row in tables["step_times"])
    parts = [f"{counted(len(steps), 'finished step')}, {counted(requests, 'request')}"]
    if steps:
        total = sum(row["duration_s"] for row in steps)
        parts.append(f"{seconds(total)} of training steps, {seconds(total / len(steps))} each")
    parts.append(counted(about["events"], "event"))
    return visible(f"{', '.join(about['runs'])}: {'; '.join(parts)}.")


def _conclusion(row: Mapping[str, Any], tables: Mapping[str, Rows], *, several: bool) -> str:
    """Say in one line how long a step took and what that was."""
    name = _step_name(row, several=several)
    if row["duration_s"] is not None:
        text = f"{name}: {seconds(row['duration_s'])}"
        phases = _of(tables["step_phases"], row)
        if phases:
            longest = phases[0]
            text += f", {share(longest['share'])} {longest['phase']}"
    elif row["step"] == 0:
        text = f"{name} (before the first step): {seconds(row['seen_s'])} recorded"
    else:
        text = f"{name}: not finished or trainer not recorded, {seconds(row['seen_s'])} seen"
    slowest = _of(tables["slowest_requests"], row)
    if slowest:
        text += f"; slowest request {_slowest(slowest[0])}"
    return visible(text + ".")


def lag_weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what sorts rows of lags: a stall where requests wait matters most, then a long one."""
    waits = row["role"] in ("agent_loop", "engine", "reward", "trainer")
    return waits and (row["step"] or 0) > 0, row["max_s"]


def _slowest(request: Mapping[str, Any]) -> str:
    text = f"{_short(request['request_id'])}: {seconds(request['duration_s'])}"
    return f"{text}{of_which(request)}"


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


def _quantiles(row: Mapping[str, Any], *names: str) -> str:
    texts = quantile_texts(row, *names)
    return "  ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _tail_text(tail: Mapping[str, Any], part: int) -> str:
    length = tail[f"after_p{part}_s"]
    return "too few" if length is None else seconds(length)


def _step_lines(steps: Rows, tables: Mapping[str, Rows], *, several: bool) -> str:
    header = ["step", "time", "gen", "requests", "p50", "p95", "max", "tail", "longest phase"]
    lines = [header]
    part = 95 if all(tail["requests"] >= _MANY for tail in tables["step_tail"]) else 80
    for row in steps:
        times = _of(tables["request_times"], row, validate=False)
        tail = _of(tables["step_tail"], row)
        phases = _of(tables["step_phases"], row)
        duration = seconds(row["duration_s"]) if row["finished"] else f"({seconds(row['seen_s'])})"
        lines.append(
            [
                _step_name(row, several=several).removeprefix("step "),
                duration,
                seconds(row["gen_s"]),
                str(row["requests"]),
                *(quantile_texts(times[0], "p50", "p95", "max") if times else "---"),
                _tail_text(tail[0], part) if tail else "-",
                f"{phases[0]['phase']} {share(phases[0]['share'])}" if phases else "-",
            ]
        )
    note = f"\n  tail: from the end of {part} % of the requests to the last."
    if any(not row["finished"] for row in steps):
        note += "\n  Times in parentheses: the step has no end, or its trainer was not recorded."
    return align(lines, left=(0, 8)) + note


def _step_block(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any], *, several: bool
) -> str:
    """Write everything about one step."""
    lines = [
        [phase["phase"], seconds(phase["duration_s"]), share(phase["share"])]
        for phase in _of(tables["step_phases"], row)
    ] or [["phases", "not recorded (no trainer events)"]]
    parts = [align(lines, left=(0,)), *_request_lines(row, tables, about)]
    parts += [
        *_engine_lines(row, tables, about),
        *_tool_lines(row, tables, about),
        *_worker_lines(row, tables),
        *_other_lines(row, tables, about),
    ]
    title = _step_name(row, several=several)
    duration = row["duration_s"]
    total = (
        f"  {seconds(duration)}" if duration is not None else f"  ({seconds(row['seen_s'])} seen)"
    )
    return visible(title + total) + "\n" + "\n".join(parts)


def _request_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    times = _of(tables["request_times"], row, validate=False)
    if not times:
        missing = "none in this step" if "request" in about["recorded"] else "not recorded"
        return [_fact("requests", missing)]
    time = times[0]
    count = counted(time["requests"], "request")
    if time["unfinished"]:
        count += f" ({time['unfinished']} without an end)"
    if time["failed"]:
        count += f" ({time['failed']} failed)"
    result = []
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
        for part in _of(tables["request_parts"], row, validate=False)
        if part["share"] is not None and part["share"] >= 0.001
    ]
    if shares:
        result.append(_fact("components", ", ".join(shares)))
    tail = _of(tables["step_tail"], row)
    if tail:
        part = 95 if tail[0]["requests"] >= _MANY else 80
        text = (
            f"{_tail_text(tail[0], part)} from the end of {part} % of the requests to the last"
            if tail[0][f"after_p{part}_s"] is not None
            else f"too few requests for an end of {part} % of them"
        )
        if tail[0]["poll_s"] is not None:
            text += f"; gen ended {seconds(tail[0]['poll_s'])} after the last"
        result.append(_fact("tail", text))
    slowest = _of(tables["slowest_requests"], row)
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
        result.append(_fact("slowest", f"{_slowest(request)} ({where}: {', '.join(pieces)})"))
    return result


_PARTS = {
    "engine_s": "engine calls",
    "tool_s": "tools",
    "prompt_build_s": "building the prompt",
    "tool_parsing_s": "parsing tool calls",
    "token_merge_s": "merging tokens",
    "postprocess_s": "postprocessing",
    "reward_s": "its reward",
    "other_s": "what no event covers",
}


def _engine_lines(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any]
) -> list[str]:
    times = _of(tables["engine_times"], row, validate=False)
    if not times:
        return [] if "engine_call" in about["recorded"] else [_fact("engine", "not recorded")]
    engine = times[0]
    text = f"{counted(engine['calls'], 'call')}  {_quantiles(engine, 'p50', 'p95', 'max')}"
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
    tools = _of(tables["tool_times"], row, validate=False)
    if not tools:
        if about["recorded"] & {"tool_call", "tool_execution"}:
            return []
        return [_fact("tools", "no tool call recorded")]
    lines = []
    for position, tool in enumerate(tools[:5]):
        failed = f", {tool['failed']} failed" if tool["failed"] else ""
        text = (
            f"{tool['tool']}: {counted(tool['calls'], 'call')}{failed}, {seconds(tool['total_s'])} "
            f"in total, {_quantiles(tool, 'p50', 'p95', 'max')}"
        )
        lines.append(_fact("" if position else "tools", text))
    if len(tools) > 5:
        lines.append(_fact("", f"and {len(tools) - 5} more tools"))
    return lines


def _worker_lines(row: Mapping[str, Any], tables: Mapping[str, Rows]) -> list[str]:
    result = []
    workers = _of(tables["rollout_balance"], row)
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
        for rank in _of(tables["rank_balance"], row)
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
    result = []
    for sync in _of(tables["weight_sync"], row):
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
    transfers = _of(tables["transfer_totals"], row)
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
    lags = [lag for lag in _of(tables["loop_lags"], row) if lag["role"] not in COMPUTING_ROLES]
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
    for position, peak in enumerate(_of(tables["memory_peaks"], row)):
        used = peak["used_bytes"] or peak["reserved_bytes"] or peak["allocated_bytes"]
        of = "" if not peak["total_bytes"] else f" of {size(peak['total_bytes'])}"
        text = f"{peak['role']}: {size(used)}{of} in {peak['name']} ({peak['at']})"
        result.append(_fact("" if position else "memory peak", text))
    for cost in _of(tables["profiler_cost"], row):
        text = f"{seconds(cost['dearest_s'])} in {cost['dearest']}"
        if cost["share"] is not None:
            text += f", {share(cost['share'])} of the step"
        if cost["dearest_cpu_s"] is not None:
            text += f" ({seconds(cost['dearest_cpu_s'])} of it on a core)"
        text += f"; {seconds(cost['wrapper_s'])} in all {cost['processes']} processes"
        if cost["events"] is not None:
            text += f", {cost['events']:,} events"
        if cost["dropped"]:
            text += f", {cost['dropped']} dropped"
        result.append(_fact("profiler", text))
    if not _of(tables["profiler_cost"], row) and "profiler_cost" not in about["recorded"]:
        result.append(_fact("profiler", "its cost was not recorded"))
    return result


def _validation(tables: Mapping[str, Rows], *, several: bool) -> str:
    lines = [["requests", "p50", "p95", "max", "took"]]
    names = [""]
    for time in tables["request_times"]:
        if not time["validate"]:
            continue
        steps = _of(tables["step_times"], time)
        names.append(_step_name(time, several=several))
        lines.append(
            [
                str(time["requests"]),
                *quantile_texts(time, "p50", "p95", "max"),
                seconds(steps[0]["testing_s"]) if steps else "-",
            ]
        )
    if len(lines) == 1:
        return ""
    shown = [[name, *line] for name, line in zip(names, lines, strict=True)]
    return "validation (apart from the steps above)\n" + align(shown, left=(0,))


def _problem_list(problems: Sequence[str]) -> str:
    if not problems:
        return "No problems found in the files."
    shown = [f"  - {visible(problem)}" for problem in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        shown.append(f"  - and {len(problems) - _PROBLEMS} more; --json lists all")
    return "Data-quality warnings\n" + "\n".join(shown)


def _of(rows: Rows, row: Mapping[str, Any], **equal: Any) -> list[Mapping[str, Any]]:
    """Return the rows of the same run and step."""
    return [
        each
        for each in rows
        if each["run"] == row["run"]
        and each["step"] == row["step"]
        and each.get("validate", False) in (equal.get("validate", False), None)
    ]


def _fact(name: str, text: str) -> str:
    return visible(f"  {name:<14}{text}").rstrip()


def _step_name(row: Mapping[str, Any], *, several: bool) -> str:
    return f"step {row['step']}" + (f" of {row['run']}" if several else "")


def _short(request_id: str | None) -> str:
    return "(no id)" if request_id is None else request_id[:8]


def counted(number: int, one: str, many: str | None = None) -> str:
    """Write a number of things: `1 call`, `2,300 calls`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
