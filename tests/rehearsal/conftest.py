"""Makes torchvision importable where its build and torch's do not match, as a rehearsal does."""

import sys

import pytest

from verl_profiler.rehearsal.environment import environment


@pytest.fixture(scope="session")
def _import_path():
    folders = environment("standin", {}).get("PYTHONPATH")
    if folders and folders not in sys.path:
        sys.path.insert(0, folders)
