"""A command in this process, which raises what `main` would print; and what it takes for a terminal."""

import argparse
import io

from verl_profiler.cli.options import declare


def command(module, *first):
    """Return a function that runs a command of `verl_profiler.cli` with arguments after these."""
    parser = argparse.ArgumentParser()
    declare(parser, module.ARGUMENTS)
    return lambda *more: module.run(parser.parse_args([*first, *map(str, more)]))


class Terminal(io.StringIO):
    """A screen that keeps what is written to it."""

    def isatty(self):
        return True
