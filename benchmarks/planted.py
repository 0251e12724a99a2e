"""Run the rehearsal once with each of these faults, and list what the findings name.

    python benchmarks/planted.py --output DIR [--steps 6] [--engine standin] [FAULT ...]
    python benchmarks/planted.py --output DIR --table

A fault is planted as a user would have it: in a tool, a reward function or a dataset of one's own, or by
a setting.  Each run is also compared with runs without a fault: `slower` is what the mean step really
took longer than in those, first step left out, taken from the event files by `bench_what_if.py`.
Runs that are there already are not made again.  Exit status 1: a run failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_what_if import POLL, make, parsed, runs_of, seconds_of

# The same tool as the rehearsal's, with the same description, so that the model is the same.
TOOL = '''
import asyncio, itertools, time
from verl.tools.function_tool import function_tool
from verl_profiler.rehearsal.latency import latency_s

_calls = itertools.count()

@function_tool
async def calculate(expression: str) -> str:
    """Add numbers.

    Args:
        expression: Whole numbers with plus signs between them.
    """
    number = next(_calls)
    await asyncio.sleep(latency_s(f"{{expression}} {{number}}"))
    {fault}
    return str(sum(int(each) for each in expression.split("+") if each.strip().isdigit()))
'''
REWARD = """
import asyncio, time

async def score(data_source, solution_str, ground_truth, extra_info=None, **more):
    {fault}
    return float(str(ground_truth) in solution_str)
"""
DATASET = """
import time
from verl.utils.dataset.rl_dataset import RLHFDataset

class SlowDataset(RLHFDataset):
    def __getitem__(self, item):
        time.sleep(0.4)
        return super().__getitem__(item)
"""
TOOL_PATH = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
REWARD_PATH = "reward.custom_reward_function"


@dataclass(frozen=True)
class Fault:
    """What is planted, and which finding is to come first, with which words in its culprit.

    `seconds` is what a step takes longer for it, where that follows from what is planted alone.
    """

    about: str
    finding: tuple[str, ...]
    culprit: str = ""
    seconds: float | None = None
    words: list[str] = field(default_factory=list)
    tool: str = ""
    reward: str = ""
    dataset: str = ""


FAULTS = {
    "none": Fault("nothing (twice as a measure)", ()),
    "polling": Fault(
        "verl's own polling, 2 s",
        ("polling",),
        "poll",
        words=["rehearsal.poll_interval_s=null"],
    ),
    "stuck_tool": Fault(
        "one in 25 calls of a tool takes 10 s longer",
        ("slow_tools",),
        "calculate",
        tool="await asyncio.sleep(10 if number % 25 == 3 else 0)",
    ),
    "failing_tool": Fault(
        "one in 3 calls of a tool fails after 1 s",
        ("failing_tools",),
        "calculate",
        tool="if number % 3 == 1:\n        await asyncio.sleep(1)\n        raise RuntimeError('planted')",
    ),
    "blocking_tool": Fault(
        "one in 8 calls of a tool blocks the event loop for 1 s",
        ("event_loop",),
        "calculate",
        tool="time.sleep(1 if number % 8 == 3 else 0)",
    ),
    "slow_reward": Fault(
        "each reward takes 3 s", ("reward",), "", 3.0, reward="await asyncio.sleep(3)"
    ),
    "blocking_reward": Fault(
        "each reward blocks its worker's event loop for 0.25 s",
        ("reward", "event_loop"),
        "",
        reward="time.sleep(0.25)",
    ),
    "slow_data": Fault(
        "each prompt takes 0.4 s to load, 3.2 s per step",
        ("between_steps", "late_start"),
        "",
        3.2,
        dataset=DATASET,
    ),
    "late_rank": Fault(
        "one rank of two 0.8 s late in each phase",
        ("slow_ranks",),
        "1",
        2.4,
        words=["+faults.rank_delay_s=[0,0.8]"],
    ),
    "slow_sync": Fault(
        "each weight sync takes 3 s longer",
        ("weight_sync",),
        "",
        3.0,
        words=["+faults.weight_sync_s=3"],
    ),
    # Of a toy model it is less than 3 % of a step.
    "checkpoint": Fault("a checkpoint in each step", (), words=["trainer.save_freq=1"]),
    "validation": Fault(
        "validation in each step", ("validation",), "", words=["trainer.test_freq=1"]
    ),
}


def words_of(name: str, folder: Path) -> list[str]:
    """Write the files of a fault; return what is added to the command."""
    fault = FAULTS[name]
    words = [POLL, "trainer.test_freq=-1", *fault.words]
    files = folder / "files"
    files.mkdir(exist_ok=True)
    if fault.tool:
        path = files / f"{name}_tools.py"
        path.write_text(TOOL.format(fault=fault.tool))
        words.append(f"{TOOL_PATH}={path.resolve()}")
    if fault.reward:
        path = files / f"{name}_reward.py"
        path.write_text(REWARD.format(fault=fault.reward))
        words += [f"{REWARD_PATH}.path={path.resolve()}", f"{REWARD_PATH}.name=score"]
    if fault.dataset:
        path = files / f"{name}_dataset.py"
        path.write_text(fault.dataset)
        words += [f"data.custom_cls.path={path.resolve()}", "data.custom_cls.name=SlowDataset"]
    # Hydra takes the last of several.
    return words


def findings_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's findings, in order."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "verl-profiler"), "summary", str(run), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["findings"]


def print_table(folder: Path, chosen: list[str]) -> None:
    """Print what was planted beside what came first."""
    healthy = [seconds_of(run, "step") for run in runs_of(folder, "none")]
    base_s = fmean(healthy) if healthy else float("nan")
    print(
        "| planted | s per step | expected | first finding | culprit | recoverable, s | slower, s | others |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in chosen:
        fault = FAULTS[name]
        for run in runs_of(folder, name):
            found = [each for each in findings_of(run) if each["finding"] != "work"]
            names = [each["finding"] for each in found]
            first = found[0] if found else {}
            culprit = str(first.get("culprit_text") or "")
            right = (
                names[:1] != [] and names[0] in fault.finding and fault.culprit in culprit
                if fault.finding
                else not names
            )
            seconds = first.get("recoverable_s")
            print(
                f"| {fault.about} | {'' if fault.seconds is None else fault.seconds} "
                f"| {' or '.join(fault.finding) or 'none'} "
                f"| {'' if right else '**not**: '}{names[0] if names else 'none'} "
                f"| {culprit} "
                f"| {'' if seconds is None else format(seconds, '.2f')} "
                f"| {seconds_of(run, 'step') - base_s:.2f} | {', '.join(names[1:])} |"
            )


def main() -> int:
    """Run what is missing, then print the table."""
    arguments = parsed(__doc__ or "", "fault", FAULTS, steps=6)
    chosen = list(dict.fromkeys(["none", *arguments.names]))
    failed = 0
    if not arguments.table:
        for name in chosen:
            for repeat in range(2 if name == "none" else 1):
                run = arguments.output / f"{name}-{repeat}"
                failed += not make(run, words_of(name, arguments.output), arguments)
    print_table(arguments.output, chosen)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
