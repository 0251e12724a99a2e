"""What the package says it offers is what it offers."""

import importlib
import pkgutil
from inspect import ismodule

import pytest

import verl_profiler

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(verl_profiler.__path__, "verl_profiler.")
    # These import verl, or have effects, or are stubs for CUDA wheels.
    if not any(
        part in name for part in ("profiler.rehearsal", ".configs", ".plugin", "hydra_callback")
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_lists_its_names_and_has_a_sentence(name):
    """`__all__` holds nothing that is not there; the docstring's first line ends as a sentence."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")

    missing = [each for each in getattr(module, "__all__", []) if not hasattr(module, each)]

    assert [] == missing
    public = [n for n, v in vars(module).items() if not n.startswith("_") and not ismodule(v)]
    assert hasattr(module, "__all__") or not public
    assert module.__doc__, name


def test_the_package_offers_what_the_readme_uses():
    """All of it lazily."""
    for name in verl_profiler.__all__:
        assert getattr(verl_profiler, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = verl_profiler.nope
