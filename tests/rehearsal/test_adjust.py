"""The changes that verl needs for a CPU, on verl's own modules."""

import importlib.util

import pytest

from verl_profiler.rehearsal import adjust

pytestmark = [
    pytest.mark.verl,
    pytest.mark.usefixtures("_import_path"),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]


def test_every_adjusted_module_exists():
    """A module that verl moved would leave its adjustment undone without a word."""
    for name, _ in adjust.ADJUSTMENTS:
        assert importlib.util.find_spec(name) is not None, name
