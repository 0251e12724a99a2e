"""Look up the targets of probes in source files, with `ast`.

Importing verl takes seconds, needs an accelerator in some versions, and only one version is installed.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from verl_profiler.instrumentation.probe import Probe

_HOST = "verl."
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Found(NamedTuple):
    """What became of the targets that a probe has in one module.

    Args:
        probe: The probe.
        target: The target that would be used, or the first one.
        state: `found`, `no module` (not in this version) or `missing`.
        unread: Parameters that the hooks read and that the target does not take.
    """

    probe: Probe
    target: str
    state: str
    unread: tuple[str, ...] = ()


class Sources:
    """Source files by module.

    Args:
        folder: Holds the packages; None for those that are installed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Parse the file of a module, without importing its parents; None if there is none."""
        if module not in self._trees:
            self._trees[module] = self._parsed(module)
        return self._trees[module]

    def _parsed(self, module: str) -> ast.Module | None:
        top = module.partition(".")[0]
        places = installed(top) if self._folder is None else [self._folder / top]
        file = source_file(module, places)
        return None if file is None else ast.parse(file.read_bytes())

    def definition(self, module: str, path: str) -> ast.AST | None:
        """Return what defines a function or `Class.method`, also of a base class or where it is imported from."""
        tree = self.tree(module)
        if tree is None:
            return None
        first, _, rest = path.partition(".")
        node = _member(tree, first)
        if node is None:
            origin = _imported_from(tree, first)
            if origin is None:
                return None
            # A package that is not there defines what is imported from it, as far as is known.
            return self.definition(origin, path) or (None if rest else tree)
        if not rest:
            return node
        found = _member(node, rest)
        for base in getattr(node, "bases", ()):
            name = base.id if isinstance(base, ast.Name) else ""
            if found is None and name and name != first:
                found = self.definition(module, f"{name}.{rest}")
        return found


def installed(package: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(each) for each in (spec and spec.submodule_search_locations) or ()]


def source_file(module: str, places: Iterable[Path], package: str = "__init__.py") -> Path | None:
    """Return the file of a module whose top package is in one of these folders, or of its `package`; None for none."""
    for folder in places:
        base = folder.joinpath(*module.split(".")[1:])
        for file in (base.with_suffix(".py"), base / package):
            if file.is_file():
                return file
    return None


def find_targets(probes: Iterable[Probe], sources: Sources | None = None) -> list[Found]:
    """Look up every probe's targets.

    Args:
        probes: The probes.
        sources: Where; None for the installed packages.

    Returns:
        One for each probe and module of its targets.
    """
    sources = Sources() if sources is None else sources
    rows: list[Found] = []
    for probe in probes:
        by_module: dict[str, list[str]] = {}
        for target in probe.targets:
            by_module.setdefault(target.partition(":")[0], []).append(target)
        for module, targets in by_module.items():
            if sources.tree(module) is None:
                rows.append(Found(probe, targets[0], "no module"))
                continue
            for target in targets:
                node = sources.definition(module, target.partition(":")[2])
                if node is not None:
                    rows.append(Found(probe, target, "found", _unread(probe, node)))
                    break
            else:
                rows.append(Found(probe, targets[0], "missing"))
    return rows


def lost(rows: Iterable[Found]) -> list[str]:
    """Return the names of the probes that verl has no target of: what they record is not recorded.

    Optional ones that record no event of their own are not among them.
    """
    names: dict[str, bool] = {}
    for probe, target, state, _ in rows:
        if state == "found" or (
            target.startswith(_HOST) and not (probe.optional and not probe.event)
        ):
            names[probe.name] = names.get(probe.name, False) or state == "found"
    return [name for name, is_there in names.items() if not is_there]


def _unread(probe: Probe, node: ast.AST) -> tuple[str, ...]:
    if not isinstance(node, _FUNCTIONS) or node.args.kwarg is not None:
        return ()
    given = node.args
    names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return tuple(name for name in probe.reads if name not in names)


def _member(node: ast.AST, name: str) -> ast.AST | None:
    kinds = (ast.ClassDef, *_FUNCTIONS)
    body = getattr(node, "body", [])
    return next((item for item in body if isinstance(item, kinds) and item.name == name), None)


def _imported_from(tree: ast.AST, name: str) -> str | None:
    for item in ast.walk(tree):
        if not isinstance(item, ast.ImportFrom) or item.level:
            continue
        if any((alias.asname or alias.name) == name for alias in item.names):
            return item.module
    return None
