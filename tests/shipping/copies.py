"""The files of a run in storage, and of the one that was uploaded."""

from verl_profiler.events.remote import connect

__all__ = ["contents", "local"]


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
