"""The `verl-profiler` command: one module per subcommand, listed here.

A command module has a docstring, which is its help, `add_arguments(parser)` and
`run(args) -> exit status`.  It imports what it needs inside `run`, so that `--help` and `check` work
where only the core dependencies are installed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence

from verl_profiler.errors import VerlProfilerError

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    "summary",
    "why",
    "report",
    "requests",
    "plot",
    "diff",
    "watch",
    "timing",
    "tq",
    "memory",
    "export",
    "collect",
    "check",
    "rehearse",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: done. 1: nothing to report, or what was run has failed. 2: the command cannot be carried out
    as given. 130: interrupted.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except VerlProfilerError as error:
        if args.traceback:
            raise
        print(f"verl-profiler {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe (`| head`) is gone; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        # What duckdb makes of a Ctrl-C during a query.
        if str(error) != "Query interrupted":
            raise
        return 130


def _parser() -> argparse.ArgumentParser:
    import verl_profiler

    parser = argparse.ArgumentParser(
        prog="verl-profiler",
        description=verl_profiler.__doc__.splitlines()[0] if verl_profiler.__doc__ else None,
        epilog="Recording needs no command: add +profiler=multiturn to `python -m verl.trainer.main_ppo`.",
    )
    parser.add_argument("--version", action="version", version=f"verl-profiler {_version()}")
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error of this command comes from"
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"verl_profiler.cli.{name}")
        text = inspect.getdoc(module) or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=name)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl-profiler")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
