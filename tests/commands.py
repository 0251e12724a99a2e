"""A command in this process, which raises what `main` would print."""

import argparse


def command(module, *first):
    """Return a function that runs a command of `verl_profiler.cli` with arguments after these."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return lambda *more: module.run(parser.parse_args([*first, *map(str, more)]))
