"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_cache", "add_out", "add_runs"]


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Declare the runs, read as one training."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="run directory, archive of one, step folder or event file; several for a resumed run",
    )


def add_out(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare the file to write, described by `text`, and --force."""
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help=text)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare --no-cache."""
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor write the run's .cache folder"
    )
