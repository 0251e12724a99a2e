"""The timers in a console log: where each is, steps, what fills them, tokens per second, statistics.

Which timers are inside `timing_s/step` differs between versions of verl (`testing` and
`save_checkpoint` moved out in 0.6, `save_checkpoint` back in by 0.7.1), and the log does not name
its version.  `timer_places` infers it from the numbers, for each launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from verl_profiler.analysis.explain.rules import BETWEEN
from verl_profiler.analysis.selection import Rows
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


# Under timing_s/, but no times: numbers of tokens and requests, and a ratio.
COUNTS = ("prompt_length", "response_length", "num_preempted", "topk_ratio")
TIMER = "timing_s/"
STEP_TIMER = f"{TIMER}step"
# Timers inside gen that stand beside it; those of the agent loops have names with a slash.
_IN_GEN = ("generate_sequences", "reshard", "agent_loop", "generation_timing")
# verl has never had these elsewhere than directly inside the step.
_CORE = (
    "gen",
    "gen_max",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_critic_actor",
    "update_actor",
    # slime's step, which is their sum.
    "train_wait",
    "train",
)
# Inside in some versions and outside in others; where the numbers allow both, inside or not by the
# version that has `update_weights` (0.7.1 and later).
_MOVING = {
    "update_weights": True,
    "save_checkpoint": True,
    "dump_rollout_generations": False,
    "start_profile": False,
    "stop_profile": False,
    "testing": False,
    # verl.experimental's fully asynchronous trainer logs it in a line of its own.
    "param_sync": False,
}
# A timer that leaves less than this share of the time that it could fill is what fills it.
_FILLED = 0.05
# Shorter timers are not looked for in the length of steps.
_NOISE_S = 0.01


class Place(NamedTuple):
    """Where a timer is, and how that is known.

    Args:
        place: `step` (directly inside), `gen` (inside gen), `outside` (of the step), `overlapping`
            (together with the others longer than the step), or `within` (inside another timer).
        reason: Why, for places inferred from the numbers.
    """

    place: str
    reason: str = ""


def timer_places(lines: Sequence[StepLine]) -> dict[str, Place]:
    """Infer where each timer of a launch is.

    Args:
        lines: The steps of one launch: one version of verl.

    Returns:
        The place by timer, without `step` itself and without what is no time.
    """
    names = list(dict.fromkeys(name for line in lines for name in timers_of(line)))
    places = {name: _known_place(name) for name in names}
    decided = {name: place for name, place in places.items() if place is not None}
    inside = [name for name, place in decided.items() if place.place == "step"]
    open_names = [name for name, place in places.items() if place is None]
    # A user's own timers come before those that verl has outside, and after those it has inside.
    order = {True: 0, None: 1, False: 2}
    for name in sorted(open_names, key=lambda name: order[_MOVING.get(name)]):
        decided[name] = _measured_place(name, inside, lines)
        if decided[name].place == "step":
            inside.append(name)
    return {name: decided[name] for name in names}


def timers_of(line: StepLine) -> dict[str, float]:
    """Return the times of a step by timer, without the step's own."""
    return {
        name.removeprefix(TIMER): value
        for name, value in line.values.items()
        if name.startswith(TIMER) and name != STEP_TIMER and not is_count(name)
    }


def is_count(name: str) -> bool:
    """Return whether what verl logs under `timing_s/` is no time."""
    return not set(COUNTS).isdisjoint(name.split("/"))


def _known_place(name: str) -> Place | None:
    """Return the place of a timer that follows from its name."""
    head, slash, _ = name.partition("/")
    if head == "rollouter":
        return Place("overlapping", "the rollouter's, beside the trainer's step")
    if head in _IN_GEN:
        return Place("gen")
    if slash:
        return Place("gen" if head == "gen" else "within")
    return Place("step") if name in _CORE else None


def _measured_place(name: str, inside: Sequence[str], lines: Sequence[StepLine]) -> Place:
    """Infer from the numbers whether a timer is inside the step.

    A timer that is longer than the rest of its step is outside.  Where it fits into every step, the steps
    that have it are compared with those that have not: does the time that no other timer covers
    grow with it?  Where that is unknown too, verl's usual place counts.
    """
    timed = [line for line in lines if STEP_TIMER in line.values]
    rest_s = {line.step: _rest_s(line, inside) for line in timed}
    with_it = [line for line in timed if TIMER + name in line.values]
    for line in with_it:
        if line.values[TIMER + name] > max(rest_s[line.step], 0.0) + tolerance_s(line):
            if name in _MOVING:
                return Place("outside", f"step {line.step} is too short to hold it")
            return Place(
                "overlapping", f"in step {line.step} the timers would be longer than the step"
            )
    compared = _compared(TIMER + name, timed, rest_s)
    if compared is not None:
        return compared
    if with_it and all(
        rest_s[line.step] - line.values[TIMER + name] <= _FILLED * rest_s[line.step]
        for line in with_it
    ):
        return Place("step", "it fills the time that no other timer covers")
    if _MOVING.get(name, True) or all(line.rounded for line in lines):
        return Place("step", "it fits into every step")
    return Place("outside", "verl's default; the numbers allow both")


def _compared(metric: str, lines: Sequence[StepLine], rest_s: Mapping[int, float]) -> Place | None:
    """Compare the steps that have a timer with those that have not; None where that is inconclusive."""
    own = [line.values[metric] for line in lines if metric in line.values]
    with_it, without = (
        [rest_s[line.step] for line in lines if (metric in line.values) == has]
        for has in (True, False)
    )
    if not with_it or not without:
        return None
    usual_s = statistics.median(without)
    spread_s = statistics.median([abs(each - usual_s) for each in without])
    if statistics.median(own) <= 4 * spread_s + _NOISE_S:
        return None
    if statistics.median(with_it) - usual_s > statistics.median(own) / 2:
        return Place("step", "steps that have it are longer by it")
    return Place("outside", "steps that have it are not longer")


def _rest_s(line: StepLine, inside: Sequence[str]) -> float:
    return line.values[STEP_TIMER] - sum(line.values.get(TIMER + name, 0.0) for name in inside)


def tolerance_s(line: StepLine) -> float:
    """Return what rounding may add up to."""
    rounding = 0.0005 * (len(line.values) + 1) if line.rounded else 0.0
    return rounding + 1e-6 * line.values.get(STEP_TIMER, 0.0)
