"""The timers in a console log: steps, what fills them, tokens per second, statistics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise

from verl_profiler.analysis.explain.rules import BETWEEN
from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.timer_places import (
    STEP_TIMER,
    TIMER,
    Place,
    is_count,
    timer_places,
    timers_of,
    tolerance_s,
)
from verl_profiler.reading.formats.console_steps import LoggedRun, StepLine

_PER = "timing_per_token_ms/"
# Lines that are further apart have times of different clocks: the time of day, and the time since the launch.
_ONE_CLOCK_S = 1e8
# Their milliseconds are per token of the responses; all others count the prompts too.
_PER_RESPONSE_TOKEN = ("gen", "generate_sequences", "gen_max")


def logged_phases(run: LoggedRun) -> Rows:
    """Cut each step into its timers and the rest that none covers.

    Returns:
        One row per step and timer that is no child of another, as verl lists them, `unaccounted`
        last: step, phase, duration_s, place (of `Place`), reason, share (of the step; None outside
        of it).  A step without `timing_s/step` has no `unaccounted` and no shares.  `between_steps` is
        known where the lines have times, or the log has the trainer's progress bar.
    """
    rows: Rows = []
    for lines, places in _launches(run):
        for line in lines:
            step_s = line.values.get(STEP_TIMER)
            # What a timer takes that is not a number is unknown.
            left_s = None if line.partial else step_s
            for name, duration_s in timers_of(line).items():
                place, reason = places[name]
                if place not in ("step", "outside", "overlapping"):
                    continue
                share = None
                if place == "step" and step_s is not None and left_s is not None:
                    left_s -= duration_s
                    share = duration_s / step_s if step_s > 0 else None
                rows.append(
                    {
                        "step": line.step,
                        "phase": name,
                        "duration_s": duration_s,
                        "place": place,
                        "reason": reason,
                        "share": share,
                    }
                )
            if step_s is not None and left_s is not None:
                rest_s = max(left_s, 0.0) if left_s > tolerance_s(line) else 0.0
                rows.append(
                    {
                        "step": line.step,
                        "phase": "unaccounted",
                        "duration_s": rest_s,
                        "place": "step",
                        "reason": "",
                        "share": rest_s / step_s if step_s > 0 else None,
                    }
                )
        rows += _between(lines, rows)
    return rows


def _between(lines: list[StepLine], rows: Rows) -> Rows:
    """Return the time from the end of each step to the start of the next, where its lines have times.

    These may be whole seconds: only the time from the first line to the last one is exact.
    """
    known: dict[int, float] = {}
    for row in rows:
        if row["place"] in ("step", "outside"):
            known[row["step"]] = known.get(row["step"], 0.0) + row["duration_s"]
    apart = {
        before.step: line.printed_s - before.printed_s - known.get(line.step, 0.0)
        for before, line in pairwise(lines)
        if line.printed_s is not None
        and before.printed_s is not None
        and line.step == before.step + 1
        and abs(line.printed_s - before.printed_s) < _ONE_CLOCK_S
    }
    whole_s, later_s = sum(apart.values()), sum(max(each, 0.0) for each in apart.values())
    if whole_s < len(apart):
        return []
    return [
        {
            "step": step,
            "phase": BETWEEN,
            "duration_s": max(each, 0.0) * whole_s / later_s,
            "place": "outside",
            "reason": "by the times of the lines, or the progress bar",
            "share": None,
        }
        for step, each in apart.items()
    ]


def logged_steps(run: LoggedRun) -> Rows:
    """List the steps.

    Returns:
        One row per step: step, launch (from 1), first_of_launch, step_s (None where the log lacks
        it), accounted_s (its timers together), overlap_s (by how much they are longer than it),
        outside_s, validated, checkpoint, total_tokens, gpus, tokens_per_s_per_gpu (verl's
        `perf/throughput`), tokens_per_s (of the job; None where the GPUs are not known).
    """
    sums: dict[int, dict[str, float]] = {}
    for row in logged_phases(run):
        if row["phase"] != "unaccounted":
            sums.setdefault(row["step"], dict.fromkeys(("step", "outside", "overlapping"), 0.0))
            sums[row["step"]][row["place"]] += row["duration_s"]
    rows: Rows = []
    for launch, (lines, _) in enumerate(_launches(run), 1):
        for line in lines:
            step_s = line.values.get(STEP_TIMER, line.values.get("perf/time_per_step"))
            each = line.values.get("perf/throughput")
            gpus = _gpus(line.values)
            found = sums.get(line.step, {"step": 0.0, "outside": 0.0})
            over_s = found["step"] - (step_s if step_s is not None else found["step"])
            rows.append(
                {
                    "step": line.step,
                    "launch": launch,
                    "first_of_launch": line is lines[0],
                    "step_s": step_s,
                    "accounted_s": found["step"],
                    "overlap_s": over_s if over_s > tolerance_s(line) else 0.0,
                    "outside_s": found["outside"],
                    "validated": line.validated,
                    "checkpoint": f"{TIMER}save_checkpoint" in line.values,
                    "total_tokens": line.values.get("perf/total_num_tokens"),
                    "gpus": gpus,
                    "tokens_per_s_per_gpu": each,
                    "tokens_per_s": each * gpus if each is not None and gpus is not None else None,
                }
            )
    return rows


def generation_times(run: LoggedRun) -> Rows:
    """List `gen` and what verl measured inside it, with `old_log_prob`, which follows it.

    Returns:
        One row per step and timer: step, timer, duration_s, inside (of gen).
    """
    rows: Rows = []
    for lines, places in _launches(run):
        for line in lines:
            rows += [
                {
                    "step": line.step,
                    "timer": name,
                    "duration_s": duration_s,
                    "inside": places[name].place == "gen",
                }
                for name, duration_s in timers_of(line).items()
                if places[name].place == "gen" or name in ("gen", "old_log_prob")
            ]
    return rows


def per_token_times(run: LoggedRun) -> Rows:
    """List verl's times per token.

    Returns:
        One row per step and timer: step, timer, ms_per_token, tokens (`response`, or `all` for
        prompts and responses).
    """
    return [
        {
            "step": line.step,
            "timer": name.removeprefix(_PER),
            "ms_per_token": value,
            "tokens": "response" if name.removeprefix(_PER) in _PER_RESPONSE_TOKEN else "all",
        }
        for line in run.lines
        for name, value in line.values.items()
        if name.startswith(_PER)
    ]


def metric_summary(run: LoggedRun) -> Rows:
    """Summarize every timer that is no count, what no timer covers, and verl's `perf/` numbers.

    Returns:
        One row per metric: metric, place (of a timer in the last launch; else None), steps (that
        have it), mean, std (population), min, max, median.  `timing_s/step` is first.
    """
    values: dict[str, list[float]] = {STEP_TIMER: []}
    for line in run.lines:
        for name, value in line.values.items():
            if not name.startswith(TIMER) or not is_count(name):
                values.setdefault(name, []).append(value)
    for row in logged_phases(run):
        if row["phase"] == "unaccounted":
            values.setdefault(f"{TIMER}unaccounted", []).append(row["duration_s"])
    for row in logged_steps(run):
        if row["tokens_per_s"] is not None:
            values.setdefault("tokens_per_s", []).append(row["tokens_per_s"])
    *_, (_, places) = _launches(run)
    return [
        {
            "metric": name,
            "place": places[name.removeprefix(TIMER)].place
            if name.removeprefix(TIMER) in places
            else None,
            "steps": len(each),
            "mean": statistics.fmean(each),
            "std": statistics.pstdev(each),
            "min": min(each),
            "max": max(each),
            "median": statistics.median(each),
        }
        for name, each in values.items()
        if each
    ]


def _launches(run: LoggedRun) -> list[tuple[list[StepLine], dict[str, Place]]]:
    """Return the lines of each launch, and the places of its timers."""
    launches: list[list[StepLine]] = []
    begins = set(run.begins)
    for line in run.lines:
        if line.step in begins or not launches:
            launches.append([])
        launches[-1].append(line)
    return [(lines, timer_places(lines)) for lines in launches]


def _gpus(values: Mapping[str, float]) -> int | None:
    """Return the number of GPUs, by which verl divides the throughput."""
    tokens, seconds, each = (
        values.get(f"perf/{name}", 0.0)
        for name in ("total_num_tokens", "time_per_step", "throughput")
    )
    if seconds * each <= 0:
        return None
    gpus = tokens / (seconds * each)
    whole = round(gpus)
    return whole if whole >= 1 and abs(gpus - whole) <= 0.02 * whole else None
