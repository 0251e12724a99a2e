"""Run several commands at once on one run, cold and while it grows, and compare all that they print.

    python benchmarks/stress_cache.py                          50 rounds of each kind
    python benchmarks/stress_cache.py --rounds 2 --processes 1

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

KINDS = ("cold", "growing", "readonly", "removed", "warm")
AT_HOME = ("readonly",)
GROWING = ("growing", *AT_HOME)
NOBODY = 65534
COMMANDS = (
    ("summary", "--json"),
    ("requests", "--json"),
    ("why", "--json"),
    ("report",),
    ("tq", "--json"),
    ("memory", "--json"),
)
Answer = tuple[int, str, str]
# When a report was written.
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC(?=\.</p></footer>)")


def answer_of(command: tuple[str, ...], run: Path, out: Path, *options: str) -> Answer:
    """Run a command in this process; return its exit status, what it wrote, and its errors."""
    from verl_profiler.cli import main

    printed, errors = io.StringIO(), io.StringIO()
    words = _words(command, run, out, options)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except BaseException:  # noqa: BLE001  an interrupt is an answer too
            import traceback

            traceback.print_exc()
            status = -1
    return status, _written(command, printed.getvalue(), out), errors.getvalue()


def answer_of_process(command: tuple[str, ...], run: Path, out: Path, *options: str) -> Answer:
    """Run a command as a user does."""
    words = [sys.executable, "-m", "verl_profiler", *_words(command, run, out, options)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, _written(command, done.stdout, out), done.stderr


def _words(command: tuple[str, ...], run: Path, out: Path, options: tuple[str, ...]) -> list[str]:
    more = ["--force", "-o", str(out)] if command[0] == "report" else []
    return [command[0], str(run), *command[1:], *more, *options]


def _written(command: tuple[str, ...], printed: str, out: Path) -> str:
    if command[0] == "report":
        return _DATE.sub("", out.read_text()) if out.exists() else printed
    # A sum depends on the order of its numbers, in the last digits.
    with contextlib.suppress(ValueError):
        content = json.loads(printed, parse_float=lambda digits: f"{float(digits):.9g}")
        return json.dumps(content, indent=1)
    return printed


def _work(
    orders: Connection, barrier: Any, kind: str, run: Path, commands: tuple[tuple[str, ...], ...]
) -> None:
    """Answer orders until there are none."""
    if kind in AT_HOME:
        from verl_profiler.reading import cache_folder

        # Seconds for which nothing is removed that was used.
        cache_folder._HOME_UNUSED_S = 0.0
    if kind == "readonly":
        # The interpreter and its modules may be where only this user reads.
        for command in commands:
            answer_of(command, run, run.with_name("report.html"), "--no-cache")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    while order := orders.recv():
        command, run, out, as_process = order
        barrier.wait()
        ask = answer_of_process if as_process else answer_of
        orders.send(ask(command, run, out))


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


def expected_answers(
    growth: Growth, commands: tuple[tuple[str, ...], ...], out: Path
) -> list[dict[tuple[str, ...], str]]:
    """Return what each command prints in each state when it is alone and nothing is kept."""
    growth.begin()
    answers = []
    for state in range(growth.states):
        if state:
            growth.grow(state)
        found = {}
        for command in commands:
            status, printed, errors = answer_of(command, growth.run, out, "--no-cache")
            if status == -1:
                raise RuntimeError(f"{command} fails when it is alone: {errors}")
            found[command] = printed
        answers.append(found)
    return answers


def stress(
    folder: Path,
    rounds: int,
    at_once: int,
    processes: int,
    kinds: tuple[str, ...],
    commands: tuple[tuple[str, ...], ...],
) -> list[str]:
    """Run all rounds; return one line for each wrong answer."""
    sys.path.insert(0, str(Path(__file__).parent))
    from generate_events import Shape, generate

    generate(folder / "run-whole", Shape(steps=4, workers=2, requests=6, turns=3))
    growth = Growth.of(folder / "run-whole", folder / "run")
    expected = expected_answers(growth, commands, folder / "report.html")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(at_once + 1)
    failures: list[str] = []
    for kind in kinds:
        begin = time.perf_counter()
        before = len(failures)
        with _workers(context, barrier, kind, at_once, growth.run, commands) as workers:
            for number in range(rounds):
                as_process = number < processes and kind != "readonly"
                failures += _round(growth, expected, workers, barrier, kind, number, as_process)
        wrong = len(failures) - before
        if kind in AT_HOME:
            kept = sorted((folder / kind).glob("caches/runs/*/*/*.parquet"))
            beside = (growth.run / ".cache").exists()
            failures += [f"{kind}: the run has a cache beside it"] * beside
            failures += [f"{kind}: nothing was kept at home"] * (not kept)
        length_s = time.perf_counter() - begin
        print(
            f"  {kind:<10}{rounds * at_once:>6} commands{wrong:>6} wrong{length_s:>8.0f} s",
            *failures[before:][:8],
            sep="\n    ",
            flush=True,
        )
    return failures


@contextlib.contextmanager
def _workers(
    context: Any,
    barrier: Any,
    kind: str,
    at_once: int,
    run: Path,
    commands: tuple[tuple[str, ...], ...],
) -> Iterator[list[tuple[Connection, Any]]]:
    """Start processes that answer orders, with the caches that a kind of round is about."""
    environment = {}
    if kind in AT_HOME:
        place = run.with_name(kind)
        place.mkdir()
        os.chmod(place, 0o777)
        environment = {
            "VERL_PROFILER_CACHE_HOME": str(place / "caches"),
            "VERL_PROFILER_CACHE_GB": "0",
        }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    workers = []
    try:
        for _ in range(at_once):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(its, barrier, kind, run, commands), daemon=True
            )
            process.start()
            workers.append((mine, process))
        yield workers
    finally:
        for orders, process in workers:
            with contextlib.suppress(OSError):
                orders.send(None)
            process.join(10)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _difference(printed: str, expected: str) -> str:
    """Return the first lines that are not the same."""
    pairs = zip(printed.splitlines(), expected.splitlines(), strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), ("one is", "longer"))
    return f"other numbers: {first[0].strip()[:100]} for {first[1].strip()[:100]}"


def _round(
    growth: Growth,
    expected: list[dict[tuple[str, ...], str]],
    workers: list[tuple[Connection, Any]],
    barrier: Any,
    kind: str,
    number: int,
    as_process: bool,
) -> list[str]:
    commands = list(expected[0])
    state = number % growth.states
    if state == 0:
        growth.begin()
    elif kind not in GROWING:
        growth.grow(state)
    cache = growth.run / ".cache"
    if kind == "cold":
        shutil.rmtree(cache, ignore_errors=True)
    if kind == "warm":
        answer_of(commands[0], growth.run, growth.run.with_name("report.html"))
    # Some commands twice.
    asked = [commands[(number + place * place) % len(commands)] for place in range(len(workers))]
    for place, (orders, _) in enumerate(workers):
        out = growth.run.parent / (kind if kind in AT_HOME else "") / f"report-{place}.html"
        orders.send((asked[place], growth.run, out, as_process))
    barrier.wait()
    possible = [state]
    if kind in GROWING and state:
        possible = [state - 1, state]
        time.sleep(0.03 * (number % 10))
        growth.grow(state)
    waiting = {orders for orders, _ in workers}
    while kind == "removed" and waiting:
        shutil.rmtree(cache, ignore_errors=True)
        time.sleep(0.01)
        waiting = {orders for orders in waiting if not orders.poll()}
    wrong = []
    for command, (orders, _) in zip(asked, workers, strict=True):
        status, printed, errors = orders.recv()
        right = any(printed == expected[each][command] for each in possible)
        if right and not errors:
            continue
        last = errors.strip().splitlines()[-1:] or [_difference(printed, expected[state][command])]
        wrong.append(f"{kind}, round {number}, {' '.join(command)}: exit {status}, {last[0][:300]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50, help="of each kind")
    parser.add_argument("--at-once", type=int, default=4, help="commands at the same moment")
    parser.add_argument(
        "--processes",
        type=int,
        default=5,
        help="rounds of each kind that start commands as a shell does; the others use one process "
        "for several commands, one after the other",
    )
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
            arguments.processes,
            tuple(kinds),
            tuple(c for c in COMMANDS if c[0] in (arguments.command or c)),
        )
    print(
        json.dumps(failures, indent=1) if failures else "Every command printed the same as alone."
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
