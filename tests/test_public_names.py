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


def faults_of(name):
    """Yield what is wrong with the names of a module."""
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    public = [n for n, v in vars(module).items() if not n.startswith("_") and not ismodule(v)]
    if listed is None and public:
        yield f"{name} has no __all__"
    yield from (f"{name}.{each} is not there" for each in listed or () if not hasattr(module, each))
    if not module.__doc__:
        yield f"{name} has no docstring"


def test_every_public_module_lists_its_names_and_has_a_sentence():
    """`__all__` holds nothing that is not there."""
    wrong, absent = [], []
    for name in MODULES:
        try:
            wrong += faults_of(name)
        except ModuleNotFoundError as error:
            absent.append((name, error.name))

    assert [] == wrong
    assert [] == [
        each for each in absent if (each[1] or "verl_profiler").startswith("verl_profiler")
    ]
    assert len(absent) < len(MODULES) / 10


def test_the_package_offers_what_the_readme_uses():
    """All of it lazily."""
    for name in verl_profiler.__all__:
        assert getattr(verl_profiler, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = verl_profiler.nope
