"""The recorded runs outside of the tree: unpacked once and converted once for all workers of a session."""

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path

_DATA = Path(__file__).parent / "data"
# The process that starts the workers makes the folder, and removes it.
_VARIABLE = "VERL_PROFILER_TEST_RUNS"


def _folder():
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = made = tempfile.mkdtemp(prefix="cached-runs-")
        owner = os.getpid()

        @atexit.register
        def _remove():
            # A child that a test forked shares the folder.
            if os.getpid() == owner:
                shutil.rmtree(made, ignore_errors=True)

    return Path(os.environ[_VARIABLE])


_FOLDER = _folder()
# In the place of the user's own.
CACHES = _FOLDER / "caches"


def copied(run, target):
    """Copy a run without its cache; return the copy."""
    return Path(shutil.copytree(run, target, ignore=shutil.ignore_patterns(".cache")))


def cached(name):
    """Return the directory of a run of tests/data, which all tests read from its cache.

    Nothing but that cache may be written into it.
    """
    place = _FOLDER / name
    if not place.exists():
        scratch = Path(tempfile.mkdtemp(dir=_FOLDER, prefix="new-"))
        if (_DATA / name).is_dir():
            copied(_DATA / name, scratch / name)
        else:
            shutil.unpack_archive(_DATA / f"{name}.tar.gz", scratch)
        try:
            (scratch / name).rename(place)
        except OSError:
            assert place.exists(), "another worker was first"
        shutil.rmtree(scratch)
    return place


SMALL = cached("small_run")
REHEARSED = cached("rehearsal_run")


def fixable_run(target):
    """Copy the recorded rehearsal, with settings in run.json that let two fixes work."""
    copied(REHEARSED, target)
    launched = json.loads((target / "run.json").read_text())
    launched["training"] |= {
        "trainer_mode": "sync",
        "settings": {
            "algorithm.filter_groups.enable": False,
            "trainer.test_freq": 1,
            "trainer.v1.sampler.custom_sampler": False,
            "trainer.v1.sampler.sync_refill_failed_groups": False,
        },
    }
    (target / "run.json").write_text(json.dumps(launched))
    return target
