"""What profiling costs a run: one rehearsal of equal steps, half of which are recorded, in random order.

    python benchmarks/bench_run.py [--pairs 100] [--warmup 6] [--lengthened 1] [--seed 0] [--json FILE]

The rehearsal is the real main_ppo with the stand-in engine.  The work of each step is the same: the prompts are,
and responses and the times of engine and tools follow from them (`+faults.scripted=true`, tests/faults).
Responses have 142 tokens on average, 560 with `--lengthened 5`, which makes what the model generates 5 times as
long (verl's example for GSM8K allows 1,024 in up to 5 turns): a step has more work for as many events.
Steps come in pairs, one of which is recorded, by chance the first or the second.  In the other one no process
has a recorder (`recording_switch`): there is no writer, watchdog or heartbeat, and wrappers call the original
at once.  Compared is the CPU time of all processes, Ray's own included.

Printed: the ratio recorded / bare, as the pseudomedian of the pairs with the interval of the signed-rank test;
by role of the processes, and of all, the added CPU time and what the profiler's own account has of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "faults"))

from rehearsal_faults import with_faults

# Prompts of a step of the rehearsal (configs/rehearsal/cpu.yaml).
PROMPTS = 8
SWITCH = Path(__file__).parent / "recording_switch"


def run(steps, recorded, folder, overrides=()):
    """Run a rehearsal that records some steps.

    Returns:
        By step: at its end, the time and what has been spent so far by each process, as `recording_switch` has it.
    """
    command = [
        str(Path(sys.executable).parent / "verl-profiler"),
        "rehearse",
        "--engine=standin",
        f"--steps={steps}",
        "--profiler=multiturn",
        f"--out={folder / 'run'}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "rehearsal.poll_interval_s=0.1",
        "data.shuffle=false",
        "+faults.scripted=true",
        *overrides,
    ]
    environment = with_faults(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(SWITCH), environment["PYTHONPATH"]])
    # Ray's workers would give way to whatever else runs.
    environment["RAY_worker_niceness"] = "0"
    environment["BENCH_RUN_SWITCH"] = json.dumps({"folder": str(folder), "recorded": recorded})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def lengthened(factor):
    """Return the overrides of responses so many times as long."""
    return [f"+faults.response_factor={factor}", f"data.max_response_length={384 * factor}"]


def pairs_of_steps(pairs, warmup, seed):
    """Return pairs of adjacent steps after the first ones: the recorded one, the other one."""
    source = random.Random(seed)
    firsts = range(warmup + 1, warmup + 2 * pairs, 2)
    return [tuple(source.sample((first, first + 1), 2)) for first in firsts]


def spent_in_steps(rows):
    """Return by step, and by process, CPU seconds and what the profiler's own account has of them.

    The account's part of a process is its wrappers, writer, watchdog and search for what is open.
    """
    always = set.intersection(*(set(row["processes"]) for row in rows))
    found = {}
    for before, after in itertools.pairwise(rows):
        step = found[after["step"]] = defaultdict(lambda: np.zeros(2))
        for pid in always:
            first, last = before["processes"][pid], after["processes"][pid]
            spent = [
                last.get(name, 0) - first.get(name, 0)
                for name in ("cpu_s", "wrapper_cpu_s", "writer_cpu_s")
            ]
            # Of ranks and workers the sum.
            step[last["role"]] += (spent[0], spent[1] + spent[2])
    return found


def pseudomedian(values):
    """Return the Hodges-Lehmann estimate of paired differences, and the 95 % interval of the signed-rank test."""
    values = np.asarray(values)
    first, second = np.triu_indices(len(values))
    means = np.sort((values[first] + values[second]) / 2)
    sd = math.sqrt(len(values) * (len(values) + 1) * (2 * len(values) + 1) / 24)
    outside = max(round(len(means) / 2 - stats.norm.ppf(0.975) * sd), 0)
    return np.median(means), means[outside], means[-1 - outside]


def report(spent, pairs):
    """Print ratio, residual and cost by process; return them."""
    whole = {step: sum(by_process.values())[0] for step, by_process in spent.items()}
    effects = [math.log(whole[recorded] / whole[bare]) for recorded, bare in pairs]
    ratio, low, high = (math.exp(value) for value in pseudomedian(effects))
    bare_s = statistics.mean(whole[bare] for _, bare in pairs)
    print(
        f"recorded / bare {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}, {len(pairs)} pairs of steps of "
        f"{bare_s:.2f} CPU-s; a pair varies by {statistics.stdev(effects):.1%}"
    )
    print(f"{'CPU time in ms per step':24} {'bare':>9} {'added':>9} {'±':>7} {'account':>9}")
    names = sorted(set.union(*(set(by_process) for by_process in spent.values())))
    shown = [(name, [name]) for name in names] + [("all", names)]
    for label, group in shown:
        of = {
            step: sum(by_process[name] for name in group) * 1e3
            for step, by_process in spent.items()
        }
        added, lowest, highest = pseudomedian(
            [of[recorded][0] - of[bare][0] for recorded, bare in pairs]
        )
        account = statistics.mean(of[recorded][1] for recorded, _ in pairs)
        bare = statistics.mean(of[bare][0] for _, bare in pairs)
        print(f"{label:24} {bare:9.1f} {added:9.1f} {(highest - lowest) / 2:7.1f} {account:9.1f}")
    print(f"the account is {account / bare:.2%} of a bare step")
    return {"ratio": ratio, "interval": [low, high], "account": account / bare, "effects": effects}


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps")
    parser.add_argument("--warmup", type=int, default=6, help="first steps that are left out")
    parser.add_argument(
        "--lengthened", type=int, default=1, help="factor on the length of responses"
    )
    parser.add_argument("--seed", type=int, default=0, help="which step of each pair is recorded")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    pairs = pairs_of_steps(args.pairs, args.warmup, args.seed)
    steps = args.warmup + 2 * args.pairs
    recorded = [*range(1, args.warmup + 1), *(step for step, _ in pairs)]
    folder = Path(tempfile.mkdtemp(prefix="bench_run_"))
    same = [f"data.train_max_samples={PROMPTS}", f"trainer.total_epochs={steps}"]
    overrides = [*same, *lengthened(args.lengthened), *args.overrides]
    found = report(spent_in_steps(run(steps, recorded, folder, overrides)), pairs)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2))
        print(f"Wrote {args.json}")


if __name__ == "__main__":
    main()
