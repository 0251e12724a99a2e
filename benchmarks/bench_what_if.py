"""Change things for real in the rehearsal, several times each, and hold what-if against what came of it.

    python benchmarks/bench_what_if.py --output DIR [--repeats 5] [--steps 6] [--engine standin] [NAME ...]
    python benchmarks/bench_what_if.py --output DIR --table

Every setting that a comparison needs is run --repeats times, one after the other in turns, so that what
the machine does otherwise meanwhile falls on all of them.  Runs that are there already are not made
again, so the script may be ended and started again.  --table runs nothing.

The measured seconds are taken from the event files by this script alone: the mean of the steps' lengths
(or of the part named: PARTS), without the first step.  Predicted is what `verl-profiler why RUN --json` prints
of each run of the setting *before*, with its interval.  `held` counts the intervals that hold the
measured mean.  Base runs against each other show what a difference is worth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from rehearsal_faults import with_faults

POLL = "rehearsal.poll_interval_s=0.05"
LIMIT = "actor_rollout_ref.rollout.max_num_seqs=4"
# Room for responses that were lengthened.
LONG = "data.max_response_length=1024"
# Standalone replicas only, which wait for tools most of the time.
SEPARATE = [
    "--trainer=separate_async",
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=false",
    "trainer.v1.separate_async.parameter_sync_step=1",
]
SLOW_TOOLS = "+faults.tool_latency=8"
# Words for `verl-profiler rehearse`, by setting.
SETTINGS: dict[str, list[str]] = {
    "base": [POLL],
    "polling": ["rehearsal.poll_interval_s=2"],
    "limit": [POLL, LIMIT],
    "uneven": [POLL, LIMIT, "+faults.routing=uneven"],
    "fewest": [POLL, LIMIT, "+faults.routing=fewest"],
    "one_late_rank": [POLL, "+faults.rank_delay_s=[0,0.8]"],
    "two_late_ranks": [POLL, "+faults.rank_delay_s=[0.4,0.4]"],
    "slow_sync": [POLL, "+faults.weight_sync_s=2"],
    "half_sync": [POLL, "+faults.weight_sync_s=1"],
    # Three changes in one pair of settings, each measured by its own part of the step.
    "slow_parts": [
        "rehearsal.poll_interval_s=2",
        "+faults.tool_latency=4",
        "+faults.weight_sync_s=2",
    ],
    "half_parts": [POLL, "+faults.tool_latency=2", "+faults.weight_sync_s=1"],
    "slow_tools": [POLL, "+faults.tool_latency=8"],
    "half_tools": [POLL, "+faults.tool_latency=4"],
    "one_slow_tool": [POLL, "+faults.tool_latency={calculate:16}"],
    "one_half_tool": [POLL, "+faults.tool_latency={calculate:8}"],
    "twice_samples": [POLL, "actor_rollout_ref.rollout.n=8"],
    "twice_prompts": [
        POLL,
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    ],
    "long_responses": [POLL, LONG, "+faults.response_factor=2"],
    "shorter_responses": [POLL, LONG, "+faults.response_factor=1.5"],
    "one_slow_replica": [POLL, "+faults.replica_delay_s=[0,0.03]"],
    "one_blocked_worker": [POLL, "+faults.worker_delay_s=[0.2,0]"],
    "two_blocked_workers": [POLL, "+faults.worker_delay_s=[0.1,0.1]"],
    "async_tools": [*SEPARATE, POLL, SLOW_TOOLS],
    "async_half_tools": [*SEPARATE, POLL, "+faults.tool_latency=4"],
    "async_more": [*SEPARATE, POLL, SLOW_TOOLS, "trainer.v1.separate_async.num_warmup_batches=2"],
    "five_turns": [POLL, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5"],
}


@dataclass(frozen=True)
class Comparison:
    """A change that the rehearsal can make, and the row of what-if that predicts it."""

    before: str
    after: str
    row: str
    part: str = "step"


COMPARISONS = {
    "polling": Comparison("polling", "base", "no_polling"),
    "limit_away": Comparison("limit", "base", "no_queue", "rollout"),
    "limit_halved": Comparison("base", "limit", "half_the_slots", "rollout"),
    "routing": Comparison("uneven", "fewest", "even_replicas", "rollout"),
    "late_rank": Comparison("one_late_rank", "two_late_ranks", "even_ranks", "ranks' phases"),
    "weight_sync": Comparison("slow_sync", "half_sync", "weights_twice_as_fast", "weight sync"),
    "tools": Comparison("slow_tools", "half_tools", "tools_twice_as_fast", "rollout"),
    "parts_polling": Comparison("slow_parts", "half_parts", "no_polling", "polling"),
    "parts_tools": Comparison("slow_parts", "half_parts", "tools_twice_as_fast", "rollout"),
    "parts_sync": Comparison("slow_parts", "half_parts", "weights_twice_as_fast", "weight sync"),
    "one_tool": Comparison(
        "one_slow_tool", "one_half_tool", "tool_twice_as_fast:calculate", "rollout"
    ),
    "fewer_samples": Comparison("twice_samples", "base", "half_the_requests"),
    "fewer_prompts": Comparison("twice_prompts", "base", "half_the_requests"),
    "more_prompts": Comparison("base", "twice_prompts", "twice_the_requests"),
    "turns": Comparison("base", "five_turns", "one_turn_fewer"),
    "responses": Comparison("long_responses", "shorter_responses", "responses_a_quarter_shorter"),
    "slow_replica": Comparison("one_slow_replica", "base", "replicas_equally_fast", "rollout"),
    "blocked_worker": Comparison(
        "one_blocked_worker", "two_blocked_workers", "even_workers", "rollout"
    ),
    "async_tools": Comparison("async_tools", "async_half_tools", "tools_twice_as_fast"),
    "async_more": Comparison("async_tools", "async_more", "one_batch_more_in_flight"),
    "async_fewer": Comparison("async_more", "async_tools", "one_batch_fewer_in_flight"),
    # What the replays shorten; on shared cores the trainer slows down meanwhile.
    "async_tools_wait": Comparison(
        "async_tools", "async_half_tools", "tools_twice_as_fast", "waiting"
    ),
    "async_more_wait": Comparison(
        "async_tools", "async_more", "one_batch_more_in_flight", "waiting"
    ),
    "async_fewer_wait": Comparison(
        "async_more", "async_tools", "one_batch_fewer_in_flight", "waiting"
    ),
}


# The trainer's phases that make up a part of the step.
PARTS = {
    "weight sync": ("update_weights",),
    "ranks' phases": ("old_log_prob", "ref", "update_actor"),
    # Of an asynchronous trainer, for samples.
    "waiting": ("gen",),
}


def lines_of(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run."""
    for path in sorted(run.glob("step_*/*.jsonl")):
        for line in path.read_text().splitlines():
            yield {"role": path.stem.split("_")[0], **json.loads(line)}


def seconds_of(run: Path, part: str) -> float:
    """Return the mean length of the steps, or of a part of them, without the first step.

    A rollout is from where `gen` begins to where the last request of its step ends, polling from there
    to where `gen` ends; the others are sums of the trainer's phases.
    """
    phases = PARTS.get(part, ())
    lengths: dict[int, float] = {}
    begins: dict[int, float] = {}
    ends: dict[int, float] = defaultdict(float)
    gens: dict[int, float] = {}
    sums: dict[int, float] = defaultdict(float)
    for line in lines_of(run):
        event, step, extra = line["event"], line.get("step"), line.get("extra", {})
        end_s = _unix_s(line["timestamp"])
        if event in phases and line["role"] == "trainer":
            sums[step] += line["duration_sec"]
        if event == "step":
            lengths[step] = line["duration_sec"]
        elif event == "gen":
            begins[step], gens[step] = end_s - line["duration_sec"], end_s
        elif event == "request" and not extra.get("validate"):
            ends[step] = max(ends[step], end_s)
    if part == "rollout":
        lengths = {step: ends[step] - begin_s for step, begin_s in begins.items() if step in ends}
    if part == "polling":
        lengths = {step: end_s - ends[step] for step, end_s in gens.items() if step in ends}
    if phases:
        lengths = {step: sums[step] for step in lengths}
    return fmean(seconds for step, seconds in lengths.items() if step > min(lengths))


def _unix_s(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def predicted(run: Path, row: str) -> tuple[float, float | None, float | None]:
    """Return what a run predicts to be saved per step, and the ends of its interval; seconds."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "verl-profiler"), "why", str(run), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    tables = json.loads(done.stdout)["tables"]
    rows = {each["what"]: each for each in tables["what_if"]}
    if row not in rows:
        raise SystemExit(f"{run} has no row {row}: {rows['unchanged'].get('refused')}")
    found = rows[row]
    return found.get("saved_s", found["expected_s"]), found["low_s"], found["high_s"]


def make(run: Path, words: Sequence[str], arguments: argparse.Namespace) -> bool:
    """Run the rehearsal with these words, unless the run is there; return whether it is there then."""
    if (run / "report.html").exists():
        return True
    if run.exists():
        # What an earlier call did not finish is no run.
        run.rename(run.with_name(f"unfinished-{len(list(run.parent.iterdir()))}-{run.name}"))
    command = [str(Path(sys.executable).parent / "verl-profiler"), "rehearse"]
    command += ["--engine", arguments.engine, "--steps", str(arguments.steps)]
    command += ["--output", str(run), *words]
    with run.with_name(f"{run.name}.log").open("w") as log:
        done = subprocess.run(
            command, stdout=log, stderr=log, check=False, env=with_faults(os.environ)
        )
    print(f"{run.name}: status {done.returncode}", flush=True)
    return (run / "report.html").exists()


def interval(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the difference of two means (Welch)."""
    spread = stdev(values) ** 2 / len(values), stdev(others) ** 2 / len(others)
    error = math.sqrt(sum(spread))
    degrees = sum(spread) ** 2 / (
        spread[0] ** 2 / (len(values) - 1) + spread[1] ** 2 / (len(others) - 1)
    )
    width = float(stats.t.ppf(0.95, degrees)) * error
    middle = fmean(values) - fmean(others)
    return middle - width, middle + width


def runs_of(folder: Path, setting: str) -> list[Path]:
    """Return the finished runs of a setting."""
    paths = folder.glob(f"{setting}-*")
    return sorted(path for path in paths if (path / "report.html").exists())


def print_table(folder: Path, chosen: Sequence[str]) -> None:
    """Print each comparison, as a Markdown table."""
    print("| comparison | runs | predicted by each run, s per step | measured (90 %) | held |")
    print("| --- | --- | --- | --- | --- |")
    for name in chosen:
        each = COMPARISONS[name]
        before, after = runs_of(folder, each.before), runs_of(folder, each.after)
        if len(before) < 2 or len(after) < 2:
            print(f"| {name} | {len(before)} and {len(after)} | too few runs | | |")
            continue
        first = [seconds_of(run, each.part) for run in before]
        second = [seconds_of(run, each.part) for run in after]
        saved = fmean(first) - fmean(second)
        low, high = interval(first, second)
        answers = [predicted(run, each.row) for run in before]
        held = sum(
            least is not None and most is not None and least <= saved <= most
            for _, least, most in answers
        )
        shown = ", ".join(
            f"{value:.2f}" + ("" if least is None else f" ({least:.2f} to {most:.2f})")
            for value, least, most in answers
        )
        print(
            f"| `{each.row}`: {each.before} → {each.after}, {each.part} "
            f"| {len(before)} and {len(after)} | {shown} "
            f"| {saved:.2f} ({low:.2f} to {high:.2f}) | {held} of {len(answers)} |"
        )
    base = runs_of(folder, "base")
    if len(base) > 1:
        for part in ("step", "rollout"):
            values = [seconds_of(run, part) for run in base]
            print(
                f"\n{len(base)} base runs, {part}: {', '.join(f'{value:.2f}' for value in values)} s; "
                f"standard deviation {100 * stdev(values) / fmean(values):.1f} % of the mean"
            )


def parsed(about: str, kind: str, known: Iterable[str], **numbers: int) -> argparse.Namespace:
    """Return the arguments of a command that runs named rehearsals; its output folder exists.

    Args:
        about: Its help.
        kind: What the names are of.
        known: The names; they are the default, too.
        numbers: Defaults of options with a number.
    """
    known = list(known)
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar=kind.upper(), help=", ".join(known))
    parser.add_argument("--output", type=Path, required=True)
    for option, default in numbers.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--engine", choices=("standin", "sglang"), default="standin")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no {kind} {', '.join(unknown)}: there are {', '.join(known)}")
    arguments.names = arguments.names or known
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> int:
    """Run what is missing, then print the table."""
    arguments = parsed(__doc__ or "", "comparison", COMPARISONS, repeats=5, steps=6)
    chosen = arguments.names
    settings: dict[str, None] = {}
    for name in chosen:
        settings |= dict.fromkeys([COMPARISONS[name].before, COMPARISONS[name].after])
    failed = 0
    for repeat in range(0 if arguments.table else arguments.repeats):
        for setting in settings:
            run = arguments.output / f"{setting}-{repeat}"
            failed += not make(run, SETTINGS[setting], arguments)
    print_table(arguments.output, chosen)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
