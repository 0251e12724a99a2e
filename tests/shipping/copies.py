"""The files of a run on a disk and in storage, and waiting for them."""

import json
import time

from verl_profiler.events.remote import connect

__all__ = ["another_line", "contents", "local", "wait_until", "write"]


def another_line(text):
    """Return the last line of a file again, with another count: a copy of a line is read once."""
    line = json.loads(text.splitlines()[-1])
    line["extra"]["events"] += 1
    return json.dumps(line, separators=(",", ":")) + "\n"


def contents(url):
    """Return the files in storage by name."""
    filesystem, target = connect(url)
    return {
        str(path).removeprefix(f"{target}/"): filesystem.cat_file(path)
        for path in filesystem.find(target)
    }


def local(run, *without):
    """Return the files of a run directory by name, without some folders and files."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and not {*without} & {*path.parts}
    }


def write(root, name, content, mode="wb"):
    """Write bytes or text into a file of a run directory."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def wait_until(holds):
    """Wait for another thread or process."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
