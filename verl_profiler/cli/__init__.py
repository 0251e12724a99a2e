"""The `verl-profiler` command: one module per subcommand, listed here.

A command module has a docstring, which is its help, `ARGUMENTS` and `run(args) -> exit status`.  `run` raises
a `ReadingError` where paths or arguments cannot be used, which is printed here.  It imports what it needs
itself, so that `--help` and `check` work where only the core dependencies are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler.cli.options import declare, did_you_mean, distribute, local
from verl_profiler.cli.terminal import Progress, guarded, named, print_error, tidy_ends
from verl_profiler.errors import ReadingError, VerlProfilerError, extra_of, install_line
from verl_profiler.reading.progress import watched

__all__ = ["COMMANDS", "main", "parsed", "run_command", "version"]

_COLLECT_EVERY = 1_000_000
_OF_RUNS_ALONE = ("requests", "plot", "export", "stuck")
# Exports of TransferQueue's calls, which console logs have.
_OF_TRANSFERS = ("otlp", "prometheus", "jsonl")
COMMANDS = (
    "summary",
    "why",
    "report",
    "requests",
    "plot",
    "diff",
    "runs",
    "stuck",
    "timing",
    "tq",
    "memory",
    "export",
    "collect",
    "check",
    "rehearse",
)

# What a command needs in the end, whichever module is missing first; others need `analysis`.
_EXTRAS = {
    "report": "report",
    "plot": "plots",
    "timing": "plots",
    "export otlp": "otel",
    "export prometheus": "prometheus",
    "export trackers": "report",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: success. 1: nothing to report, or the program that was run failed. 2: the command cannot be run
    as given. 3: an error in this package. 130: interrupted; 128 + N: ended by signal N.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Commands make hundreds of thousands of rows, which hold no cycles, and end.
    gc.set_threshold(_COLLECT_EVERY)
    try:
        with tidy_ends(), guarded():
            return run_command(argv)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has exited.
        return 0
    except KeyboardInterrupt:
        return 130
    except ReadingError as error:
        # There is no such command, or the output itself cannot be written.
        with contextlib.suppress(OSError):
            print_error(*named(f"verl-profiler: {error}", argv).split("\n"))
        return error.exit_code


def run_command(argv: Sequence[str]) -> int:
    """Run a command line on the present output streams; return the exit status."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if argv[:3] == ["check", "--config", "--"]:
        # As before the command of `rehearse`; argparse takes no `--` for the words of an option.
        argv = [*argv[:2], *argv[3:]]
    args = parsed(argv)
    if args is None:
        return 2
    urls: dict[str, str] = {}
    try:
        urls = local(args)
        with watched(Progress()):
            _check_kind(args)
            distribute(args)
            status = args.run(args)
        # While its errors can still be printed.
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except VerlProfilerError as error:
        if args.traceback:
            traceback.print_exc()
        message = named(f"verl-profiler {args.command}: {error}", argv)
        for path, url in urls.items():
            message = message.replace(path, url)
        print(message, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  the last resort
        if (extra := extra_of(error)) is not None:
            if args.traceback:
                traceback.print_exc()
            command = f"export {args.format}" if args.command == "export" else args.command
            extra = _EXTRAS.get(command, extra)
            print_error(
                f"verl-profiler {args.command}: a package is not installed ({error}).",
                f"{install_line(extra)} (missing-extra)",
            )
            return 2
        # What duckdb raises after a Ctrl-C during a query.
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":
            raise KeyboardInterrupt from None
        if args.traceback:
            traceback.print_exc()
        from verl_profiler.events.files import is_stale

        if is_stale(error):
            print_error(
                f"verl-profiler {args.command}: a file was replaced or removed on its file server "
                "while it was read (stale NFS file handle).",
                "Run the command again. (stale-handle)",
            )
            return 2
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        print_error(
            f"verl-profiler {args.command}: error in verl-profiler itself: {what}",
            f"Please report it with the output of: verl-profiler --traceback {args.command} … "
            "(internal-error)",
        )
        return 3
    return status


def parsed(argv: Sequence[str]) -> argparse.Namespace | None:
    """Parse a command line, whose options may come anywhere; print the help if it has no command.

    Raises:
        ReadingError: There is no such command.
    """
    name = _command(argv)
    if not name:
        parser = _overview()
        parser.parse_args(argv)
        parser.print_help()
        return None
    words = [*argv]
    words.remove(name)
    parser = _parser(name)
    # argparse does not mix these with a command after `--`.
    return parser.parse_args(words) if name == "rehearse" else parser.parse_intermixed_args(words)


def _command(argv: Sequence[str]) -> str:
    """Return the command's name; empty if there is none.

    Raises:
        ReadingError: There is no such command.
    """
    name = next((word for word in argv if word != "--traceback"), "")
    if name.startswith("-"):
        return ""
    if name and name not in COMMANDS:
        raise ReadingError(
            f"there is no command {name!r}{did_you_mean(name, COMMANDS)}\nCommands: {', '.join(COMMANDS)}",
            "no-such-command",
        )
    return name


def _check_kind(args: argparse.Namespace) -> None:
    """Refuse another profiler's trace, and a log where only a recorded run has the answer."""
    from verl_profiler.reading.formats.registry import refuse_trace

    names = ("runs", "logs", "run_directory")
    given: Any = next(filter(None, (getattr(args, name, None) for name in names)), None)
    paths: list[Path] = [given] if isinstance(given, Path) else given or []
    for path in paths:
        refuse_trace(path)
    if args.command == "timing":
        # Of a run directory, it takes the console.
        return
    from verl_profiler.cli.logs import are_logs

    logs = [path for path in paths if are_logs([path])]
    runs = [path for path in paths if path not in logs and os.path.exists(path)]
    if logs and runs:
        raise ReadingError(
            f"{logs[0]} is a log, and {runs[0]} is a run.\nUse one command for each",
            "runs-and-logs",
        )
    of_transfers = getattr(args, "format", None) in _OF_TRANSFERS
    if logs and args.command in _OF_RUNS_ALONE and not of_transfers:
        raise ReadingError(
            f"{logs[0]} is a log, which has no requests, tools, engines or ranks.\n"
            "summary, why, report, diff, timing, tq and memory take logs; +profiler=multiturn records a run",
            "log-given",
        )


def _overview() -> argparse.ArgumentParser:
    """Return the parser of a line without a command, whose help lists all of them."""
    import verl_profiler

    parser = argparse.ArgumentParser(
        prog="verl-profiler",
        description=verl_profiler.__doc__.splitlines()[0] if verl_profiler.__doc__ else None,
        epilog="Recording needs no command: add +profiler=multiturn to `python -m verl.trainer.main_ppo`.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument(
        "--traceback", action="store_true", help="print the traceback of an error in this command"
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        text = inspect.getdoc(_module(name)) or ""
        commands.add_parser(name, help=text.splitlines()[0].rstrip("."))
    return parser


def _parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    module = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"verl-profiler {name}",
        description=inspect.getdoc(module),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    declare(parser, module.ARGUMENTS)
    parser.set_defaults(run=module.run, command=name)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"verl_profiler.cli.{name}")


class _Version(argparse.Action):
    """Prints the version, whose look-up is slow, only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"verl-profiler {version()}")
        parser.exit()


def version() -> str:
    """Return the installed version."""
    from importlib import metadata

    try:
        return metadata.version("verl-profiler")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
