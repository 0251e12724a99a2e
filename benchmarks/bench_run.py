"""What profiling costs a run: rehearsals of identical work with and without the profiler, alternating.

    python benchmarks/bench_run.py [--pairs 5] [--steps 24] [--warmup 4] [--lengthened 1] [--json FILE]
    python benchmarks/bench_run.py --block 3 [--pairs 4] [--steps 46]

Each pair is two runs of the real main_ppo with the stand-in engine, one of them profiled, in an order that
alternates.  Their work is the same: responses and the times of engine and tools follow from the prompts
(`+faults.scripted=true`, tests/faults), and the prompts come in order.  Responses have 142 tokens on average, 560 with
`--lengthened 5`, which makes what the model generates 5 times as long (verl's example for GSM8K allows 1,024
in up to 5 turns): a step has more work for as many events.  Compared is the CPU time of all processes of a
run per step, which does not depend on what else runs as much as wall time does.
With `--block`, every run is profiled, has the same prompts in each step, and records every second block of so many
steps (`profiler.events.steps`): what one run takes more than another, and what one step has more to do, is not in the
ratio.  Wrappers and threads are there in all steps: what they take without recording is not in it either.

Printed: per pair the ratio profiled / bare and what the profiler's own account has of the same steps, then
the mean ratio with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from rehearsal_faults import with_faults

# Prompts of a step of the rehearsal (configs/rehearsal/cpu.yaml).
PROMPTS = 8
SPENT = ("wrapper_s", "wrapper_cpu_s", "writer_s", "writer_cpu_s")


def lengthened(factor):
    """Return the overrides of responses so many times as long."""
    return [f"+faults.response_factor={factor}", f"data.max_response_length={384 * factor}"]


def run(steps, profiler, folder, overrides=()):
    """Run one rehearsal; return CPU seconds of all its processes, and seconds, at the end of each step."""
    cpu_file = folder.with_name(f"{folder.name}.cpu.jsonl")
    command = [
        str(Path(sys.executable).parent / "verl-profiler"),
        "rehearse",
        "--engine=standin",
        f"--steps={steps}",
        f"--profiler={profiler}",
        f"--out={folder}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "rehearsal.poll_interval_s=0.1",
        "data.shuffle=false",
        "+faults.scripted=true",
        f"+faults.cpu_file={cpu_file}",
        *overrides,
    ]
    environment = with_faults(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = [json.loads(line) for line in cpu_file.read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        sys.exit(f"{cpu_file} has not one line for each of {steps} steps")
    return rows


def per_step(rows, warmup):
    """Return CPU seconds and seconds of a mean step after the first ones."""
    first, last = rows[warmup - 1], rows[-1]
    if gone := first["cpu_s"].keys() - last["cpu_s"].keys():
        sys.exit(f"{len(gone)} processes ended during the steps: their CPU time is not known")
    used = [sum(row["cpu_s"].values()) for row in (first, last)]
    steps = len(rows) - warmup
    return (used[1] - used[0]) / steps, (last["time_s"] - first["time_s"]) / steps


def own_account(folder, after, process="*"):
    """Return by process what the profiler's account has of the steps after the first ones.

    Processes that receive no step, such as the load balancer, have their events in that of start-up; one without
    events has no account.
    """
    found = {}
    begin = min(
        json.loads(line)["timestamp"]
        for file in folder.glob(f"step_{after + 1}/*.jsonl")
        for line in file.read_bytes().splitlines()
    )
    for file in folder.glob(f"step_*/{process}.jsonl"):
        step = int(file.parent.name.removeprefix("step_"))
        for line in file.read_bytes().splitlines():
            if b'"event":"profiler_cost"' not in line:
                continue
            cost = json.loads(line)
            if step > after or (step == 0 and cost["timestamp"] >= begin):
                total = found.setdefault(file.stem, dict.fromkeys((*SPENT, "events"), 0.0))
                for name in total:
                    total[name] += cost["extra"][name]
    return found


def recorded_blocks(steps, warmup, block):
    """Return the blocks of steps after the first ones in pairs: with, without recording, then without, with."""
    begins = range(warmup + 1, steps + 2 - 2 * block, 2 * block)
    pairs = [(range(at, at + block), range(at + block, at + 2 * block)) for at in begins]
    return [pair if place % 2 == 0 else pair[::-1] for place, pair in enumerate(pairs)]


def ratios_of_blocks(rows, blocks):
    """Return the logarithm of the ratio of CPU time with and without recording, of each pair of blocks.

    The first step of a block is left out, because what was recorded before it is written in it.
    """
    used = {row["step"]: sum(row["cpu_s"].values()) for row in rows}

    def spent(block):
        return used[block[-1]] - used[block[0]]

    return [math.log(spent(recorded) / spent(bare)) for recorded, bare in blocks]


def in_blocks(args, folder, overrides):
    """Record every second block of steps, of the same work; print the ratio of recorded to other steps."""
    blocks = recorded_blocks(args.steps, args.warmup, args.block)
    listed = sorted(step for recorded, _ in blocks for step in recorded)
    given = [
        f"profiler.events.steps={listed}".replace(" ", ""),
        # Each epoch is one step.
        f"data.train_max_samples={PROMPTS}",
        f"trainer.total_epochs={args.steps}",
        *overrides,
    ]
    effects, shares = [], []
    for number in range(args.pairs):
        where = folder / str(number)
        rows = run(args.steps, "multiturn", where, given)
        effects += ratios_of_blocks(rows, blocks)
        used = {row["step"]: sum(row["cpu_s"].values()) for row in rows}
        whole = sum(used[step] - used[step - 1] for step in listed)
        account = own_account(where, args.warmup).values()
        shares.append(sum(each["wrapper_cpu_s"] + each["writer_cpu_s"] for each in account) / whole)
        mean = statistics.mean(effects)
        half = stats.t.ppf(0.975, len(effects) - 1) * stats.sem(effects)
        print(
            f"after {number + 1} runs: recorded / not recorded {math.exp(mean):.4f}, 95 % interval "
            f"{math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}, {len(effects)} pairs of blocks; own "
            f"account {statistics.mean(shares):.2%} of {whole / len(listed):.2f} CPU-s per step",
            flush=True,
        )


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=4, help="first steps that are left out")
    parser.add_argument(
        "--lengthened", type=int, default=1, help="factor on the length of responses"
    )
    parser.add_argument("--block", type=int, help="record blocks of so many steps in turn")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_run_"))
    overrides = [*lengthened(args.lengthened), *args.overrides]
    if args.block:
        in_blocks(args, folder, overrides)
        return
    pairs = []
    for pair in range(args.pairs):
        order = ("none", "multiturn") if pair % 2 == 0 else ("multiturn", "none")
        found = {}
        for profiler in order:
            where = folder / f"{pair}-{profiler}"
            found[profiler] = per_step(run(args.steps, profiler, where, overrides), args.warmup)
        spent = own_account(folder / f"{pair}-multiturn", args.warmup).values()
        (bare, bare_s), (profiled, profiled_s) = found["none"], found["multiturn"]
        whole = profiled * (args.steps - args.warmup)
        row = {
            "bare_cpu_s": bare,
            "profiled_cpu_s": profiled,
            "ratio": profiled / bare,
            "ratio_of_time": profiled_s / bare_s,
            "account": sum(each["wrapper_cpu_s"] + each["writer_cpu_s"] for each in spent) / whole,
            "events": sum(each["events"] for each in spent),
        }
        pairs.append(row)
        print(
            f"pair {pair + 1}: {bare:.3f} CPU-s per step of {bare_s:.2f} s bare, {profiled:.3f} of "
            f"{profiled_s:.2f} s profiled, ratio {row['ratio']:.4f}; own account {row['account']:.2%} "
            f"for {row['events']:,.0f} events",
            flush=True,
        )
    ratios = [row["ratio"] for row in pairs]
    mean = statistics.mean(ratios)
    line = f"ratio of CPU time: mean {mean:.4f}"
    if len(ratios) > 1:
        half = stats.t.ppf(0.975, len(ratios) - 1) * stats.sem(ratios)
        line += f", 95 % interval {mean - half:.4f} to {mean + half:.4f}"
    print(f"{line}, {len(ratios)} pairs of {args.steps - args.warmup} steps")
    if args.json:
        Path(args.json).write_text(json.dumps(pairs, indent=2))
        print(f"Wrote {args.json}")


if __name__ == "__main__":
    main()
