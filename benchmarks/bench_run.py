"""What profiling costs a run: the rehearsal with and without the profiler, alternating.

    python benchmarks/bench_run.py [--engine standin] [--pairs 5] [--steps 6] [--json FILE]

Each pair is two runs of the real main_ppo, one of them profiled, in an order that alternates.  Of
each run the first step is left out (engines warm up in it); the rest gives a mean.  verl's replay
buffer looks for finished samples every 2 s, which would round `gen` up to multiples of that, so here
it looks every 0.1 s.  Printed: the ratio profiled / bare per pair, of whole steps and of the time
outside `gen`, and what the profiler says of itself.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEP = re.compile(r"\bstep:(\d+) - (.*)")
VALUE = re.compile(r"timing_s/(step|gen):(?:np\.float64\()?([\d.e+-]+)")


def run(engine, steps, profiler, folder, overrides):
    """Run one rehearsal; return its steps as dicts of seconds."""
    command = [
        str(Path(sys.executable).parent / "verl-profiler"),
        "rehearse",
        "--engine",
        engine,
        "--steps",
        str(steps),
        "--profiler",
        profiler,
        "--output",
        str(folder),
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "rehearsal.poll_interval_s=0.1",
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    text = (folder / "console.log").read_text(errors="replace")
    found = {}
    for line in text.splitlines():
        match = STEP.search(line)
        if match:
            values = {name: float(value) for name, value in VALUE.findall(match[2])}
            if "step" in values:
                found[int(match[1])] = values
    if len(found) != steps:
        sys.exit(f"{folder / 'console.log'} has {len(found)} of {steps} steps")
    return [found[step] for step in sorted(found)][1:]


def means(steps):
    """Return the mean seconds of a step, and of what is not `gen` in it."""
    return (
        statistics.mean(step["step"] for step in steps),
        statistics.mean(step["step"] - step["gen"] for step in steps),
    )


SPENT = ("wrapper_s", "wrapper_cpu_s", "writer_s", "writer_cpu_s")


def own_account(folder):
    """Return what the busiest process spent in all steps but the first, and its events there.

    A process accounts for its whole life; what is told here is its part by the number of events.
    """
    best = dict.fromkeys((*SPENT, "events"), 0.0)
    for file in (folder / "processes").glob("*.json"):
        counters = json.loads(file.read_bytes())["counters"]
        events = sum(
            lines.read_bytes().count(b"\n")
            for lines in folder.glob(f"step_*/{file.stem}.jsonl")
            if int(lines.parent.name.removeprefix("step_")) > 1
        )
        share = events / max(counters["events"], 1)
        account = {name: counters[name] * share for name in SPENT} | {"events": events}
        best = max(best, account, key=lambda each: each["wrapper_s"])
    return best


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", default="standin", choices=("standin", "sglang"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_run_"))
    pairs = []
    for pair in range(args.pairs):
        seconds = {}
        order = ("none", "multiturn") if pair % 2 == 0 else ("multiturn", "none")
        for profiler in order:
            where = folder / f"{pair}-{profiler}"
            steps = run(args.engine, args.steps, profiler, where, args.overrides)
            seconds[profiler] = means(steps)
            if profiler == "multiturn":
                account = own_account(where)
                total = sum(step["step"] for step in steps)
        row = {
            "bare_s": seconds["none"],
            "profiled_s": seconds["multiturn"],
            "ratio_step": seconds["multiturn"][0] / seconds["none"][0],
            "ratio_outside_gen": seconds["multiturn"][1] / seconds["none"][1],
            **{name.replace("_s", "_share"): account[name] / total for name in SPENT},
        }
        pairs.append(row)
        print(
            f"pair {pair + 1}: step {row['bare_s'][0]:.2f} s bare, {row['profiled_s'][0]:.2f} s profiled, "
            f"ratio {row['ratio_step']:.3f}; outside gen {row['ratio_outside_gen']:.3f}; "
            f"own account {row['wrapper_share']:.3%} wrappers ({row['wrapper_cpu_share']:.3%} on a "
            f"core), {row['writer_share']:.3%} writer ({row['writer_cpu_share']:.3%})",
            flush=True,
        )
    for name in ("ratio_step", "ratio_outside_gen"):
        ratios = sorted(row[name] for row in pairs)
        print(
            f"{name}: median {statistics.median(ratios):.3f}, "
            f"from {ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(pairs, indent=2))
        print(f"Wrote {args.json}")


if __name__ == "__main__":
    main()
