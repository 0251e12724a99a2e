"""Run verl's trainer on this machine's CPU, profiled: no GPU is needed.

The trainer is the real one, with the real Ray, TransferQueue, FSDP2, agent loop and tools; by
default the engine is the real SGLang.  Sizes are toys: a model of 0.3 million parameters, 8 prompts
a step.  Use it to see the profiler at work, or to try a configuration before it costs anything:
Hydra overrides at the end of the command are handed to the trainer, for example

    verl-profiler rehearse --engine standin data.train_files=my.parquet
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from verl_profiler.cli.rehearsal_command import ENGINES, build
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.reading.formats.console_log import CONSOLE
from verl_profiler.rehearsal.process_tree import Children
from verl_profiler.rehearsal.progress import Progress, relevant_tail
from verl_profiler.render.visible import visible

__all__ = ["add_arguments", "run"]

# Say that the run is alive when nothing was told for this long.
QUIET_S = 20.0

# What an interrupted trainer is given to shut Ray down.
INTERRUPT_GRACE_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default="sglang",
        help="what generates: the real SGLang or vLLM, or a stand-in that needs neither and half the time",
    )
    parser.add_argument("--steps", type=_positive, default=3, help="training steps (default 3)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="run directory (default logs/rehearsal[-N])"
    )
    parser.add_argument(
        "--ranks", type=_positive, default=2, help="ranks, each with an engine replica (default 2)"
    )
    parser.add_argument(
        "--workers", type=_positive, default=2, help="agent-loop workers (default 2)"
    )
    parser.add_argument(
        "--profiler",
        default="multiturn",
        metavar="OPTION",
        help="option of the profiler group, or none (default multiturn)",
    )
    parser.add_argument(
        "--print-command",
        action="store_true",
        help="print the trainer's command with its environment, and run nothing",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="Hydra overrides for the trainer, last"
    )


def run(args: argparse.Namespace) -> int:
    """Rehearse; return 0 if the trainer ended well, 1 if not."""
    output = _output(args.output)
    command = build(
        engine=args.engine,
        profiler=args.profiler,
        output=output,
        steps=args.steps,
        ranks=args.ranks,
        workers=args.workers,
        overrides=args.overrides,
        current=os.environ,
    )
    if args.print_command:
        print(command.shell())
        return 0
    _check_installed(args.engine)
    output.mkdir(parents=True, exist_ok=True)
    console = output / CONSOLE
    clock = _Clock()
    clock.say(f"rehearsal of verl's main_ppo with {ENGINES[args.engine][1]}")
    clock.say(f"the trainer is real, its sizes are toys; the console goes to {_short(console)}")
    with console.open("wb") as file:
        status, tail = _follow(
            Children(command.arguments, {**os.environ, **command.variables}), file, clock
        )
    if status != 0:
        print_error(
            *(line.rstrip("\r\n") for line in relevant_tail(tail)),
            "",
            f"The trainer ended with status {status}.  Its console: {console}",
        )
        return 1
    clock.say("the trainer has ended")
    if args.profiler != "none":
        _summarize(output)
    print(f"Results: {_short(output)}", flush=True)
    return 0


class _Clock:
    """Tells messages with the time since the start."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.last = self.begin

    def say(self, message: str) -> None:
        self.last = time.monotonic()
        print(visible(f"{self.last - self.begin:4.0f} s  {message}"), flush=True)


def _follow(children: Children, file: IO[bytes], clock: _Clock) -> tuple[int, deque[str]]:
    """Copy the console to `file` and tell its milestones until the program ends."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in children.console:
            lines.put(line)
        lines.put(None)

    tail: deque[str] = deque(maxlen=400)
    progress = Progress()
    # A daemon, because a stray process that holds the pipe must not keep this one alive.
    threading.Thread(target=read, name="rehearsal console", daemon=True).start()
    try:
        with _termination_as_interrupt():
            while True:
                try:
                    line = lines.get(timeout=1.0)
                except queue.Empty:
                    if children.program.poll() is not None:
                        break
                    if time.monotonic() - clock.last > QUIET_S:
                        clock.say(f"… {progress.stage}")
                    continue
                if line is None:
                    break
                file.write(line)
                file.flush()
                text = line.decode(errors="replace")
                tail.append(text)
                message = progress.read(text)
                if message:
                    clock.say(message)
            return children.program.wait(), tail
    except KeyboardInterrupt:
        clock.say("interrupted; ending the trainer and what it started")
        children.interrupt(INTERRUPT_GRACE_S)
        clock.say(f"console log and events so far: {_short(Path(file.name).parent)}")
        raise
    finally:
        children.end()


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal as Ctrl-C, so that nothing is left running."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _output(given: Path | None) -> Path:
    """Return the run directory: absolute, and of this rehearsal alone."""
    if given is None:
        number, path = 1, Path("logs/rehearsal")
        while path.exists():
            number += 1
            path = Path(f"logs/rehearsal-{number}")
        return path.absolute()
    if given.exists() and not (given.is_dir() and not any(given.iterdir())):
        raise ConfigError(
            f"{given} exists already, and a run directory belongs to one run.\n"
            "Choose another with --output DIR, or leave --output out.",
            "output-exists",
        )
    return given.absolute()


def _check_installed(engine: str) -> None:
    needed = ["verl", "ray", "transfer_queue", "transformers"]
    if engine != "standin":
        needed.append(engine)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        other = " With --engine standin it is not needed." if missing == [engine] else ""
        raise ConfigError(
            f"a rehearsal needs {', '.join(missing)}, which {sys.executable} does not have."
            f"{other}\nInstall as docs/rehearsal.md says, or with: make rehearsal ENGINE={engine}",
            "rehearsal-not-installed",
        )


def _summarize(output: Path) -> None:
    """Print the summary and write the report."""
    try:
        summary = importlib.import_module("verl_profiler.cli.summary")
    except ImportError as error:
        print(visible(f"No summary: {error}.  The events are in {_short(output)}"), flush=True)
        return
    summary.summarize(output, sys.stdout)
    try:
        report = importlib.import_module("verl_profiler.cli.report")
        written = report.write_report(output, force=True)
    except (ImportError, ReadingError) as error:
        print(visible(f"No report: {error}"), flush=True)
        return
    print(f"Wrote {_short(written)}", flush=True)


def _short(path: Path) -> str:
    """Return a path relative to the current directory where it lies below it."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return visible(str(path))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
