"""The summary of a run as text for a terminal: the conclusion first, then the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import added, counted, quantile_texts, seconds, share
from verl_profiler.views.step_text import (
    TAIL_REQUESTS,
    of_step,
    slowest_text,
    step_block,
    step_name,
    tail_text,
)

__all__ = ["step_blocks", "summary"]

Rows = Sequence[Mapping[str, Any]]

# More steps than this get one line each, and only the longest of them a block of their own.
_BLOCKS = 5
# More than this share lines, at most so many.
_LINES = 60
_RANGES = 40
_VALIDATIONS = 20
_PROBLEMS = 40


def summary(tables: Mapping[str, Rows], about: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Write what happened in a run.

    Args:
        tables: The rows of the analyses, by name.
        about: `runs` (labels), `events` (how many), `recorded` (names of events that occur),
            `findings` and `totals` (their texts), `notes` (of the reader).
        problems: Plain sentences; they come last.
    """
    steps = tables["step_times"]
    several = len(about["runs"]) > 1
    blocks = [_headline(tables, about), about["findings"], about["totals"]]
    trained = [row for row in steps if row["step"] or row["requests"] or row["finished"]] or steps
    if len(trained) > _BLOCKS:
        lines = _step_lines if len(trained) <= _LINES else _range_lines
        blocks.append(lines(trained, tables, several=several))
        longest = sorted(trained, key=lambda row: -(row["duration_s"] or row["seen_s"]))[:_BLOCKS]
        chosen = [row for row in trained if any(row is each for each in longest)]
        blocks.insert(2, f"longest: {_conclusion(longest[0], tables, several=several)}")
        blocks.append(
            f"The {_BLOCKS} longest of {len(trained)} steps follow; --step N shows any other."
        )
    else:
        chosen = trained
        blocks.append("\n".join(_conclusion(row, tables, several=several) for row in trained))
    blocks += [step_block(row, tables, about, several=several) for row in chosen]
    validation = _validation(tables, several=several)
    if validation:
        blocks.append(validation)
    blocks += [visible(f"Note: {note}") for note in about["notes"]]
    blocks.append(_problem_list(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def step_blocks(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Write everything about each step; for the arguments see `summary`."""
    several = len(about["runs"]) > 1
    blocks = [step_block(row, tables, about, several=several) for row in tables["step_times"]]
    return "\n\n".join([*blocks, _validation(tables, several=several)]).rstrip() + "\n"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _headline(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    steps = [row for row in tables["step_times"] if row["finished"]]
    requests = added(row["requests"] for row in tables["step_times"])
    made = "requests not recorded" if requests is None else counted(requests, "request")
    parts = [f"{counted(len(steps), 'finished step')}, {made}"]
    if steps:
        total = sum(row["duration_s"] for row in steps)
        parts.append(f"{seconds(total)} of training steps, {seconds(total / len(steps))} each")
    parts.append(counted(about["events"], "event"))
    return visible(f"{', '.join(about['runs'])}: {'; '.join(parts)}.")


def _conclusion(row: Mapping[str, Any], tables: Mapping[str, Rows], *, several: bool) -> str:
    """Say in one line how long a step took and what that was."""
    name = step_name(row, several=several)
    if row["duration_s"] is not None:
        text = f"{name}: {seconds(row['duration_s'])}"
        phases = of_step(tables["step_phases"], row)
        if phases:
            longest = phases[0]
            text += f", {share(longest['share'])} {longest['phase']}"
    elif row["step"] == 0:
        text = f"{name} (before the first step): {seconds(row['seen_s'])} recorded"
    else:
        text = f"{name}: not finished or trainer not recorded, {seconds(row['seen_s'])} seen"
    slowest = of_step(tables["slowest_requests"], row)
    if slowest:
        text += f"; slowest request {slowest_text(slowest[0])}"
    return visible(text + ".")


def _step_lines(steps: Rows, tables: Mapping[str, Rows], *, several: bool) -> str:
    header = ["step", "time", "gen", "requests", "p50", "p95", "max", "tail", "longest phase"]
    lines = [header]
    part = 95 if all(tail["requests"] >= TAIL_REQUESTS for tail in tables["step_tail"]) else 80
    for row in steps:
        times = of_step(tables["request_times"], row, validate=False)
        tail = of_step(tables["step_tail"], row)
        phases = of_step(tables["step_phases"], row)
        duration = seconds(row["duration_s"]) if row["finished"] else f"({seconds(row['seen_s'])})"
        lines.append(
            [
                step_name(row, several=several).removeprefix("step "),
                duration,
                seconds(row["gen_s"]),
                _number(row["requests"]),
                *(quantile_texts(times[0], "p50", "p95", "max") if times else "---"),
                tail_text(tail[0], part) if tail else "-",
                f"{phases[0]['phase']} {share(phases[0]['share'])}" if phases else "-",
            ]
        )
    note = f"\n  tail: from the end of {part} % of the requests to the last."
    if any(not row["finished"] for row in steps):
        note += "\n  Times in parentheses: the step has no end, or its trainer was not recorded."
    return align(lines, left=(0, 8)) + note


def _range_lines(steps: Rows, tables: Mapping[str, Rows], *, several: bool) -> str:
    """Have a line for every so many steps of a run: means, the longest step, the slowest request."""
    most = max(_RANGES, len({row["run"] for row in steps}))
    size = next(size for size in _sizes() if len(_ranges(steps, size)) <= most)
    ranges = _ranges(steps, size)
    of_range = {(row["run"], row["step"]): key for key, rows in ranges.items() for row in rows}
    phases: dict[tuple[str, int], Counter[str]] = {key: Counter() for key in ranges}
    for phase in tables["step_phases"]:
        if (phase["run"], phase["step"]) in of_range:
            phases[of_range[phase["run"], phase["step"]]][phase["phase"]] += phase["duration_s"]
    slowest_s: dict[tuple[str, int], float] = {}
    for times in tables["request_times"]:
        key = of_range.get((times["run"], times["step"]))
        if key is not None and not times["validate"] and times["max_s"] is not None:
            slowest_s[key] = max(slowest_s.get(key, 0.0), times["max_s"])
    lines = [["steps", "mean", "longest", "", "gen", "requests", "max", "longest phase"]]
    for key, rows in ranges.items():
        finished = [row for row in rows if row["finished"]]
        longest = max(finished, key=lambda row: row["duration_s"], default=None)
        phase = phases[key].most_common(1)
        lines.append(
            [
                _range_name(rows, several=several),
                seconds(mean(row["duration_s"] for row in finished)) if finished else "-",
                seconds(longest["duration_s"]) if longest else "-",
                f"(step {longest['step']})" if longest else "",
                seconds(_mean_of(finished, "gen_s")),
                _number(added(row["requests"] for row in rows)),
                seconds(slowest_s.get(key)),
                f"{phase[0][0]} {share(phase[0][1] / phases[key].total())}" if phase else "-",
            ]
        )
    longest = max(steps, key=lambda row: row["duration_s"] or row["seen_s"])
    rows = ranges[of_range[longest["run"], longest["step"]]]
    note = (
        f"\n  Means of up to {size} steps, without those that have no end; "
        f"--steps {rows[0]['step']}:{rows[-1]['step']} has a line for each."
    )
    return align(lines, left=(0, 3, 7)) + note


def _sizes() -> Iterator[int]:
    return (factor * 10**power for power in range(12) for factor in (2, 5, 10))


def _ranges(steps: Rows, size: int) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Return the steps by run and number, in groups of `size`."""
    result: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in steps:
        result.setdefault((row["run"], (row["step"] - 1) // size), []).append(row)
    return result


def _range_name(rows: Rows, *, several: bool) -> str:
    name = step_name(rows[0], several=several).removeprefix("step ")
    first = str(rows[0]["step"])
    return name if len(rows) == 1 else f"{first}-{rows[-1]['step']}{name.removeprefix(first)}"


def _mean_of(rows: Rows, column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return mean(values) if values else None


def _validation(tables: Mapping[str, Rows], *, several: bool) -> str:
    lines = [["requests", "p50", "p95", "max", "took"]]
    names = [""]
    for time in tables["request_times"]:
        if not time["validate"]:
            continue
        steps = of_step(tables["step_times"], time)
        names.append(step_name(time, several=several))
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
    title = "validation (not included above)"
    if len(shown) > 1 + _VALIDATIONS:
        title = f"validation (not included above), the last {_VALIDATIONS} of {len(shown) - 1}"
        shown[1:] = shown[-_VALIDATIONS:]
    return f"{title}\n{align(shown, left=(0,))}"


def _problem_list(problems: Sequence[str]) -> str:
    if not problems:
        return "No problems found in the files."
    shown = [f"  - {visible(problem)}" for problem in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        shown.append(f"  - and {len(problems) - _PROBLEMS} more; --json lists all")
    return "Data-quality warnings\n" + "\n".join(shown)
