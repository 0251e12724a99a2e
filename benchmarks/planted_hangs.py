"""Plant hangs in a real rehearsal, one after the other, and see how each is explained.

    python benchmarks/planted_hangs.py --output DIR [--after 1] [--engine standin] [PLANT ...]

One rehearsal runs throughout; with SGLang, without the plants in the stand-in.  Each hang is planted in the middle of a step, and
removed once `verl-profiler stuck` has named a culprit, or after 90 s; then the training goes on.  Prints a
table: what was planted, what was named, and after how many seconds.

Exit status 1: a hang was not explained, or its culprit is not the one planted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIMIT_S = 90.0
# Steps before the first hang: a phase's usual length is known after three.
_STEPS = 4
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Plant:
    """One hang.

    Args:
        about: What is planted.
        expected: What the culprit must name, each of them.
        stopped: The process that gets SIGSTOP; None: the rehearsal's own hang of this name.
    """

    about: str
    expected: tuple[str, ...]
    stopped: str | None = None


PLANTS = {
    "tool": Plant("tools never answer", ("check_answer", "rehearsal.hangs:")),
    "blocking_tool": Plant(
        "a tool blocks its event loop", ("blocks the event loop of worker_", "rehearsal.hangs:")
    ),
    "reward": Plant("the reward function never returns", ("reward function", "rehearsal.hangs:")),
    "engine": Plant("a replica answers nothing", ("engine_0", "standin-0:0")),
    "rank": Plant("a rank does not enter a collective", ("actor_1", "rehearsal.hangs:")),
    "weight_sync": Plant("weights are never sent", ("actor_", "rehearsal.hangs:")),
    "stopped_rank": Plant("SIGSTOP of a rank", ("actor_1", "stopped"), "actor_1"),
    "stopped_worker": Plant("SIGSTOP of an agent-loop worker", ("worker_0", "stopped"), "worker_0"),
    "stopped_engine": Plant("SIGSTOP of an engine server", ("engine_1", "stopped"), "engine_1"),
    "stopped_reward": Plant("SIGSTOP of a reward worker", ("reward_0", "stopped"), "reward_0"),
    "stopped_storage": Plant(
        "SIGSTOP of a TransferQueue storage unit", ("tq_storage", "stopped"), "tq_storage"
    ),
    "stopped_trainer": Plant("SIGSTOP of the trainer", ("trainer_0", "stopped"), "trainer_0"),
}
# Planted in the stand-in engine.
_STANDIN = ("engine", "weight_sync")


@contextlib.contextmanager
def rehearsal(folder: Path, after_s: float, engine: str) -> Iterator[tuple[Path, Path]]:
    """Run a rehearsal; give its run directory, and the file that plants hangs in it."""
    run, hang = folder / "run", folder / "hang"
    command = [sys.executable, "-m", "verl_profiler", "rehearse", "--engine", engine]
    command += ["--steps", "1000", "--output", str(run), "rehearsal.poll_interval_s=0.05"]
    command += [f"rehearsal.hang={hang}", f"profiler.stuck.after={after_s}"]
    with (folder / "rehearsal.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            await_steps(run, _STEPS, process)
            yield run, hang
        finally:
            hang.unlink(missing_ok=True)
            # A background job of a shell ignores SIGINT.
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def last_step(run: Path) -> int:
    """Return the newest step that has events."""
    return max((int(each.name[5:]) for each in run.glob("step_*")), default=0)


def await_steps(run: Path, count: int, process: Any = None) -> None:
    """Wait until that many further steps have begun."""
    wanted, until = last_step(run) + count, time.monotonic() + _PATIENCE_S
    while last_step(run) < wanted:
        if time.monotonic() > until or (process is not None and process.poll() is not None):
            raise RuntimeError(f"{run} has no step {wanted}; see {run.parent / 'rehearsal.log'}")
        time.sleep(0.2)


def explained(run: Path) -> dict[str, Any]:
    """Return what `verl-profiler stuck` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "verl_profiler", "stuck", str(run), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert (done.returncode == 1) == (found["state"] == "stuck"), done
    return found


@contextlib.contextmanager
def planted(run: Path, hang: Path, name: str) -> Iterator[None]:
    """Hang the run."""
    stopped = PLANTS[name].stopped
    if stopped is None:
        hang.write_text(name)
        try:
            yield
        finally:
            hang.unlink()
        return
    (header,) = run.glob(f"processes/{stopped}*.json")
    pid = json.loads(header.read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def try_out(run: Path, hang: Path, name: str) -> tuple[dict[str, Any], float]:
    """Plant a hang; return how it is explained and after how many seconds it is so."""
    with planted(run, hang, name):
        begin_s = time.monotonic()
        while True:
            found = explained(run)
            spent_s = time.monotonic() - begin_s
            if is_named(name, found) or spent_s > _LIMIT_S:
                break
            time.sleep(0.5)
    await_steps(run, 2)
    return found, spent_s


def is_named(name: str, found: dict[str, Any]) -> bool:
    """Whether the culprit is what was planted."""
    culprit = found["culprit"] or ""
    return found["state"] == "stuck" and all(each in culprit for each in PLANTS[name].expected)


def main() -> int:
    """Plant all of them, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="PLANT", help=", ".join(PLANTS))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--after", type=float, default=1.0, help="profiler.stuck.after")
    parser.add_argument("--engine", choices=("standin", "sglang"), default="standin")
    arguments = parser.parse_args()
    known = [name for name in PLANTS if arguments.engine == "standin" or name not in _STANDIN]
    names = arguments.names or known
    arguments.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    with rehearsal(arguments.output, arguments.after, arguments.engine) as (run, hang):
        print("| planted | culprit | confidence | named after |")
        print("| --- | --- | --- | --- |")
        for name in names:
            found, spent_s = try_out(run, hang, name)
            failed += not is_named(name, found)
            culprit = found["culprit"] or found["state"]
            print(
                f"| {PLANTS[name].about} | {culprit} | {found['confidence'] or '-'} | {spent_s:.0f} s |",
                flush=True,
            )
            (arguments.output / f"{name}.json").write_text(json.dumps(found, indent=1))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
