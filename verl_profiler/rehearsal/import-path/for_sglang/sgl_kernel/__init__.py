"""A stand-in for `sgl_kernel` without CUDA: imports work, calls raise.

The published `sglang-kernel` wheels load libcuda at import.  Without AMX, SGLang's CPU path is pure
torch and calls none of the kernels, but imports their names.  No `torch.ops.sgl_kernel` operator
is registered, so SGLang keeps to that path.
"""

import importlib.abc
import importlib.machinery
import sys
import types

# SGLang 0.5.12 compares this with the version that it requires.
__version__ = "0.4.2.post2"


class _Missing:
    def __init__(self, name):
        self.__name__ = self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name}: not available in a rehearsal on a CPU")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


def _names_of(module):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}")

    return __getattr__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _names_of(spec.name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__getattr__ = _names_of(__name__)
