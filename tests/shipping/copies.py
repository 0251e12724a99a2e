"""The files of a run in storage, and of the one that was uploaded."""

import json

from verl_profiler.events.remote import connect

__all__ = ["another_line", "contents", "local"]


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
