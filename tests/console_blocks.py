"""Sessions in pages: ```console blocks of `$ command` lines, each followed by exactly what it prints.

    python tests/console_blocks.py PAGE FOLDER [TRANSLATION ...]

runs the commands of a page in a copy of a folder, and writes what they print into the page and its
translations.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def replayed(page: Path, folder: Path) -> str:
    """Return the page's text with the outputs that its commands have now.

    The commands run one after the other in one copy of `folder`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / folder.name
        shutil.copytree(folder, place)
        return _BLOCK.sub(lambda block: _session(block[0], place), page.read_text())


def _session(block: str, place: Path) -> str:
    commands = re.findall(r"^\$ (.*(?:\\\n.*)*)\n", block, re.MULTILINE)
    assert commands, block
    return "".join(f"$ {command}\n{_output(command, place)}" for command in commands)


def _output(command: str, place: Path) -> str:
    """Return what a command prints, on either stream.

    Raises:
        RuntimeError: It failed; a page shows a failure as `command; echo "exit status $?"`.
    """
    # The width and the colors of whoever runs this are not the page's.
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=place,
        env={**kept, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


if __name__ == "__main__":
    pages = [Path(sys.argv[1]), *map(Path, sys.argv[3:])]
    new = replayed(pages[0], Path(sys.argv[2]))
    for each in pages:
        sessions = iter(_BLOCK.findall(new))
        each.write_text(_BLOCK.sub(lambda _, rest=sessions: next(rest), each.read_text()))
