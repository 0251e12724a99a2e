"""Copies of the recorded runs outside of the tree, which the tests of a session read from their caches."""

import atexit
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


@atexit.register
def _remove():
    # A child that a test forked shares the folder.
    if os.getpid() == _OWNER:
        shutil.rmtree(_FOLDER, ignore_errors=True)
