"""Put probes on the host and take them off: wait for a module, then wrap one attribute of it.

Every wrapper around the host's callables is placed here, those of TransferQueue tracing and of
captures too, so that a callable has one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import wrapt

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.status import missed, status
from verl_profiler.instrumentation.wrapping import wrap
from verl_profiler.recording import recorder


class _Place(msgspec.Struct, frozen=True, eq=False):
    probe: Probe
    owner: Any
    attribute: str
    original: Any
    wrapper: Any


_places: dict[tuple[int, str], _Place] = {}
# Grows with each `uninstall`; a hook for a module not yet imported belongs to one.
_generation = 0
# Others' wrappers on top of one of ours that are looked through.
_MOST_WRAPPERS = 50


def install(
    probes: Iterable[Probe], *, only_exported_of: Literal["none", "loaded", "all"] = "none"
) -> None:
    """Wrap the targets of `probes`, now or when their modules are imported.  Never raises.

    Args:
        probes: Their targets are wrapped.
        only_exported_of: Of which modules only the classes that Ray pickles by value, with their wrappers:
            of `all`, or of those that are imported already (`loaded`).  Actor classes that were made of
            their classes hold the original methods, which Ray pickles by value where the module has
            something else in their place: other processes would not get their wrapper.
    """
    by_module: dict[str, list[Probe]] = {}
    for probe in probes:
        for module in dict.fromkeys(target.partition(":")[0] for target in probe.targets):
            by_module.setdefault(module, []).append(probe)
    for module, wanted in by_module.items():
        is_loaded = module in sys.modules and not _is_initializing(sys.modules[module])
        exported = only_exported_of == "all" or (only_exported_of == "loaded" and is_loaded)
        hook = functools.partial(_place_all, wanted, _generation, exported)
        if is_loaded:
            hook(sys.modules[module])
        else:
            wrapt.register_post_import_hook(hook, module)


def place_in_main(probes: Iterable[Probe]) -> None:
    """Wrap the targets that `__main__` defines, as in `python -m verl.trainer.main_ppo_sync`.

    Ray pickles its classes by value, with their wrappers.  Never raises.
    """
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "").as_posix()
    for probe in probes:
        for module in dict.fromkeys(target.partition(":")[0] for target in probe.targets):
            if path.endswith(f"/{module.replace('.', '/')}.py"):
                _try_to_place(probe, main, module)


def place_on(probes: Iterable[Probe], subclass: object) -> None:
    """Wrap the methods of a class that override the targets of `probes`.  Never raises.

    Of several definitions only the one that is called, as some call that of their base class.
    """
    if not inspect.isclass(subclass):
        return
    for probe in probes:
        for target in probe.targets:
            _, _, path = target.partition(":")
            base, _, attribute = path.rpartition(".")
            for owner in inspect.getmro(subclass):
                if owner.__name__ == base:
                    missed(probe, f"{subclass.__qualname__} has no {attribute} of its own")
                    break
                if attribute in vars(owner):
                    place = f"{owner.__module__}:{owner.__qualname__}.{attribute}"
                    with _noting(probe, owner.__module__):
                        _wrap(probe, place, owner, attribute, _members(owner)[attribute])
                    break


def uninstall() -> None:
    """Put every original back, the very same object.

    A wrapper of ours below another plugin's stays, and is found again by the next `install`.
    """
    global _generation
    _generation += 1
    for key, place in reversed(list(_places.items())):
        current = inspect.getattr_static(place.owner, place.attribute, None)
        if current is place.wrapper:
            setattr(place.owner, place.attribute, place.original)
        elif stands_below(place.wrapper, current):
            continue
        del _places[key]
    status.clear()


def stands_below(wrapper: Any, function: Any) -> bool:
    """Whether a wrapper is the function or below it, as `__wrapped__` of decorators shows."""
    wrapper = getattr(wrapper, "__func__", wrapper)
    for _ in range(_MOST_WRAPPERS):
        function = getattr(function, "__func__", function)
        if function is wrapper:
            return True
        function = getattr(function, "__wrapped__", None)
        if function is None:
            break
    return False


def is_probed(instance: object, method: str) -> bool:
    """Whether calls of a method run a probe, also if Ray pickled its class by value."""
    function = getattr(type(instance), method, None)
    for _ in range(_MOST_WRAPPERS):
        for cell in getattr(function, "__closure__", None) or ():
            # A cell may be empty.
            with contextlib.suppress(ValueError):
                if isinstance(cell.cell_contents, Probe):
                    return True
        function = getattr(function, "__wrapped__", None)
    return False


def resolve(module: ModuleType, path: str) -> tuple[Any, str, Any] | None:
    """Find the class (or module) that defines the attribute, reading `vars`, never `getattr`."""
    *parents, attribute = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = _members(owner).get(parent)
        if owner is None:
            return None
        # `@ray.remote class X` leaves an ActorClass; Ray ships this class of it by value.
        metadata = getattr(owner, "__ray_metadata__", None)
        if metadata is not None:
            owner = metadata.modified_class
    for candidate in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        # What `object` defines cannot be replaced.
        if attribute in vars(candidate) and candidate is not object:
            return candidate, attribute, _members(candidate)[attribute]
    return None


def _members(owner: object) -> Mapping[str, Any]:
    return vars(owner)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _place_all(
    probes: list[Probe], generation: int, only_exported: bool, module: ModuleType
) -> None:
    if generation != _generation:
        return
    if only_exported:
        probes = [probe for probe in probes if _is_exported(probe, module)]
    for probe in probes:
        if not probe.of_subclasses and (probe.always or recorder.active() is not None):
            _try_to_place(probe, module, module.__name__)


def _is_exported(probe: Probe, module: ModuleType) -> bool:
    """Whether a target of the probe belongs to a class that `@ray.remote` decorates in the module."""
    owners = (
        target.partition(":")[2].partition(".")[0]
        for target in probe.targets
        if target.partition(":")[0] == module.__name__
    )
    return any(hasattr(vars(module).get(owner), "__ray_metadata__") for owner in owners)


def _try_to_place(probe: Probe, module: ModuleType, name: str) -> None:
    with _noting(probe, module.__name__):
        _place(probe, module, name)


@contextlib.contextmanager
def _noting(probe: Probe, module: str) -> Generator[None, None, None]:
    """Note an exception, which would make the host's import fail."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        from verl_profiler.events.redaction import problem_of

        missed(probe, f"{module}: {problem_of(error)}")


def _is_decorated(original: object) -> bool:
    return isinstance(original, (staticmethod, classmethod))


def _place(probe: Probe, module: ModuleType, name: str) -> None:
    """Wrap the first of the probe's targets in the module `name` that `module` has."""
    tried: list[str] = []
    for target in probe.targets:
        module_name, _, path = target.partition(":")
        if module_name != name:
            continue
        tried.append(path)
        found = resolve(module, path)
        if found is None:
            continue
        _wrap(probe, target, *found)
        return
    if not probe.optional:
        missed(probe, f"{module.__name__} has no {' or '.join(tried)}")


def _wrap(probe: Probe, target: str, owner: Any, attribute: str, original: Any) -> None:
    """Put a wrapper in the place of what the owner has, unless it has one of this probe."""
    # A package that re-exports a function may have taken the wrapped one.
    if any(
        place.probe.targets == probe.targets and stands_below(place.wrapper, original)
        for place in _places.values()
    ):
        if target not in status.installed.setdefault(probe.name, []):
            status.installed[probe.name].append(target)
        return
    function = original.__func__ if _is_decorated(original) else original
    if not callable(function):
        missed(probe, f"{target} is not callable")
        return
    _check_parameters(probe, target, function)
    wrapper: Any = wrap(probe, function)
    if _is_decorated(original):
        wrapper = type(original)(wrapper)
    setattr(owner, attribute, wrapper)
    _places[id(owner), attribute] = _Place(probe, owner, attribute, original, wrapper)
    status.installed.setdefault(probe.name, []).append(target)


def _check_parameters(probe: Probe, target: str, function: Callable[..., Any]) -> None:
    if not probe.reads:
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    lost = [name for name in probe.reads if name not in parameters]
    if lost:
        missed(probe, f"{target} no longer takes {', '.join(lost)}; its fields may be missing")
