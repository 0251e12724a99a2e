"""Copies of the recorded runs outside of the tree, which the tests of a session read from their caches."""

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path

_DATA = Path(__file__).parent / "data"
_FOLDER = Path(tempfile.mkdtemp(prefix="cached-runs-"))
_OWNER = os.getpid()

SMALL = Path(
    shutil.copytree(
        _DATA / "small_run", _FOLDER / "small_run", ignore=shutil.ignore_patterns(".cache")
    )
)
shutil.unpack_archive(_DATA / "rehearsal_run.tar.gz", _FOLDER)
REHEARSED = _FOLDER / "rehearsal_run"


def fixable_run(target):
    """Copy the recorded rehearsal, with settings in run.json that let two fixes work."""
    shutil.copytree(REHEARSED, target, ignore=shutil.ignore_patterns(".cache"))
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


@atexit.register
def _remove():
    # A child that a test forked shares the folder.
    if os.getpid() == _OWNER:
        shutil.rmtree(_FOLDER, ignore_errors=True)
