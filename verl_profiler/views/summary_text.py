"""The summary of a run as text for a terminal: the conclusion first, then a line per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.steps import step_rows
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds
from verl_profiler.views.text_tables import Rows, table_text, warnings

# Of more steps, the longest have a line.
_LINES = 60
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
    if len(steps) > _LINES:
        title += f"; the {_LINES} longest of {len(steps)}, --steps FIRST:LAST has a line for each"
        lengths = {id(row): row["duration_s"] or row["seen_s"] for row in steps}
        longest = sorted(lengths, key=lambda step: lengths[step])[-_LINES:]
        steps = [row for row in steps if id(row) in longest]
    if any(not row["finished"] for row in steps):
        columns.append("seen_s")
        note = "\n  without a duration: the step has no end, or its trainer was not recorded"
    return table_text(title, steps, columns, "step_times", _LINES) + note


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
