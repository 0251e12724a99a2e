"""The files of a run in storage, and of the one that was uploaded."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

from verl_profiler.events.remote import connect
from verl_profiler.storage.remote_files import RemoteFiles
from verl_profiler.storage.upload import claim

__all__ = ["another_line", "contents", "local", "taken_by_two_at_once"]


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


def taken_by_two_at_once(run, wanted, folder, monkeypatch):
    """Let a run and another one claim a URL after both have seen that it is free, and check the names."""
    other = folder / "other" / run.name
    shutil.copytree(run, other)
    launch = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**launch, "pid": launch["pid"] + 1}))
    both = threading.Barrier(2)
    waited = threading.local()
    read = RemoteFiles.read

    def read_together(files, name):
        try:
            return read(files, name)
        finally:
            if not vars(waited):
                waited.once = True
                both.wait(30)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(RemoteFiles, "read", read_together)
        taken = list(pool.map(claim, [wanted, wanted], [run, other]))

    assert 2 == len({*taken})
    for url, launched in zip(taken, (run, other), strict=True):
        assert url.startswith(wanted)
        assert (launched / "run.json").read_bytes() == contents(url)["run.json"]
