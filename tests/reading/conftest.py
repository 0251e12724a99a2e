"""A copy of the generated run for the tests of the reader."""

import pytest
from cached_runs import SMALL, copied


@pytest.fixture
def run(tmp_path):
    """The small run, without a cache, in a place where it may be changed."""
    return copied(SMALL, tmp_path / "run")
