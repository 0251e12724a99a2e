"""The summary of a run as text for a terminal: the conclusion first, then the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.visible import visible
from verl_profiler.views.step_rows import step_rows
from verl_profiler.views.step_text import step_tables
from verl_profiler.views.text_tables import Rows, table_text, warnings

__all__ = ["step_blocks", "summary"]


# Only so many steps, the longest, are shown in detail.
_DETAILED = 5
# Of more, the longest have a line.
_LINES = 60
_VALIDATIONS = 20
_QUANTILES = ("p50_s", "p95_s", "max_s")


def summary(tables: Mapping[str, Rows], about: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Write what happened in a run.

    Args:
        tables: The rows of the analyses, by name.
        about: `runs` (labels), `recorded` (names of events that occur), `head`, `findings` and `totals`
            (their texts), `notes` (of the reader).
        problems: Plain sentences; they come last.
    """
    several = len(about["runs"]) > 1
    steps: Rows = step_rows(tables)
    steps = [row for row in steps if row["step"] or row["requests"] or row["finished"]] or steps
    blocks = [about["head"], about["findings"], about["totals"]]
    blocks.append(_step_lines(steps, several=several))
    chosen = sorted(steps, key=_length)[-_DETAILED:]
    if len(steps) > _DETAILED:
        blocks.append(
            f"The {_DETAILED} longest of {len(steps)} steps follow; --step N shows any other."
        )
    blocks += step_tables(chosen, tables, about, several=several)
    blocks.append(_validation(tables, several=several))
    blocks += [visible(f"Note: {note}") for note in about["notes"]]
    blocks.append(warnings(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def step_blocks(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Write everything about the steps; for the arguments see `summary`."""
    several = len(about["runs"]) > 1
    blocks = step_tables(tables["step_times"], tables, about, several=several)
    blocks.append(_validation(tables, several=several))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _length(row: Mapping[str, Any]) -> float:
    return row["duration_s"] or row["seen_s"]


def _step_lines(steps: Rows, *, several: bool) -> str:
    columns = [
        *(["run"] if several else []),
        *("step", "duration_s", "gen_s", "requests", *_QUANTILES, "after_p80_s"),
        *("longest_phase", "longest_share"),
    ]
    title, note = "steps (after P80: from the end of 80 % of the requests to the last)", ""
    if len(steps) > _LINES:
        title += f"; the {_LINES} longest of {len(steps)}, --steps FIRST:LAST has a line for each"
        longest = {id(row) for row in sorted(steps, key=_length)[-_LINES:]}
        steps = [row for row in steps if id(row) in longest]
    if any(not row["finished"] for row in steps):
        columns.append("seen_s")
        note = "\n  without a duration: the step has no end, or its trainer was not recorded"
    return table_text(title, steps, columns, "step_times", _LINES) + note


def _validation(tables: Mapping[str, Rows], *, several: bool) -> str:
    testing = {(row["run"], row["step"]): row["testing_s"] for row in tables["step_times"]}
    rows = [
        {**row, "testing_s": testing.get((row["run"], row["step"]))}
        for row in tables["request_times"]
        if row["validate"]
    ]
    left = f", the last {_VALIDATIONS} of {len(rows)}" if len(rows) > _VALIDATIONS else ""
    columns = [*(["run"] if several else []), "step", "requests", *_QUANTILES, "testing_s"]
    title = f"validation (not included above){left}"
    return table_text(title, rows[-_VALIDATIONS:], columns, "request_times")
