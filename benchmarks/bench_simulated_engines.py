"""Count how often the intervals of what-if hold what a change really saves.

    python benchmarks/bench_simulated_engines.py                  20 runs of each kind
    python benchmarks/bench_simulated_engines.py --runs 5 --steps 4 8
    python benchmarks/bench_simulated_engines.py --iterations --kinds limited memory

Runs are made by engines that share no code with the analyses (tests/truth/engines.py): a pass takes
a + b n, prefill stops decoding, passes, steps and runs vary.  The truth of a change is the mean over
many steps of engines that have it.  With `--iterations` what-if is given the engines' iterations and
readings, as it is of vLLM, or of SGLang's forward-pass metrics.  `pair` is one other run of as many steps, with the change.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from truth.engines import (
    Engines,
    changed,
    iteration_events,
    state_events,
    steps_and_passes,
    steps_of,
)
from truth.synthetic import events_of, tables_of

from verl_profiler.analysis.explain.what_if import what_if

STEPS_OF_TRUTH = 60
SLOW = ((6_000, 700), (11_000, 1_300))
KINDS = {
    "even": Engines(run_noise=0.05),
    "small": Engines(prompts=4, run_noise=0.05),
    "slow replica": Engines(replicas=SLOW, run_noise=0.05),
    "steep": Engines(replicas=((2_000, 1_500),) * 2, run_noise=0.05),
    "limited": Engines(slots=6, run_noise=0.05),
    "memory": Engines(prompts=16, kv_tokens=1_500, run_noise=0.05),
}
LIMITED = ("limited", "memory")


def truths(made: Engines) -> dict[str, Engines]:
    """Return the engines with each change."""
    if made.kv_tokens is not None:
        return {
            "no_queue": changed(made, kv_tokens=None),
            "twice_the_kv_cache": changed(made, kv_tokens=2 * made.kv_tokens),
            "half_the_requests": changed(made, prompts=made.prompts // 2),
        }
    if made.slots < Engines().slots:
        return {
            "no_queue": changed(made, slots=Engines().slots),
            "twice_the_slots": changed(made, slots=2 * made.slots),
            "half_the_slots": changed(made, slots=made.slots // 2),
            "half_the_requests": changed(made, prompts=made.prompts // 2),
        }
    found = {
        "half_the_requests": changed(made, prompts=made.prompts // 2),
        "twice_the_requests": changed(made, prompts=made.prompts * 2),
        "tools_twice_as_fast": changed(made, tool_factor=0.5),
        "responses_a_quarter_shorter": changed(made, tokens_factor=0.75),
        "half_the_slots": changed(made, slots=None),
        "one_turn_fewer": changed(made, fewer_turns=1),
    }
    if made.replicas[0] != made.replicas[1]:
        found["replicas_equally_fast"] = changed(made, replicas=(made.replicas[0],) * 2)
    return found


@cache
def durations_s(made: Engines, steps: int, seed: int) -> list[float]:
    """Return the lengths of steps of a run."""
    return [truth.duration_us / 1e6 for truth in events_of(*steps_of(made, steps, seed))[1]]


def main() -> None:
    """Print a row for each kind of run, number of steps and change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, nargs="*", default=[8])
    usual = [kind for kind in KINDS if kind not in LIMITED]
    parser.add_argument("--kinds", nargs="*", default=usual, choices=list(KINDS))
    parser.add_argument("--iterations", action="store_true")
    asked = parser.parse_args()
    held: list[bool] = []
    pairs: list[bool] = []
    print("| run | steps | change | true s | expected s (median) | interval s | held | pair held |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in asked.kinds:
        for steps in asked.steps:
            rows = measured(KINDS[kind], steps, asked.runs, iterations=asked.iterations)
            for what, (truth, answers) in rows.items():
                inside = [low <= truth <= high for _, low, high, *_ in answers]
                paired = [low <= other <= high for *_, low, high, other in answers]
                held += inside
                pairs += paired
                expected, width = (
                    median(each)
                    for each in zip(*((a, h - lo) for a, lo, h, *_ in answers), strict=True)
                )
                print(
                    f"| {kind} | {steps} | {what} | {truth:.2f} | {expected:.2f} | {width:.2f} "
                    f"| {fmean(inside):.0%} | {fmean(paired):.0%} |".replace("%", " %"),
                    flush=True,
                )
    print(
        f"\nall: {fmean(held):.1%} of {len(held)} intervals hold the truth, "
        f"{fmean(pairs):.1%} of the pairs' what one other run shows".replace("%", " %")
    )


def run_with(made: Engines, steps: int, seed: int, *, iterations: bool):
    """Make the tables of a run, and what is true of its steps."""
    made_steps, passes = steps_and_passes(made, steps, seed)
    events, truth = events_of(*made_steps)
    # A limit by memory is not told from one by calls without readings.
    more = state_events(events, passes, made) if iterations or made.kv_tokens else []
    more += iteration_events(events, passes) if iterations else []
    return tables_of([*events, *more]), truth


def measured(
    made: Engines, steps: int, runs: int, *, iterations: bool
) -> dict[str, tuple[float, list[tuple]]]:
    """Return, by change, the truth and each run's (expected, low, high, pair's ends, other run)."""
    usual = replace(made, run_noise=0.0)
    before = fmean(durations_s(usual, STEPS_OF_TRUTH, 0))
    other = truths(made)
    found: dict[str, tuple[float, list[tuple]]] = {}
    for seed in range(1, runs + 1):
        tables, truth = run_with(made, steps + 1, seed, iterations=iterations)
        own_s = fmean(each.duration_us for each in truth[1:]) / 1e6
        answers = {row["what"]: row for row in what_if(tables)}
        if seed == 1:
            if "half_the_slots" in other and other["half_the_slots"].slots is None:
                most = peak(tables, steps)
                other["half_the_slots"] = changed(made, slots=max(most // 2, 1))
            for what, with_it in other.items():
                after = fmean(durations_s(replace(with_it, run_noise=0.0), STEPS_OF_TRUTH, 0))
                found[what] = before - after, []
        for what, with_it in other.items():
            row = answers[what]
            second = own_s - fmean(durations_s(with_it, steps, 1_000 + seed))
            keys = ("expected_s", "low_s", "high_s", "pair_low_s", "pair_high_s")
            found[what][1].append((*(row[key] for key in keys), second))
    return found


def peak(tables, steps: int) -> int:
    from verl_profiler.analysis.explain.rebuilding import step_models

    models = step_models(tables, range(2, steps + 2))
    return round(median(model.peak for model in models))


if __name__ == "__main__":
    main()
