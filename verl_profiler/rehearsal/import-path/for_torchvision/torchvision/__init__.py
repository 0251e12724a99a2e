"""Loads the installed torchvision, and first defines two operators if its library does not load.

A CUDA build of torchvision beside a CPU build of torch fails at import (0.28.0), because its
Python code registers meta kernels for `torchvision::nms` and `torchvision::qnms`, which the library
that did not load would have defined.  Defining the schemas is enough to import it.  Where the two
builds match, nothing is defined.

Python imports this package first, which then replaces itself with the installed one.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _installed():
    here = pathlib.Path(__file__).resolve().parent.parent
    path = [entry for entry in sys.path if pathlib.Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, path)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    return spec


def _operators(package):
    """Return the object that keeps the operators defined; None if the package's own library does."""
    for library in sorted(package.glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return None
    fragment = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        fragment.define(schema)
    return fragment


_spec = _installed()
_module = importlib.util.module_from_spec(_spec)
_module._verl_profiler_operators = _operators(pathlib.Path(_spec.origin).parent)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
