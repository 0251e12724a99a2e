"""Sessions in pages: ```console blocks of `$ command` lines, each followed by exactly what it prints.

    python tests/console_blocks.py PAGE FOLDER [TRANSLATION ...]

runs the commands of a page in a copy of a folder, and writes what they print into the page and its
translations.
"""

import contextlib
import copy
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from verl_profiler.analysis import registry
from verl_profiler.cli import main
from verl_profiler.reading import reader

_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
# A command of this package, and what a shell does with its output or after it.
_OWN = re.compile(r"(?:(verl-profiler (?:[^'|;]|'[^']*')+)(?:([|;])|$))?(.*)", re.DOTALL)


def replayed(page: Path, folder: Path) -> str:
    """Return the page's text with the outputs that its commands have now.

    The commands run one after the other in one copy of `folder`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / folder.name
        shutil.copytree(folder, place)
        with _read_once(), _explained_once():
            return _BLOCK.sub(lambda block: _session(block[0], place), page.read_text())


@contextlib.contextmanager
def _read_once():
    """Read each archive once, for all commands that name it alone; others of them read it anew each time."""
    load, made = reader.load, {}

    def loaded(paths, *, steps=None, **more):
        listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        key = *map(str, listed), steps
        if len(listed) != 1 or not str(listed[0]).endswith(".tar.gz"):
            return load(paths, steps=steps, **more)
        if key not in made:
            made[key] = load(paths, steps=steps, **more)
            made[key].close = lambda: None
        return made[key]

    try:
        with mock.patch.object(reader, "load", loaded):
            yield
    finally:
        for run in made.values():
            type(run).close(run)


@contextlib.contextmanager
def _explained_once():
    """Explain each run once, as if its explanation were kept; of an archive none is."""
    explain, made = registry.explained, {}

    def explained(tables, steps=None, **more):
        key = tuple(tables.launches), steps
        if key not in made:
            made[key] = explain(tables, steps, **more)
        return copy.deepcopy(made[key])

    with mock.patch.object(registry, "explained", explained):
        yield


def _session(block: str, place: Path) -> str:
    commands = re.findall(r"^\$ (.*(?:\\\n.*)*)\n", block, re.MULTILINE)
    assert commands, block
    return "".join(f"$ {command}\n{_output(command, place)}" for command in commands)


def _output(command: str, place: Path) -> str:
    """Return what a command prints, on either stream; `verl-profiler` runs in this process.

    Raises:
        RuntimeError: It failed; a page shows a failure as `command; echo "exit status $?"`.
    """
    # The width and the colors of whoever runs this are not the page's.
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    own, separator, after = _OWN.fullmatch(command).groups()
    printed, status, shell, called = "", 0, after, ""
    if own:
        printed, status = _called(shlex.split(own)[1:], place, kept)
        called = printed
        shell = f"(exit {status}); {after}" if separator == ";" else after
    if shell:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", shell],
            cwd=place,
            env=kept,
            input=printed if separator == "|" else "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = done.stdout if separator == "|" else printed + done.stdout
        status = done.returncode if separator == ";" else status or done.returncode
    if status:
        raise RuntimeError(f"{command}: exit status {status}\n{called or printed}")
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


def _called(words: list[str], place: Path, environment: dict[str, str]) -> tuple[str, int]:
    """Return what a command of this package prints, and its exit status."""
    text, before, variables = io.StringIO(), Path.cwd(), dict(os.environ)
    try:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = main(words)
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
    return text.getvalue(), status


if __name__ == "__main__":
    pages = [Path(sys.argv[1]), *map(Path, sys.argv[3:])]
    new = replayed(pages[0], Path(sys.argv[2]))
    for each in pages:
        sessions = iter(_BLOCK.findall(new))
        each.write_text(_BLOCK.sub(lambda _, rest=sessions: next(rest), each.read_text()))
