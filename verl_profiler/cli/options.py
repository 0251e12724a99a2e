"""Options shared by the commands that read runs."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl_profiler.errors import ReadingError
from verl_profiler.events.json_values import is_list

if TYPE_CHECKING:
    from verl_profiler.reading.reader import Run
    from verl_profiler.reading.tables.tables import Tables

_STEPS = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


class Argument:
    """An argument or option of a command, with what `argparse.ArgumentParser.add_argument` takes."""

    def __init__(self, *names: str, **declaration: Any) -> None:
        self.names = names
        self.declaration = declaration


def declare(
    parser: argparse.ArgumentParser, arguments: Iterable[Argument | tuple[Argument, ...]]
) -> None:
    """Declare a command's arguments; of those in a tuple, a command line may have one."""
    for each in arguments:
        alone = isinstance(each, Argument)
        place: Any = parser if alone else parser.add_mutually_exclusive_group()
        for argument in (each,) if alone else each:
            place.add_argument(*argument.names, **argument.declaration)


class RemoteRun(str):
    """A run in object storage; `local` replaces it by its copy before a command runs."""

    __slots__ = ()


def run_argument(text: str) -> Path | RemoteRun:
    """Return the path of a run, or its URL, which a path would not keep."""
    from verl_profiler.events.remote import is_url

    return RemoteRun(text) if is_url(text) else Path(text)


def step_range(text: str) -> tuple[int, int]:
    """Parse `N` or `N:M`, both included."""
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; write 3, or 3:10 for 3 to 10")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it starts; write {last}:{first}")
    return first, last


# `logs.are_logs` distinguishes them.
RUNS = Argument(
    "runs",
    metavar="RUN",
    nargs="+",
    type=run_argument,
    help="run directory, archive of one, step folder, event file, or a URL such as "
    "s3://bucket/my-run; several for a resumed run; of most commands also console logs (also .gz), - "
    "for standard input",
)
STEPS = Argument(
    "--steps",
    "--step",
    metavar="N[:M]",
    type=step_range,
    help="one step, or those from N to M (default: all)",
)
NO_CACHE = Argument("--no-cache", action="store_true", help="do not read or write the run's cache")
# `distribute` honors it.
ON = Argument(
    "--on",
    choices=("ray",),
    help="first convert the runs in tasks on the Ray cluster of this node or of RAY_ADDRESS; the "
    "runs must be on a disk that its nodes share",
)
READING = (RUNS, STEPS, NO_CACHE, ON)
WORKER = Argument("--worker", metavar="RANK", type=int, help="one agent-loop worker (default: all)")
JSON = Argument("--json", action="store_true", help="print all tables as one JSON object")


def output_arguments(text: str, *names: str) -> tuple[Argument, Argument]:
    """Return the file or folder to write, described by `text`, also by other names, and `--force`."""
    return (
        Argument("-o", "--out", *names, metavar="PATH", type=Path, help=text),
        Argument("--force", action="store_true", help="replace files that exist"),
    )


def opened_run(args: argparse.Namespace) -> AbstractContextManager[Run]:
    """Open the runs of the command line for its steps.

    Raises:
        ReadingError: They cannot be read, or have no such step.
    """
    from verl_profiler.reading.reader import load

    opened = load(args.runs, cache=not args.no_cache, steps=args.steps)
    try:
        check_steps(opened, args.steps)
    except ReadingError:
        opened.close()
        raise
    return opened


def distribute(args: argparse.Namespace) -> None:
    """Do what `--on` requests, before the command reads the runs.

    Raises:
        ReadingError: The cluster or the runs cannot be used (exit code 2).
    """
    if getattr(args, "on", None) is None:
        return
    if args.no_cache:
        raise ReadingError(
            "--on keeps its results in the run's cache, so it cannot be used with --no-cache.\n"
            "Omit one of them",
            "option-not-heeded",
        )
    from verl_profiler.cli.terminal import print_error
    from verl_profiler.reading.distribute import distribute as fill
    from verl_profiler.reading.executors import executor

    with executor() as tasks:
        done = fill(args.runs, tasks, args.steps)
    print_error(
        *(f"Node not used: {node} {reason}." for node, reason in tasks.left_out.items()),
        f"{done} shards converted on {tasks.nodes} node{'s' * (tasks.nodes != 1)}.",
    )


def local(args: argparse.Namespace) -> dict[str, str]:
    """Replace URLs among the arguments by what was downloaded of them; return them by its path.

    Raises:
        ReadingError: Something cannot be downloaded.
    """
    urls: dict[str, str] = {}

    def downloaded(value: Any) -> Any:
        if is_list(value):
            return [*map(downloaded, value)]
        if isinstance(value, tuple):
            return tuple(map(downloaded, cast("Iterable[Any]", value)))
        # A side of `diff`.
        if isinstance(getattr(value, "path", None), RemoteRun):
            return replace(value, path=downloaded(value.path))
        if not isinstance(value, RemoteRun):
            return value
        from verl_profiler.events.redaction import public
        from verl_profiler.reading.remote import fetched

        path = fetched(value)
        urls[str(path)] = public(value.rstrip("/"))
        return path

    for name, value in vars(args).items():
        setattr(args, name, downloaded(value))
    return urls


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name, with the most similar known name if any."""
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "."


def check_steps(
    opened: Run | Tables, steps: tuple[int, int] | None, option: str = "--step "
) -> None:
    """Reject steps that the run does not have, and list those that it has.

    Args:
        opened: The run.
        steps: First and last; None for all.
        option: The option that was given, for the example in the message.

    Raises:
        ReadingError: The run has no such step.
    """
    if steps is None:
        return
    known = [row["step"] for row in opened.rows("SELECT DISTINCT step FROM steps ORDER BY step")]
    # A run of which only these steps were read has others.
    others = getattr(opened, "steps", None) is not None and getattr(opened, "all_steps", None)
    refuse_steps(steps, known, others or known, "this run", option)


def refuse_steps(
    steps: tuple[int, int],
    found: Sequence[int],
    known: Sequence[int],
    where: str,
    option: str = "--step ",
) -> None:
    """Reject steps that are not there, and list those that are.

    Args:
        steps: First and last.
        found: Those that were read, in order.
        known: Those that there are, in order.
        where: What they are not in.
        option: The option that was given, for the example in the message.

    Raises:
        ReadingError: None of the steps was found.
    """
    if any(steps[0] <= step <= steps[1] for step in found):
        return
    wanted = ":".join(map(str, dict.fromkeys(steps)))
    has = f"{known[0]} to {known[-1]}" if known else "no steps"
    example = f"\nFor example {option}{known[-1]}" if known else ""
    raise ReadingError(f"step {wanted} is not in {where}; it has {has}.{example}", "no-such-step")


def check_worker(opened: Run, worker: int | None) -> None:
    """Reject an agent-loop worker that the run does not have, and list those that it has.

    Raises:
        ReadingError: The run has no such worker.
    """
    if worker is None:
        return
    names = [
        row["name"]
        for row in opened.rows(
            "SELECT DISTINCT name FROM requests WHERE regexp_full_match(name, 'worker_\\d+(-\\d+)?') "
            "ORDER BY length(name), name"
        )
    ]
    if not any(name.split("-")[0] == f"worker_{worker}" for name in names):
        has = "no agent-loop workers" if not names else f"{', '.join(names[:20])}"
        if len(names) > 20:
            has += f" and {len(names) - 20} more"
        raise ReadingError(f"worker {worker} is not in this run; it has {has}.", "no-such-worker")
