"""Run several commands at once on one run, cold and while it grows, and compare all that they print.

    python benchmarks/stress_cache.py                          50 rounds of each kind
    python benchmarks/stress_cache.py --rounds 2 --kind cold --kind growing

A round starts the commands at the same moment, in processes of their own.

    cold      the run has no cache
    warm      the run has a cache
    growing   a step is added, or a file gets more lines, while they start
    removed   the cache is removed by hand while they read
    readonly  as growing, and the run is another user's, who alone may write there (needs root): caches are in
              the home of all caches, and each command removes all that are not open

Each must print what the same command prints alone, without a cache: of the run as it was before the
round or after it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from generate_events import Shape, generate

# A command's process is a copy of this one, which reads no run itself and so has no threads.
FORKED = multiprocessing.get_context("fork")
KINDS = ("cold", "growing", "readonly", "removed", "warm")
GROWING = ("growing", "readonly")
NOBODY = 65534
COMMANDS = (
    ("summary", "--json"),
    ("requests", "--json"),
    ("why", "--json"),
    ("report",),
    ("tq", "--json"),
    ("memory", "--json"),
)
Command = tuple[str, ...]
Answer = tuple[int, str, str]
# When a report was written.
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC(?=\.</p></footer>)")


def answer_of(command: Command, run: Path, out: Path, *options: str) -> Answer:
    """Run a command in this process; return its exit status, what it wrote, and its errors."""
    from verl_profiler.cli import main

    printed, errors = io.StringIO(), io.StringIO()
    more = ["--force", "-o", str(out)] if command[0] == "report" else []
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = main([command[0], str(run), *command[1:], *more, *options])
        except BaseException:  # noqa: BLE001  an interrupt is an answer too
            traceback.print_exc()
            status = -1
    return status, _written(command, printed.getvalue(), out), errors.getvalue()


def _written(command: Command, printed: str, out: Path) -> str:
    if command[0] == "report":
        return _DATE.sub("", out.read_text()) if out.exists() else printed
    # A sum depends on the order of its numbers, in the last digits.
    with contextlib.suppress(ValueError):
        content = json.loads(printed, parse_float=lambda digits: f"{float(digits):.9g}")
        return json.dumps(content, indent=1)
    return printed


class Process:
    """A process that runs one command; when all of a round are ready, they begin.

    Args:
        command: What it runs.
        run: The run that is read.
        out: Where a report is written.
        kind: Of the round, which decides who reads and where caches are.
        barrier: Of the round; None for a command that runs alone and keeps nothing.
    """

    def __init__(
        self, command: Command, run: Path, out: Path, kind: str = "", barrier: Any = None
    ) -> None:
        self.command = command
        self._answer, answer = FORKED.Pipe(duplex=False)
        arguments = (answer, command, run, out, kind, barrier)
        self._process = FORKED.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        answer.close()

    def has_ended(self) -> bool:
        """Whether its answer is there."""
        return self._answer.poll()

    def answer(self) -> Answer:
        """Wait for its end."""
        answer = self._answer.recv()
        self._process.join()
        return answer


def _run(
    answer: Connection, command: Command, run: Path, out: Path, kind: str, barrier: Any
) -> None:
    options = () if barrier else ("--no-cache",)
    if kind == "readonly":
        # The interpreter and its modules may be where only this user reads.
        answer_of(command, run, run.with_name("report.html"), "--no-cache")
        from verl_profiler.reading import cache_folder

        # Seconds for which nothing is removed that was used.
        cache_folder._HOME_UNUSED_S = 0.0
        home = run.with_name(kind) / "caches"
        os.environ |= {"VERL_PROFILER_CACHE_HOME": str(home), "VERL_PROFILER_CACHE_GB": "0"}
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if barrier:
        barrier.wait()
    answer.send(answer_of(command, run, out, *options))


@dataclass
class Growth:
    """A run that grows by one file operation at a time.

    Args:
        whole: The run at its end.
        run: The run that grows.
        steps: Step folders, in order.
    """

    whole: Path
    run: Path
    steps: list[Path]
    states: int = 0

    @classmethod
    def of(cls, whole: Path, run: Path) -> Growth:
        steps = sorted(whole.glob("step_*"), key=lambda path: int(path.name[5:]))
        # Of each step but the first two, first the folder with half a file, then its other half.
        return cls(whole, run, steps, 2 * (len(steps) - 2) + 1)

    def begin(self) -> None:
        """Make the run as it is in state 0."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.whole, self.run, ignore=shutil.ignore_patterns(".cache", "step_*"))
        for step in self.steps[:2]:
            shutil.copytree(step, self.run / step.name)

    def grow(self, state: int) -> None:
        """Make state `state` of the one before."""
        place, second = divmod(state - 1, 2)
        step = self.steps[2 + place]
        growing = step / "worker_0.jsonl"
        lines = growing.read_bytes().splitlines(keepends=True)
        if second:
            with (self.run / step.name / growing.name).open("ab", buffering=0) as file:
                file.write(b"".join(lines[len(lines) // 2 :]))
            return
        beside = self.run.with_name("next-step")
        shutil.copytree(step, beside)
        (beside / growing.name).write_bytes(b"".join(lines[: len(lines) // 2]))
        beside.rename(self.run / step.name)


def expected_answers(growth: Growth, commands: tuple[Command, ...]) -> list[dict[Command, str]]:
    """Return what each command prints in each state when it is alone and nothing is kept."""
    growth.begin()
    answers = []
    for state in range(growth.states):
        if state:
            growth.grow(state)
        found = {}
        for command in commands:
            out = growth.run.with_name("report.html")
            status, printed, errors = Process(command, growth.run, out).answer()
            if status == -1:
                raise RuntimeError(f"{command} fails when it is alone: {errors}")
            found[command] = printed
        answers.append(found)
    return answers


def stress(
    folder: Path, rounds: int, at_once: int, kinds: tuple[str, ...], commands: tuple[Command, ...]
) -> list[str]:
    """Run all rounds; return one line for each wrong answer."""
    generate(folder / "run-whole", Shape(steps=4, workers=2, requests=6, turns=3))
    growth = Growth.of(folder / "run-whole", folder / "run")
    expected = expected_answers(growth, commands)
    failures: list[str] = []
    for kind in kinds:
        begin = time.perf_counter()
        before = len(failures)
        # For what another user writes.
        (folder / kind).mkdir()
        os.chmod(folder / kind, 0o777)
        for number in range(rounds):
            failures += _round(growth, expected, at_once, kind, number)
        wrong = len(failures) - before
        if kind == "readonly":
            # What was kept there, others of the round may have removed.
            used = (folder / kind / "caches" / "runs").is_dir()
            beside = (growth.run / ".cache").exists()
            failures += [f"{kind}: the run has a cache beside it"] * beside
            failures += [f"{kind}: the home of all caches was not used"] * (not used)
        length_s = time.perf_counter() - begin
        print(
            f"  {kind:<10}{rounds * at_once:>6} commands{wrong:>6} wrong{length_s:>8.0f} s",
            *failures[before:][:8],
            sep="\n    ",
            flush=True,
        )
    return failures


def fill_cache(growth: Growth, command: Command, kind: str) -> None:
    """Run one command alone, so that the run has a cache."""
    out = growth.run.with_name(kind) / "report.html"
    Process(command, growth.run, out, kind, FORKED.Barrier(1)).answer()


def _difference(printed: str, expected: str) -> str:
    """Return the first lines that are not the same."""
    pairs = zip(printed.splitlines(), expected.splitlines(), strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), ("one is", "longer"))
    return f"other numbers: {first[0].strip()[:100]} for {first[1].strip()[:100]}"


def _round(
    growth: Growth, expected: list[dict[Command, str]], at_once: int, kind: str, number: int
) -> list[str]:
    commands = list(expected[0])
    state = number % growth.states
    if state == 0:
        growth.begin()
    elif kind not in GROWING:
        growth.grow(state)
    barrier = FORKED.Barrier(at_once + 1)
    cache, folder = growth.run / ".cache", growth.run.with_name(kind)
    if kind == "cold":
        shutil.rmtree(cache, ignore_errors=True)
    if kind == "warm":
        fill_cache(growth, commands[0], kind)
    # Some commands twice.
    chosen = [commands[(number + place * place) % len(commands)] for place in range(at_once)]
    processes = [
        Process(command, growth.run, folder / f"report-{place}.html", kind, barrier)
        for place, command in enumerate(chosen)
    ]
    barrier.wait()
    possible = [state]
    if kind in GROWING and state:
        possible = [state - 1, state]
        time.sleep(0.03 * (number % 10))
        growth.grow(state)
    while kind == "removed" and not all(process.has_ended() for process in processes):
        shutil.rmtree(cache, ignore_errors=True)
        time.sleep(0.01)
    wrong = []
    for process in processes:
        status, printed, errors = process.answer()
        right = any(printed == expected[each][process.command] for each in possible)
        if right and not errors:
            continue
        other = _difference(printed, expected[state][process.command])
        last = errors.strip().splitlines()[-1:] or [other]
        words = " ".join(process.command)
        wrong.append(f"{kind}, round {number}, {words}: exit {status}, {last[0][:300]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50, help="of each kind")
    parser.add_argument("--at-once", type=int, default=4, help="commands at the same moment")
    parser.add_argument(
        "--command",
        choices=[command[0] for command in COMMANDS],
        action="append",
        help="may be repeated",
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated")
    arguments = parser.parse_args()
    kinds = arguments.kind or [kind for kind in KINDS if kind != "readonly" or not os.geteuid()]
    with tempfile.TemporaryDirectory(prefix="stress_cache-") as folder:
        os.chmod(folder, 0o755)
        failures = stress(
            Path(folder),
            arguments.rounds,
            arguments.at_once,
            tuple(kinds),
            tuple(c for c in COMMANDS if c[0] in (arguments.command or c)),
        )
    print(
        json.dumps(failures, indent=1) if failures else "Every command printed the same as alone."
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
