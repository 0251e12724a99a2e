"""The summary of a run as text for a terminal: the conclusion first, then the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from verl_profiler.render.visible import visible
from verl_profiler.units import added
from verl_profiler.views.step_rows import step_rows
from verl_profiler.views.step_text import of_step, step_block
from verl_profiler.views.text_tables import table_text

__all__ = ["step_blocks", "summary"]

Rows = Sequence[Mapping[str, Any]]

# More steps than this get one line each, and only the longest of them a block of their own.
_BLOCKS = 5
# More than this share lines, at most so many.
_LINES = 60
_RANGES = 40
_VALIDATIONS = 20
_PROBLEMS = 40
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
    blocks.append((_step_lines if len(steps) <= _LINES else _range_lines)(steps, several=several))
    chosen = sorted(steps, key=lambda row: -(row["duration_s"] or row["seen_s"]))[:_BLOCKS]
    if len(steps) > _BLOCKS:
        blocks.append(
            f"The {_BLOCKS} longest of {len(steps)} steps follow; --step N shows any other."
        )
    blocks += [
        step_block(row, tables, about, several=several)
        for row in steps
        if any(row is each for each in chosen)
    ]
    blocks.append(_validation(tables, several=several))
    blocks += [visible(f"Note: {note}") for note in about["notes"]]
    blocks.append(_problem_list(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def step_blocks(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Write everything about each step; for the arguments see `summary`."""
    several = len(about["runs"]) > 1
    blocks = [step_block(row, tables, about, several=several) for row in tables["step_times"]]
    return "\n\n".join([*blocks, _validation(tables, several=several)]).rstrip() + "\n"


def _step_lines(steps: Rows, *, several: bool) -> str:
    columns = [
        *(["run"] if several else []),
        *("step", "duration_s", "gen_s", "requests", *_QUANTILES, "after_p80_s"),
        *("longest_phase", "longest_share"),
    ]
    title, note = "steps (after P80: from the end of 80 % of the requests to the last)", ""
    if any(not row["finished"] for row in steps):
        columns.append("seen_s")
        note = "\n  without a duration: the step has no end, or its trainer was not recorded"
    return table_text(title, steps, columns, "step_times", _LINES) + note


def _range_lines(steps: Rows, *, several: bool) -> str:
    """Have a line for every so many steps of a run: means, the longest step, the slowest request."""
    most = max(_RANGES, len({row["run"] for row in steps}))
    sizes = (factor * 10**power for power in range(12) for factor in (2, 5, 10))
    size = next(size for size in sizes if len(_ranges(steps, size)) <= most)
    rows: list[dict[str, Any]] = []
    for (run, _), own in _ranges(steps, size).items():
        finished = [row for row in own if row["finished"]]
        longest = max(finished, key=lambda row: row["duration_s"], default=None)
        rows.append(
            {
                "run": run,
                "steps": f"{own[0]['step']}-{own[-1]['step']}".removesuffix(f"-{own[0]['step']}"),
                "mean_s": _mean_of(finished, "duration_s"),
                "longest_s": longest and longest["duration_s"],
                "longest_step": longest and longest["step"],
                "gen_s": _mean_of(finished, "gen_s"),
                "requests": added(row["requests"] for row in own),
                "max_s": max(
                    (row["max_s"] for row in own if row["max_s"] is not None), default=None
                ),
            }
        )
    title = f"steps, means of up to {size}; --steps FIRST:LAST has a line for each"
    return table_text(title, rows, [*rows[0]][not several :], most=most)


def _ranges(steps: Rows, size: int) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Return the steps by run and number, in groups of `size`."""
    result: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in steps:
        result.setdefault((row["run"], (row["step"] - 1) // size), []).append(row)
    return result


def _mean_of(rows: Rows, column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return fmean(values) if values else None


def _validation(tables: Mapping[str, Rows], *, several: bool) -> str:
    rows = [
        {
            **row,
            "testing_s": next((s["testing_s"] for s in of_step(tables["step_times"], row)), None),
        }
        for row in tables["request_times"]
        if row["validate"]
    ]
    left = f", the last {_VALIDATIONS} of {len(rows)}" if len(rows) > _VALIDATIONS else ""
    columns = [*(["run"] if several else []), "step", "requests", *_QUANTILES, "testing_s"]
    title = f"validation (not included above){left}"
    return table_text(title, rows[-_VALIDATIONS:], columns, "request_times")


def _problem_list(problems: Sequence[str]) -> str:
    if not problems:
        return "No problems found in the files."
    shown = [f"  - {visible(problem)}" for problem in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        shown.append(f"  - and {len(problems) - _PROBLEMS} more; --json lists all")
    return "Data-quality warnings\n" + "\n".join(shown)
