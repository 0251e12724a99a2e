"""Plant hangs in a real rehearsal, one after the other, and see how each is explained.

    python benchmarks/planted_hangs.py --output DIR [--after 1] [--engine standin] [PLANT ...]

Three hangs share a rehearsal; with SGLang, without the plants in the stand-in.  Each hang is planted in
the middle of a step, and removed once `verl-profiler stuck` has named a culprit, or after 90 s; then the
training goes on.  What kills a process or needs a disk of its own comes last, each in its own rehearsal;
the disks need root and bindfs (of Debian's package of this name), and are left out without.  Prints a table:
what was planted, what was named, and after how many seconds.

Exit status 1: a hang was not explained, or its culprit is not the one planted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from rehearsal_faults import with_faults

_LIMIT_S = 90.0
# Steps before the first hang: a phase's usual length is known after three.
_STEPS = 4
# On a busy machine, the first step takes minutes.
_PATIENCE_S = 600.0
_EVIDENCE_S = 16.0
# Of so many hangs of a run, evidence is gathered.
_HANGS = 3


@dataclass(frozen=True)
class Plant:
    """One hang.

    Args:
        about: What is planted.
        expected: What the culprit must name, each of them.
        process: The process that gets `signal`; None: the rehearsal's own hang of this name.
        signal: SIGSTOP, which SIGCONT ends; or SIGKILL.
        child: The signal goes to its child process whose title begins so.
        trainer: The trainer of a rehearsal of its own, if not the synchronous one.
        place: The rehearsal's own hang, in which the process stops itself; SIGCONT ends it.
        disk: Whether the run directory ("run") or the checkpoints ("checkpoints") are on a disk of
            their own: "full" or "frozen" while planted.
        state: How `stuck` must call the run.
    """

    about: str
    expected: tuple[str, ...]
    process: str | None = None
    signal: int = signal.SIGSTOP
    disk: tuple[str, str] | None = None
    state: str = "stuck"
    child: str | None = None
    place: str | None = None
    trainer: str | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it takes a rehearsal of its own."""
        return self.disk is not None or self.trainer is not None or self.signal == signal.SIGKILL


PLANTS = {
    "tool": Plant("tools never answer", ("check_answer", "rehearsal_hangs:")),
    "blocking_tool": Plant(
        "a tool blocks its event loop", ("blocks the event loop of worker_", "rehearsal_hangs:")
    ),
    "semaphore": Plant(
        "a deadlocked semaphore",
        ("check_answer", "rehearsal_hangs:deadlock_at", "waits for a semaphore"),
    ),
    "paused": Plant(
        "an engine is paused and never resumed", ("engine_0, paused for", "not resumed")
    ),
    "reward": Plant("the reward function never returns", ("reward function", "rehearsal_hangs:")),
    "engine": Plant("a replica answers nothing", ("engine_0", "standin-0:0")),
    "rank": Plant("a rank does not enter a collective", ("actor_1", "rehearsal_hangs:")),
    "barrier": Plant(
        "a rank skips a barrier", ("different collectives", "actor_0 in barrier", "actor_1 in")
    ),
    "collective": Plant(
        "SIGSTOP of a rank in a collective",
        ("actor_1", "stopped"),
        "actor_1",
        place="collective",
    ),
    "rollouter": Plant(
        "a rollouter generates no more samples",
        ("rollouter_", "neither dispatched nor finished a sample", "in flight", "rehearsal_hangs:"),
        trainer="fully_async",
    ),
    "stopped_rollouter": Plant(
        "SIGSTOP of a rollouter", ("rollouter_", "stopped"), "rollouter_", trainer="fully_async"
    ),
    "weight_sync": Plant("weights are never sent", ("actor_", "rehearsal_hangs:")),
    "stopped_rank": Plant("SIGSTOP of a rank", ("actor_1", "stopped"), "actor_1"),
    "stopped_worker": Plant("SIGSTOP of an agent-loop worker", ("worker_0", "stopped"), "worker_0"),
    "stopped_engine": Plant("SIGSTOP of an engine server", ("engine_1", "stopped"), "engine_1"),
    "stopped_scheduler": Plant(
        "SIGSTOP of an SGLang scheduler",
        ("scheduler of engine_1", "does not answer"),
        "engine_1",
        child="sglang::scheduler",
    ),
    "stopped_reward": Plant("SIGSTOP of a reward worker", ("reward_0", "stopped"), "reward_0"),
    "stopped_storage": Plant(
        "SIGSTOP of a TransferQueue storage unit", ("tq_storage", "stopped"), "tq_storage"
    ),
    "stopped_trainer": Plant("SIGSTOP of the trainer", ("trainer_0", "stopped"), "trainer_0"),
    "killed_storage": Plant(
        "SIGKILL of a TransferQueue storage unit",
        ("tq_storage", "no longer exists"),
        "tq_storage",
        signal.SIGKILL,
    ),
    "killed_rank": Plant(
        "SIGKILL of a rank", ("actor_1, which died",), "actor_1", signal.SIGKILL, state="failed"
    ),
    "full_disk": Plant(
        "tools never answer, and the disk of the run directory is full",
        ("the disk of", "0 B are free"),
        disk=("run", "full"),
        state="silent",
    ),
    "frozen_disk": Plant(
        "the file system of the run directory does not answer",
        ("the file system of", "does not answer"),
        disk=("run", "frozen"),
        state="silent",
    ),
    "frozen_checkpoints": Plant(
        "the file system of the checkpoints does not answer",
        ("actor_", "verl.utils.fs:"),
        disk=("checkpoints", "frozen"),
    ),
}
# Planted in the stand-in engine, and in a process that it does not have.
_ONLY = {"standin": ("engine", "weight_sync"), "sglang": ("stopped_scheduler",)}


@contextlib.contextmanager
def rehearsal(
    folder: Path, after_s: float, engine: str, run: Path, words: Sequence[str] = ()
) -> Iterator[Path]:
    """Run a rehearsal; give the file that plants hangs in it."""
    hang = folder / "hang"
    command = [sys.executable, "-m", "verl_profiler", "rehearse", "--engine", engine]
    command += ["--steps", "1000", "--output", str(run), *words, "rehearsal.poll_interval_s=0.05"]
    command += [f"+faults.hang={hang}", f"profiler.stuck.after={after_s}"]
    with (folder / "rehearsal.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=with_faults(os.environ))
        try:
            await_steps(run, _STEPS, process)
            yield hang
        finally:
            hang.unlink(missing_ok=True)
            # A background job of a shell ignores SIGINT.
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def disk(folder: Path, kind: str) -> Iterator[Path]:
    """Mount one: of 64 MiB, or one that a process of its own serves."""
    place, behind = folder / "disk", folder / "behind"
    place.mkdir()
    behind.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    if kind == "frozen":
        mounting = ["bindfs", "--no-allow-other", str(behind), str(place)]
    subprocess.run(mounting, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@contextlib.contextmanager
def disk_trouble(place: Path, kind: str, hang: Path) -> Iterator[None]:
    """Fill the disk while tools hang, or stop the process that serves it."""
    if kind == "full":
        filler = place / "filler"
        hang.write_text("tool")
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        try:
            yield
        finally:
            filler.unlink()
            hang.unlink()
        return
    (pid,) = subprocess.run(
        ["pgrep", "-f", f"bindfs .* {place}$"], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(pid), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(pid), signal.SIGCONT)


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
    assert (done.returncode == 1) == (found["culprit"] is not None), done
    return found


def child_of(parent: int, title: str) -> int:
    """Return the process id of a child whose title begins so."""
    for child in psutil.Process(parent).children():
        if " ".join(child.cmdline()).startswith(title):
            return child.pid
    raise RuntimeError(f"process {parent} has no child {title}")


@contextlib.contextmanager
def planted(run: Path, hang: Path, name: str) -> Iterator[None]:
    """Hang the run."""
    plant = PLANTS[name]
    if plant.process is None:
        hang.write_text(name)
        try:
            yield
        finally:
            hang.unlink()
        return
    (header,) = run.glob(f"processes/{plant.process}*.json")
    pid = json.loads(header.read_text())["pid"]
    if plant.child is not None:
        pid = child_of(pid, plant.child)
    if plant.place is None:
        os.kill(pid, plant.signal)
    else:
        hang.write_text(plant.place)
    try:
        yield
    finally:
        hang.unlink(missing_ok=True)
        if plant.signal != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)


def try_out(run: Path, name: str) -> tuple[dict[str, Any], float]:
    """Return how a hang is explained, and after how many seconds it is so."""
    begin_s = time.monotonic()
    while True:
        found = explained(run)
        spent_s = time.monotonic() - begin_s
        if is_named(name, found) or spent_s > _LIMIT_S:
            break
        time.sleep(0.5)
    # Processes gather evidence once the run is found to be stuck.
    until_s = time.monotonic() + _EVIDENCE_S
    # It is complete when no further process has any for some seconds.
    seen: set[str] = set()
    while found["state"] == "stuck" and time.monotonic() < until_s:
        time.sleep(3)
        later = explained(run)
        found |= {key: later[key] for key in ("facts", "details")}
        names = {line for line in found["details"] if not line.startswith(" ")}
        if names and names == seen:
            break
        seen = names
    return found, spent_s


def try_alone(folder: Path, name: str, after_s: float, engine: str) -> tuple[dict[str, Any], float]:
    """Do so in a rehearsal of its own."""
    plant = PLANTS[name]
    folder = folder / name
    folder.mkdir()
    run = folder / "run"
    with contextlib.ExitStack() as stack:
        if plant.disk is None:
            words = [] if plant.trainer is None else ["--trainer", plant.trainer]
            words += ["--ranks", "1"] if plant.trainer is not None else []
            hang = stack.enter_context(rehearsal(folder, after_s, engine, run, words))
            with planted(run, hang, name):
                found = try_out(run, name)
            if plant.signal != signal.SIGKILL:
                await_steps(run, 2)
            return found
        where, kind = plant.disk
        place = stack.enter_context(disk(folder, kind))
        words = [f"trainer.default_local_dir={place}/checkpoints", "trainer.save_freq=1"]
        words = [*words, "trainer.max_actor_ckpt_to_keep=1"] if where == "checkpoints" else []
        run = place / "run" if where == "run" else run
        hang = stack.enter_context(rehearsal(folder, after_s, engine, run, words))
        with disk_trouble(place, kind, hang):
            found = try_out(run, name)
        await_steps(run, 2)
        return found


def is_named(name: str, found: dict[str, Any]) -> bool:
    """Whether the culprit is what was planted."""
    culprit = found["culprit"] or ""
    return found["state"] == PLANTS[name].state and all(
        each in culprit for each in PLANTS[name].expected
    )


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
    others = [name for engine, own in _ONLY.items() if engine != arguments.engine for name in own]
    known = [name for name in PLANTS if name not in others]
    if os.getuid() != 0 or shutil.which("bindfs") is None:
        known = [name for name in known if PLANTS[name].disk is None]
    names = arguments.names or known
    arguments.output.mkdir(parents=True, exist_ok=True)
    print("| planted | culprit | confidence | named after |")
    print("| --- | --- | --- | --- |")
    engine, after_s = arguments.engine, arguments.after
    failed = 0
    together = [name for name in names if not PLANTS[name].is_alone]
    for first in range(0, len(together), _HANGS):
        folder = arguments.output / f"rehearsal_{first // _HANGS + 1}"
        folder.mkdir()
        run = folder / "run"
        with rehearsal(folder, after_s, engine, run) as hang:
            for name in together[first : first + _HANGS]:
                with planted(run, hang, name):
                    found = try_out(run, name)
                failed += reported(name, *found, arguments.output)
                await_steps(run, 2)
    for name in names:
        if PLANTS[name].is_alone:
            found = try_alone(arguments.output, name, after_s, engine)
            failed += reported(name, *found, arguments.output)
    return min(failed, 1)


def reported(name: str, found: dict[str, Any], spent_s: float, folder: Path) -> bool:
    """Print a row and keep the answer; return whether the culprit is not what was planted."""
    culprit = found["culprit"] or found["state"]
    confidence = found["confidence"] or "-"
    print(f"| {PLANTS[name].about} | {culprit} | {confidence} | {spent_s:.0f} s |", flush=True)
    for fact in found["facts"]:
        print(f"  {fact}", file=sys.stderr, flush=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    return not is_named(name, found)


if __name__ == "__main__":
    sys.exit(main())
