"""A run in 20 lines: where the time went, what to change first, requests, data quality; in full, a line per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from verl_profiler.analysis.device_use import idle_time
from verl_profiler.analysis.selection import NOTHING, LeftOut, grouped, steady, summed
from verl_profiler.analysis.steps import step_rows
from verl_profiler.render.text import clipped, wrapped
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, quantile_texts, seconds, share
from verl_profiler.views.findings import short_findings
from verl_profiler.views.headline import phase_lines, steps_text
from verl_profiler.views.ledger_text import ledger_lines
from verl_profiler.views.text_tables import Rows, table_text, warnings

# What an overview is made of.
TABLES = (
    "bubble_ledger",
    "engine_times",
    "step_phases",
    "worker_balance",
    "device_use",
    "step_times",
    "phase_totals",
    "request_totals",
    "request_parts",
    "slowest_requests",
    "tool_latencies",
    "own_spans",
    "profiler_cost",
)

# At most so many lines, whatever the size of the run.
LINES = 20
_RUNS = 5
_PHASES = 3
_TOOLS = 3
_FACTS = 4
_INDENT = 12
# Phases below this share of the devices' idle time are left out of their line.
_LITTLE_IDLE = 0.05
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"
# What is left out last comes first.
_RANKS = ("head", "finding 1", "quality", "phases", "workers", "engine", "devices", "note",
          "requests", "finding 2", "tools", "slowest", "your spans", "finding 3", "profiler")  # fmt: skip


# Lines that are shown together or not at all, by their rank.
_Items = dict[str, list[str]]


def overview_text(
    found: Mapping[str, Rows],
    about: Mapping[str, Any],
    findings: Rows,
    problems: Sequence[str],
    left_out: LeftOut = NOTHING,
    *,
    color: bool = False,
) -> str:
    """Return a run's overview, of at most `LINES` lines.

    Args:
        found: Rows by name, of `TABLES`.
        about: `runs` (labels), `events` (how many) and `notes` (of the reader).
        findings: Rows of `views.findings.findings`.
        problems: Data-quality warnings.
        left_out: The steps that means leave out; `phase_totals` is without them.
        color: With ANSI codes for a terminal.
    """

    def bold(text: str) -> str:
        return f"{_BOLD}{text}{_RESET}" if color else text

    runs = about["runs"]
    heads: list[str] = []
    facts: _Items = {}
    for run in runs[:_RUNS]:
        own = _of_run(found, run)
        heads += map(bold, wrapped(_headline(run, own, left_out, findings), _INDENT))
        if len(runs) == 1:
            heads += _phases(own["phase_totals"], count=_PHASES)
            facts = _facts(own, left_out)
        elif own["phase_totals"]:
            phases = own["phase_totals"][:_PHASES]
            largest = (
                f"{row['phase']} {share(row['share'])} ({seconds(row['mean_s'])})" for row in phases
            )
            heads.append(clipped(f"  {', '.join(largest)}"))
    if len(runs) > _RUNS:
        heads.append(f"and {len(runs) - _RUNS} more runs: summary -v")
    facts |= {"note": [f"Note: {note}" for note in about["notes"][:1]]}
    facts |= {"quality": [_quality(problems)]}
    changes = {f"finding {n}": lines for n, lines in enumerate(short_findings(findings), 1)}
    # Two empty lines divide the blocks, and the findings have a title.
    kept = _fitting({"head": heads, **changes, **facts}, LINES - 3)
    listed = [lines for rank, lines in changes.items() if rank in kept]
    title = (
        "What to change first (gains per step, not additive)"
        if findings
        else _changes_title(found, about)
    )
    if len(findings) > len(listed):
        title += f"; {len(listed)} of {len(findings)}, -v has all"
    blocks = [
        heads,
        [*([bold(title)] if title else []), *chain.from_iterable(listed)],
        [clipped(line) for rank, lines in facts.items() if rank in kept for line in lines],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _changes_title(found: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Return that there are no findings; empty without a finished step."""
    if not any(row["finished"] for row in found["step_times"] if row["step"] > 0):
        return ""
    # Notes state what could not be replayed, or was not recorded.
    return "No anomaly was found" + (
        ", as far as the notes below allow." if about["notes"] else "."
    )


def head_text(
    found: Mapping[str, Rows], runs: Sequence[str], left_out: LeftOut, findings: Rows
) -> str:
    """Return a line for each run: its steps and how long they took."""
    return "\n".join(
        visible(_headline(run, _of_run(found, run), left_out, findings)) for run in runs
    )


def totals_text(found: Mapping[str, Rows], runs: Sequence[str], left_out: LeftOut) -> str:
    """Return all phases and facts of each run, whatever room they take."""
    blocks: list[str] = []
    for run in runs:
        own = _of_run(found, run)
        phases = _phases(own["phase_totals"], whole=True)
        lines = [*phases, *map(visible, chain.from_iterable(_facts(own, left_out).values()))]
        blocks.append("\n".join([visible(run), *lines] if len(runs) > 1 else lines))
    return "\n\n".join(block for block in blocks if block)


def _fitting(items: _Items, room: int) -> set[str]:
    """Return the ranks of what there is room for, by `_RANKS`; the first three always."""
    kept: set[str] = set()
    for rank in sorted(items, key=_RANKS.index):
        if len(items[rank]) <= room or rank in _RANKS[:3]:
            kept.add(rank)
            room -= len(items[rank])
    return kept


def _of_run(found: Mapping[str, Rows], run: str) -> dict[str, Rows]:
    return {name: [row for row in rows if row["run"] == run] for name, rows in found.items()}


def _facts(found: Mapping[str, Rows], left_out: LeftOut) -> _Items:
    """Return what is known of a run besides its phases, a line each."""
    devices = device_line(steady(found["device_use"], left_out))
    texts = {
        **_without_requests(found),
        "devices": [*ledger_lines(found["bubble_ledger"], left_out), devices],
        "requests": [_requests(found)],
        "slowest": [_slowest(found)],
        "tools": [_calls(found["tool_latencies"], "tool")],
        "your spans": [_calls(found["own_spans"], "event")],
        "profiler": [_cost(found["profiler_cost"])],
    }
    return {
        label: [
            f"{'' if place else label:<{_INDENT}}{text}"
            for place, text in enumerate(filter(None, own))
        ]
        for label, own in texts.items()
    }


def device_line(rows: Rows) -> str:
    """Return a run's sampled utilization after start-up in a line; empty without samples."""
    found = idle_time(rows)
    if not found:
        return ""
    # Phases that have not ended are not among them.
    text = (
        f"{counted(found['devices'], 'device')} sampled over {seconds(found['each_s'])} of finished phases: "
        f"idle {share(found['share'])} of the time"
    )
    named = [
        f"{phase} {share(part)}"
        for phase, part in [*found["phases"].items()][:_PHASES]
        if part >= _LITTLE_IDLE
    ]
    return f"{text} ({', '.join(named)} of that)" if named else text


def _without_requests(found: Mapping[str, Rows]) -> dict[str, list[str]]:
    """Return what is known of a run without finished steps and requests, as those of the original logger."""
    if found["phase_totals"] or found["request_totals"]:
        return {}
    phases = grouped(found["step_phases"], "phase").items()
    means = sorted(
        ((fmean(row["duration_s"] for row in own), name) for name, own in phases), reverse=True
    )
    text = ", ".join(f"{name} {seconds(mean)}" for mean, name in means[:_FACTS])
    texts = {"phases": [text and f"{text} per step (one may contain another)"]}
    several = [row for row in found["worker_balance"] if row["processes"] > 1]
    if several:
        row = max(several, key=lambda row: row["waited_s"])
        slowest = f"{row['slowest']} {seconds(row['slowest_s'])} (step {row['step']})"
        text = f"{row['phase']}: {slowest}, median of {row['processes']} {seconds(row['median_s'])}"
        texts["workers"] = [text]
    if found["engine_times"]:
        row = max(found["engine_times"], key=lambda row: row["max_s"])
        calls = sum(row["calls"] for row in found["engine_times"])
        times = f"p50 {seconds(row['p50_s'])} max {seconds(row['max_s'])}"
        texts["engine"] = [f"{calls:,} calls; step {row['step']} has the longest: {times}"]
    return texts


def _headline(run: str, found: Mapping[str, Rows], left_out: LeftOut, findings: Rows) -> str:
    finished = [row for row in found["step_times"] if row["finished"]]
    if not finished:
        seen = max((row["seen_s"] or 0 for row in found["step_times"]), default=0)
        requests = sum(row["requests"] or 0 for row in found["step_times"])
        text = f"{run}: no finished steps; {seconds(seen)} were recorded"
        return f"{text}, with {counted(requests, 'request')}" if requests else text
    # That of which findings are shares, so with what follows the last step.
    apart_s = next((row["step_s"] for row in findings if row["run"] == run), 0.0)
    lengths = {row["step"]: row["duration_s"] for row in finished}
    return steps_text(run, lengths, left_out.get(run, ()), apart_s)


def _phases(rows: Rows, **bounds: Any) -> list[str]:
    return phase_lines(rows, several=bool(rows) and rows[0]["steps"] > 1, **bounds)


def _requests(found: Mapping[str, Rows]) -> str:
    if not found["request_totals"]:
        return ""
    (row,) = found["request_totals"]
    # What has too few requests is left out.
    names = [name for name in ("p50", "p95", "p99") if row[f"{name}_s"] is not None]
    times = zip([*names, "max"], quantile_texts(row, *names, "max"), strict=True)
    bad = [f"{row[key]:,} {key}" for key in ("failed", "unfinished") if row[key]]
    text = ", ".join([f"{row['requests']:,}", *bad]) + ": "
    text += "  ".join(f"{name} {value}" for name, value in times)
    if row["mean_turns"] is not None:
        text += f"; {row['mean_turns']:.1f} turns"
    trained = (row for row in found["request_parts"] if not row["validate"])
    sums = summed(trained, "total_s", "part")
    total = sum(sums.values())
    largest = [*sums.items()][:3]
    if total:
        text += "; " + ", ".join(
            f"{share(spent / total)} {part}" for part, spent in largest if spent
        )
    return text


def _slowest(found: Mapping[str, Rows]) -> str:
    rows = [row for row in found["slowest_requests"] if row["duration_s"] is not None]
    if not rows:
        return ""
    row = max(rows, key=lambda each: each["duration_s"])
    name = (row["request_id"] or "(no id)")[:8]
    text = f"request {name}, step {row['step']}, {row['name']}: {seconds(row['duration_s'])}"
    return text + of_which(row)


def _calls(rows: Rows, name: str) -> str:
    texts = [
        f"{row[name]} {'≈ ' if row.get('estimated') else ''}{row['calls']:,} × "
        f"p50 {seconds(row['p50_s'])} max {seconds(row['max_s'])}"
        + (f", {row['failed']:,} failed" if row["failed"] else "")
        for row in rows[:_TOOLS]
    ]
    more = [f"and {len(rows) - _TOOLS} more"] if len(rows) > _TOOLS else []
    return "; ".join([*texts, *more])


def _cost(rows: Rows) -> str:
    shares = [row for row in rows if row["share"] is not None]
    if not shares:
        return ""
    row = max(shares, key=lambda each: each["share"])
    return f"at most {share(row['share'])} of a step ({row['costliest']}, step {row['step']})"


def _quality(problems: Sequence[str]) -> str:
    if not problems:
        return "Data quality: no problems found in the files."
    many = len(problems)
    title = f"Data quality, 1 of {many} warnings (-v has all)" if many > 1 else "Data quality"
    return f"{title}: {problems[0]}"


# Of more steps, the longest have a line.
_STEP_LINES = 60
_QUANTILES = ("p50_s", "p95_s", "max_s")


def summary(tables: Mapping[str, Rows], about: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Write what happened in a run.

    Args:
        tables: The rows of the analyses, by name.
        about: `runs` (labels), `head`, `findings` and `totals` (their texts), `notes` (of the reader).
        problems: Plain sentences; they come last.
    """
    several = len(about["runs"]) > 1
    steps: Rows = step_rows(tables)
    steps = [row for row in steps if row["step"] or row["requests"] or row["finished"]] or steps
    blocks = [about["head"], about["findings"], about["totals"]]
    blocks.append(_step_lines(steps, several=several))
    blocks += [visible(f"Note: {note}") for note in about["notes"]]
    blocks.append(warnings(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _step_lines(steps: Rows, *, several: bool) -> str:
    columns = [
        *(["run"] if several else []),
        *("step", "duration_s", "gen_s", "requests", *_QUANTILES, "after_p80_s"),
        *("longest_phase", "longest_share"),
    ]
    title = "steps (after P80: from the end of 80 % of the requests to the last)"
    note = ""
    if len(steps) > _STEP_LINES:
        title += (
            f"; the {_STEP_LINES} longest of {len(steps)}, --steps FIRST:LAST has a line for each"
        )
        lengths = {id(row): row["duration_s"] or row["seen_s"] for row in steps}
        longest = sorted(lengths, key=lambda step: lengths[step])[-_STEP_LINES:]
        steps = [row for row in steps if id(row) in longest]
    if any(not row["finished"] for row in steps):
        columns.append("seen_s")
        note = "\n  without a duration: the step has no end, or its trainer was not recorded"
    return table_text(title, steps, columns, "step_times", _STEP_LINES) + note


_PART_NAMES = {
    "engine_s": "engine calls",
    "tool_s": "tools",
    "prompt_build_s": "building the prompt",
    "tool_parsing_s": "parsing tool calls",
    "token_merge_s": "merging tokens",
    "postprocess_s": "postprocessing",
    "reward_s": "its reward",
    "other_s": "unattributed time",
}


def of_which(request: Mapping[str, Any]) -> str:
    """Describe what a row of `slowest_requests` consists of: its largest part.

    Returns:
        Text to append; empty if no part is known.
    """
    spent = {part: request.get(key) or 0.0 for key, part in _PART_NAMES.items()}
    most = max(spent, key=lambda part: spent[part])
    amount = seconds(spent[most])
    amount = "all" if amount == seconds(request.get("duration_s")) else amount
    return f", {amount} of it in {most}" if spent[most] else ""
