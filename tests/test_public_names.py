"""What the package says it offers is what it offers."""

import pytest

import verl_profiler


def test_the_package_offers_what_the_readme_uses():
    """All of it lazily."""
    for name in verl_profiler.__all__:
        assert getattr(verl_profiler, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = verl_profiler.nope
