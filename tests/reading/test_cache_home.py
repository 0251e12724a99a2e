"""Caches that are not beside their run: where, for whom, and how they stay small while others read."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cached_runs import SMALL, copied

from verl_profiler.errors import ReadingError
from verl_profiler.reading import cache_folder
from verl_profiler.reading.reader import load

NOBODY = 65534
PLACE = Path("/tmp")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def answers(run, **options):
    with load(run, **options) as opened:
        return opened.rows("SELECT * FROM requests ORDER BY ALL"), opened.problems


def parts(folder):
    return sorted(path.name for path in folder.rglob("part-*.parquet"))


def test_the_variables_of_the_place(run, monkeypatch):
    """XDG_CACHE_HOME, if it is absolute, else ~/.cache; a value that cannot be used is named with its variable."""
    (run / ".cache").touch()
    monkeypatch.delenv("VERL_PROFILER_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home-of-me")
    for value, place in (
        ("/caches", "/caches"),
        ("", "/home-of-me/.cache"),
        ("x", "/home-of-me/.cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert Path(place) / "verl-profiler" == cache_folder.home()
    for name, value in {"_HOME": "relative/place", "_GB": "much"}.items():
        with monkeypatch.context() as patched:
            patched.setenv(f"VERL_PROFILER_CACHE{name}", value)
            with pytest.raises(ReadingError, match=f"VERL_PROFILER_CACHE{name}"):
                load(run)


def as_nobody(place, run, *, home):
    """Read a run in a process of a user who owns nothing; return its output."""
    script = (
        "import os, sys\n"
        "from verl_profiler.cli import main\n"
        # Modules that are imported late may lie where only this user reads.
        "main(['requests', sys.argv[1], '--no-cache'])\n"
        "print('====', flush=True)\n"
        f"if os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid({NOBODY})\n    os.setuid({NOBODY})\n"
        "for _ in range(2):\n"
        "    status = main(['requests', sys.argv[1]])\n"
        "print('status', status)\n"
    )
    environment = {
        **os.environ,
        "HOME": str(home),
        "VERL_PROFILER_CACHE_HOME": "",
        "XDG_CACHE_HOME": "",
        "TMPDIR": str(place / "tmp"),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        capture_output=True, text=True, check=True, cwd="/", env=environment,
    )  # fmt: skip
    return done.stdout.split("====\n")[1], done.stderr


@pytest.fixture
def place():
    """A folder that every user can enter; pytest's own are closed to others."""
    folder = PLACE / f"cache-home-{os.getpid()}"
    (folder / "tmp").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "tmp").chmod(0o1777)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("writable_home", [True, False])
def test_a_read_only_run_is_read_without_a_word(place, writable_home):
    """By a user who can only read it; tables are kept in that user's home, where there is one."""
    run, home = place / "run", place / "home"
    copied(SMALL, run)
    home.mkdir()
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if writable_home:
        home.chmod(0o777)
    else:
        home.chmod(0o555)

    printed, errors = as_nobody(place, run, home=home)

    assert "" == errors
    assert "status 0" in printed
    for word in ("read-only", "Permission", "cannot", ".cache"):
        assert word not in printed
    assert not (run / ".cache").exists()
    assert writable_home == bool(parts(home))
    assert [] == list((place / "tmp").iterdir())


def made(home, name, *, hours, size=1 << 20):
    """Make a cache that was used so long ago."""
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    path = folder / "part-x.parquet"
    path.write_bytes(b"x" * size)
    then = time.time() - hours * 3600
    for each in (path, folder):
        os.utime(each, (then, then))
    return folder


def left(home):
    return sorted(path.name for path in (home / "runs").iterdir())


def test_what_was_not_used_for_longest_is_removed_first(home):
    """Until the rest is within the limit; never what was used within six hours."""
    for name, hours in (("b", 20), ("a", 30), ("d", 8), ("c", 10), ("e", 0.1), ("f", 5)):
        made(home, name, hours=hours)

    cache_folder.evict(4 << 20)
    assert ["c", "d", "e", "f"] == left(home)
    cache_folder.evict(0)
    assert ["e", "f"] == left(home)


def test_the_limit_holds_while_many_runs_are_read(tmp_path, home, monkeypatch):
    """Each reading removes what is too much, but for what was used lately."""
    monkeypatch.setenv("VERL_PROFILER_CACHE_GB", "0.0000001")
    for number in range(4):
        run = copied(SMALL, tmp_path / f"run-{number}")
        # No folder: it can have no cache beside it.
        (run / ".cache").touch()
        answers(run)
        (name,) = left(home)
        assert name.startswith(f"run-{number}-")
        for path in home.rglob("*"):
            os.utime(path, (0, 0))
