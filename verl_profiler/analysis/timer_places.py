"""Where each timer of a console log is: inside verl's step, inside `gen`, or outside.

Which timers are inside `timing_s/step` differs between versions of verl (`testing` and
`save_checkpoint` moved out in 0.6, `save_checkpoint` back in by 0.7.1), and the log does not name
its version.  `timer_places` infers it from the numbers, for each launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verl_profiler.reading.formats.console_steps import StepLine

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
