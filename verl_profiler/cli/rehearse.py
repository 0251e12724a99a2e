"""Run verl's trainer on this machine's CPU with profiling; no GPU needed.

The trainer, Ray, TransferQueue, FSDP2, agent loop and tools are the real ones;
by default the engine is the real SGLang. Sizes are tiny: a model of 0.3
million parameters, 8 prompts per step. Use it to try the profiler, or to test
a configuration before paying for a cluster. Hydra overrides at the end of the
command are passed to the trainer, for example

    verl-profiler rehearse --engine standin data.train_files=my.parquet

or the whole command of a training, whose sizes, model, engine and GPUs are
replaced by small ones:

    verl-profiler rehearse --engine standin -- python -m verl.trainer.main_ppo …
    verl-profiler rehearse --engine standin -- bash train.sh
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import queue
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from verl_profiler.cli.options import Argument
from verl_profiler.cli.rehearsal_command import (
    ENGINES,
    NO_EXAMPLE,
    TRAINERS,
    build,
    not_rehearsed,
    trainer_of,
    without_sizes,
)
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ConfigError
from verl_profiler.events.remote import is_url
from verl_profiler.launch.command_line import check_overrides, is_command, parse
from verl_profiler.reading.formats.console_log import CONSOLE
from verl_profiler.rehearsal.process_tree import Children
from verl_profiler.rehearsal.progress import Progress, relevant_tail
from verl_profiler.render.visible import visible

# Print the current stage after this long without output, in s.
QUIET_S = 20.0

# How long an interrupted trainer may take to shut Ray down.
INTERRUPT_GRACE_S = 15.0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _directory(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a URL. To upload the run, add the override profiler.output_dir={text}"
        )
    return Path(text)


ARGUMENTS = (
    Argument(
        "--engine",
        choices=sorted(ENGINES),
        default="sglang",
        help="the real SGLang or vLLM, or a stand-in engine that needs neither and takes half the time",
    ),
    Argument(
        "--trainer",
        choices=TRAINERS,
        metavar="TRAINER",
        default="sync",
        help=f"{', '.join(TRAINERS)}; all but sync and colocate_async have a separate replica "
        "(default: sync)",
    ),
    Argument("--steps", type=_positive, default=3, help="training steps (default: 3)"),
    Argument(
        "-o",
        "--out",
        "--output",
        type=_directory,
        metavar="DIR",
        help="run directory (default: logs/rehearsal[-N])",
    ),
    Argument(
        "--ranks", type=_positive, default=2, help="ranks, each with an engine replica (default: 2)"
    ),
    Argument("--workers", type=_positive, default=2, help="agent-loop workers (default: 2)"),
    Argument(
        "--profiler",
        default="multiturn",
        metavar="OPTION",
        help="option of the profiler config group, or none (default: multiturn)",
    ),
    Argument(
        "--print-command",
        action="store_true",
        help="print the trainer's command with its environment, without running it",
    ),
    Argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="Hydra overrides for the trainer, last; or `-- COMMAND`, a whole training command",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Run the rehearsal; return 0 if the trainer exited with 0, else 1."""
    output = _output(args.out)
    if is_command(args.overrides):
        _take_over(args)
    else:
        check_overrides(args.overrides, "overrides, or `-- COMMAND`, a whole training command")
    command = build(
        engine=args.engine,
        profiler=args.profiler,
        output=output,
        steps=args.steps,
        ranks=args.ranks,
        workers=args.workers,
        overrides=args.overrides,
        current=os.environ,
        trainer=args.trainer,
    )
    if args.print_command:
        print(command.shell())
        return 0
    _check_installed(args.engine)
    output.mkdir(parents=True, exist_ok=True)
    console = output / CONSOLE
    clock = _Clock()
    clock.print(f"rehearsal of verl's main_ppo with {ENGINES[args.engine][1]}")
    clock.print(f"the real trainer at tiny sizes; console output: {_short(console)}")
    progress = Progress()
    with console.open("wb") as file:
        children = Children(command.arguments, {**os.environ, **command.variables})
        status, tail = _follow(children, file, clock, progress)
    if status != 0:
        print_error(
            *(line.rstrip("\r\n") for line in relevant_tail(tail)),
            "",
            *([end] if (end := _what_failed(console)) else []),
            f"The trainer exited with status {status}.  Console output: {console}",
        )
        return 1
    for message in progress.recorded(output):
        clock.print(message)
    clock.print("the trainer has exited")
    if args.profiler != "none":
        # As from a terminal: what is wrong with them is printed, and does not fail the rehearsal.
        cli = importlib.import_module("verl_profiler.cli")
        for command in ("summary", "report"):
            cli.run_command([command, str(output)])
    print(f"Results: {_short(output)}", flush=True)
    return 0


def _take_over(args: argparse.Namespace) -> None:
    """Set trainer and overrides from the command of a training, and print what is replaced.

    Raises:
        ConfigError: It is none, or of a trainer that cannot be rehearsed.
    """
    command = parse(args.overrides)
    trainer = trainer_of(command)
    if trainer is None:
        raise ConfigError(
            f"{command.entry} cannot be rehearsed: its trainer is none of {', '.join(TRAINERS)}.\n"
            "Rehearse its overrides: verl-profiler rehearse OVERRIDE …",
            "config-value",
        )
    given = dict(command.config)
    config: list[str] = []
    if "path" in given and Path(given["path"]).is_dir():
        given["path"] = str(Path(given["path"]).absolute())
        config = [f"--config-{option}={value}" for option, value in given.items()]
    elif given:
        print_error(
            "not rehearsed: the config of --config-name, whose folder is not here; verl's own is used"
        )
    if trainer != "sync":
        args.trainer = trainer
    kept, replaced = without_sizes(command.overrides)
    args.overrides = [*config, NO_EXAMPLE, *kept]
    if replaced:
        print(visible(f"replaced by small ones, or absent here: {' '.join(replaced)}"))
    for part in not_rehearsed(command.overrides):
        print(f"not rehearsed: {part}")


def _what_failed(console: Path) -> str:
    """Return the exception of the user's code that stands before the trainer's own; empty if unknown."""
    try:
        from verl_profiler.reading.formats.console_end import log_end
    except ImportError:
        # The reading half is not installed.
        return ""
    return log_end(console)


class _Clock:
    """Prints messages with the time since the start."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.last = self.begin

    def print(self, message: str) -> None:
        self.last = time.monotonic()
        print(visible(f"{self.last - self.begin:4.0f} s  {message}"), flush=True)


def _follow(
    children: Children, file: IO[bytes], clock: _Clock, progress: Progress
) -> tuple[int, deque[str]]:
    """Copy the console to `file` and print its milestones until the program exits."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in children.console:
            lines.put(line)
        lines.put(None)

    tail: deque[str] = deque(maxlen=400)
    # A daemon, because a stray process that holds the pipe must not keep this process alive.
    threading.Thread(target=read, name="rehearsal console", daemon=True).start()
    try:
        while True:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                if children.program.poll() is not None:
                    break
                if time.monotonic() - clock.last > QUIET_S:
                    clock.print(f"… {progress.stage}")
                continue
            if line is None:
                break
            file.write(line)
            file.flush()
            text = line.decode(errors="replace")
            tail.append(text)
            message = progress.read(text)
            if message:
                clock.print(message)
        return children.program.wait(), tail
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C, or a signal that `tidy_ends` made an exception of.
        clock.print("interrupted; stopping the trainer and its child processes")
        children.interrupt(INTERRUPT_GRACE_S)
        clock.print(f"console log and events so far: {_short(Path(file.name).parent)}")
        raise
    finally:
        children.end()


def _output(given: Path | None) -> Path:
    """Return the run directory: absolute, and new for this rehearsal."""
    if given is None:
        number, path = 1, Path("logs/rehearsal")
        while path.exists():
            number += 1
            path = Path(f"logs/rehearsal-{number}")
        return path.absolute()
    if given.exists() and not (given.is_dir() and not any(given.iterdir())):
        raise ConfigError(
            f"{given} already exists; each run needs a new directory.\n"
            "Choose another with --out DIR, or omit --out.",
            "output-exists",
        )
    return given.absolute()


def _check_installed(engine: str) -> None:
    needed = ["verl", "ray", "transfer_queue", "transformers"]
    if engine != "standin":
        needed.append(engine)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        other = " --engine standin does not need it." if missing == [engine] else ""
        raise ConfigError(
            f"a rehearsal needs {', '.join(missing)}, not installed for {sys.executable}."
            f"{other}\nIn a clone of verl-profiler, `make rehearsal ENGINE={engine}` installs all of it",
            "rehearsal-not-installed",
        )


def _short(path: Path) -> str:
    """Return a path relative to the current directory if it lies below it."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return visible(str(path))
