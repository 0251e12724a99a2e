"""Every analysis of the package by name: what takes tables and steps, and returns rows."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from verl_profiler import analysis

__all__ = ["ANALYSES"]

# Parts of the findings, which `explained` puts together.
_PARTS = (".explain.asynchronous_findings", ".explain.culprits", ".explain.fixes")
# Parts of `what_if`.
_REPLAYS = ("step_replays", "asynchronous_what_if")


def _analyses() -> Iterator[Callable[..., Any]]:
    for info in pkgutil.walk_packages(analysis.__path__, "verl_profiler.analysis."):
        if info.ispkg or info.name.endswith(_PARTS):
            continue
        module = importlib.import_module(info.name)
        for function in filter(inspect.isfunction, vars(module).values()):
            if function.__module__ != info.name or function.__name__.startswith("_"):
                continue
            signature = inspect.signature(function)
            steps = signature.parameters.get("steps")
            rows = signature.return_annotation == "Rows"
            kept = function.__name__ not in _REPLAYS
            if rows and kept and steps is not None and steps.default is None:
                yield function


ANALYSES = {function.__name__: function for function in _analyses()}
