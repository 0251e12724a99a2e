"""Put probes on verl and take them off: wait for a module, then wrap one attribute of it.

A wrapped callable behaves like the one it replaces: same signature, same result, the same
exception object, still a coroutine function or generator if it was one.  A probe's own failure is
counted, reported once, and never reaches verl.

A wrapper closes over its `Probe`, the original and modules, and nothing else.  Ray pickles
decorated actor classes by value, and what a wrapper closes over travels with them: a lock makes
the class unpicklable, and a `wrapt.FunctionWrapper` is dropped on the way without a word
(ray 2.60).  On the other side the wrapper finds the recorder of the process that it landed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import context, event_loop_lag, observers, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall
from verl_profiler.recording.event_loop_lag import (
    WORTH_NAMING_NS,
    note_blocking_call,
    watch_running_loop,
)
from verl_profiler.recording.recorder import SAMPLED

__all__ = [
    "FAILURES",
    "Status",
    "install",
    "resolve",
    "stands_below",
    "status",
    "uninstall",
    "wrap",
]


@dataclass
class Status:
    """What became of the probes in this process."""

    installed: dict[str, list[str]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    hits: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget everything; when the probes are taken off."""
        for account in (self.installed, self.missed, self.hits, self.errors):
            account.clear()


@dataclass(frozen=True)
class _Place:
    probe: Probe
    owner: Any
    attribute: str
    original: Any
    wrapper: Any


_NOTHING: dict[str, Any] = {}
# What a hook may raise; values of the host's may raise anything from `__str__` or `__len__`.
# KeyboardInterrupt and SystemExit are not among them: a signal handler of the host's raises them
# wherever the thread is.
FAILURES = (Exception, asyncio.CancelledError)
# Looked up once: these are read on every probed call.
_current_request = context.current_request.get
_get_running_loop = asyncio._get_running_loop

status = Status()
_places: dict[tuple[int, str], _Place] = {}
# Others' wrappers on top of one of ours that are looked through.
_MOST_WRAPPERS = 50


def install(probes: Iterable[Probe]) -> None:
    """Wrap the targets of `probes`, now or when their modules are imported.  Never raises."""
    by_module: dict[str, list[Probe]] = {}
    for probe in probes:
        for module in dict.fromkeys(target.partition(":")[0] for target in probe.targets):
            by_module.setdefault(module, []).append(probe)
    for module, wanted in by_module.items():
        hook = functools.partial(_place_all, wanted)
        if module in sys.modules and not _is_initializing(sys.modules[module]):
            hook(sys.modules[module])
        else:
            wrapt.register_post_import_hook(hook, module)


def uninstall() -> None:
    """Put every original back, the very same object.

    A wrapper of ours below another plugin's stays, and is found again by the next `install`.
    """
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


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _place_all(probes: list[Probe], module: ModuleType) -> None:
    for probe in probes:
        if recorder.active() is None:
            return
        try:
            _place(probe, module)
        except Exception as error:  # noqa: BLE001  an exception here makes the host's import fail
            _miss(probe, f"{module.__name__}: {error!r}")


def _place(probe: Probe, module: ModuleType) -> None:
    tried = []
    for target in probe.targets:
        module_name, _, path = target.partition(":")
        if module_name != module.__name__:
            continue
        tried.append(path)
        found = resolve(module, path)
        if found is None:
            continue
        owner, attribute, original = found
        if any(
            place.probe.targets == probe.targets and stands_below(place.wrapper, original)
            for place in _places.values()
        ):
            if target not in status.installed.setdefault(probe.name, []):
                status.installed[probe.name].append(target)
            return
        function = (
            original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        )
        if not callable(function):
            _miss(probe, f"{target} is not callable")
            return
        _check_parameters(probe, target, function)
        wrapper: Any = wrap(probe, function)
        if isinstance(original, (staticmethod, classmethod)):
            wrapper = type(original)(wrapper)
        setattr(owner, attribute, wrapper)
        _places[id(owner), attribute] = _Place(probe, owner, attribute, original, wrapper)
        status.installed.setdefault(probe.name, []).append(target)
        return
    if not probe.optional:
        _miss(probe, f"{module.__name__} has no {' or '.join(tried)}")


def resolve(module: ModuleType, path: str) -> tuple[Any, str, Any] | None:
    """Find the class (or module) that defines the attribute, reading `vars`, never `getattr`."""
    *parents, attribute = path.split(".")
    owner: Any = module
    for parent in parents:
        owner = vars(owner).get(parent)
        if owner is None:
            return None
        # `@ray.remote class X` leaves an ActorClass; Ray ships this class of it by value.
        metadata = getattr(owner, "__ray_metadata__", None)
        if metadata is not None:
            owner = metadata.modified_class
    for candidate in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        if attribute in vars(candidate):
            return candidate, attribute, vars(candidate)[attribute]
    return None


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
        _miss(probe, f"{target} no longer takes {', '.join(lost)}; its fields may be missing")


def _miss(probe: Probe, reason: str) -> None:
    if probe.name in status.missed:
        return
    status.missed[probe.name] = reason
    recorder.say(
        f"WARNING probe {probe.name!r}: {reason}. Training is not affected; "
        f"this measurement will be missing. (target-changed)"
    )


def wrap(probe: Probe, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable of the same kind that also records `probe`."""
    names = _parameter_names(function)
    if _is_decorated_coroutine_function(function):
        return _wrap_decorated(probe, names, function)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            call = _enter(probe, names, args, kwargs, True)
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                _leave(probe, call, None, error)
                raise
            _leave(probe, call, result, None)
            return result

    elif inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            call = _enter(probe, names, args, kwargs, True)
            try:
                items = function(*args, **kwargs)
                item = await _first_item(items)
                while True:
                    _item(probe, call, item)
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await items.aclose()
                        raise
                    except BaseException as error:  # noqa: BLE001  handed on to the host's generator
                        item = await items.athrow(error)
                    else:
                        item = await items.asend(sent)
            except StopAsyncIteration:
                _leave(probe, call, None, None)
            except BaseException as error:
                _leave(probe, call, None, error)
                raise

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            call = _enter(probe, names, args, kwargs, None)
            try:
                result = yield from function(*args, **kwargs)
            except BaseException as error:
                _leave(probe, call, None, error)
                raise
            _leave(probe, call, result, None)
            return result

    else:

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            call = _enter(probe, names, args, kwargs, False)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                _leave(probe, call, None, error)
                raise
            _leave(probe, call, result, None, blocking=True)
            return result

    return traced


def _is_decorated_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a decorator that is no coroutine function itself stands before one that is."""
    return not inspect.iscoroutinefunction(function) and inspect.iscoroutinefunction(
        inspect.unwrap(function)
    )


def _wrap_decorated(
    probe: Probe, names: tuple[str, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a coroutine function below a decorator that may hand out the coroutine, or run it.

    `torch.no_grad` hands it out.  verl's `auto_await` looks at its caller: a coroutine gets it, anyone
    else the result.  So here too it is called from a coroutine if the caller is one.
    """

    async def record(call: Call | None, coroutine: Any) -> Any:
        try:
            result = await coroutine
        except BaseException as error:
            _leave(probe, call, None, error)
            raise
        _leave(probe, call, result, None)
        return result

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        in_coroutine = sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE
        # None, as in a generator: the end may come in another order than the begin.
        call = _enter(probe, names, args, kwargs, None)
        try:
            result = (_call_from_coroutine if in_coroutine else _call)(function, args, kwargs)
        except BaseException as error:
            _leave(probe, call, None, error)
            raise
        if inspect.iscoroutine(result):
            return record(call, result)
        _leave(probe, call, result, None)
        return result

    return traced


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _call_from_coroutine(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function, at once, from the frame of a coroutine."""

    async def calling() -> Any:
        return function(*args, **kwargs)

    try:
        calling().send(None)
    except StopIteration as done:
        return done.value


def _first_item(items: Any) -> Any:
    """Begin with an async generator that only its wrapper closes.

    The event loop's hooks would have it closed by the loop too, when it shuts down or when the wrapper
    is dropped, in a second task at the same time: "asynchronous generator is already running".
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return items.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


# `in_loop`: True in a coroutine, None in a generator, False in a plain call.
def _enter(
    probe: Probe,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_loop: bool | None,
) -> Call | None:
    active = recorder._active
    if active is None:
        return None
    call = None
    begin = now()
    # `begin_section` and `end_section`, and below `append`, without the calls.
    cpu = 0 if begin % SAMPLED else time.thread_time_ns()
    try:
        if in_loop:
            active.alive_ns = begin
            if id(_get_running_loop()) != event_loop_lag.last_loop:
                watch_running_loop()
        call = Call(probe.event, begin, names, args, kwargs)
        if probe.enter is not None:
            probe.enter(call)
            if cpu:
                active.add_cpu(cpu)
            # What the hook took counts as ours, not as the host's.
            call.begin_ns = end = now()
            active.wrapper_ns += end - begin
    except FAILURES as error:
        if call is not None:
            _unbind(call)
        _failed(probe, error)
        return None
    if observers.current is not None and call.event is not None:
        observers.current.call_begins(call, probe.family, in_loop)
    return call


def _leave(
    probe: Probe,
    call: Call | None,
    result: Any,
    error: BaseException | None,
    *,
    blocking: bool = False,
) -> None:
    if call is None:
        return
    if call.range is not None and observers.current is not None:
        observers.current.call_ends(call)
    active = recorder._active
    if active is None:
        if call.binding is not None:
            _unbind(call)
        return
    end = now()
    cpu = 0 if end % SAMPLED else time.thread_time_ns()
    try:
        call.end_ns = end
        status.hits[probe.name] += 1
        begin = call.begin_ns
        if blocking and begin is not None and end - begin > WORTH_NAMING_NS:
            note_blocking_call(probe.name, begin, end)
        if error is not None:
            call.error = error
        if probe.leave is not None:
            probe.leave(call, result)
        if call.binding is not None:
            _unbind(call)
        event = call.event
        if event is not None:
            request = call.request or _current_request()
            step = call.step
            extra = call.extra
            if request is None:
                if step is None:
                    step = context.process.current_step()
                if context.process.validate:
                    extra = {**(extra or _NOTHING), "validate": True}
            else:
                extra = {**request.known_identity(), **extra} if extra else request.identity()
                if step is None:
                    step = request.step
            if error is not None:
                extra = {
                    **(extra or _NOTHING),
                    "status": status_of(error),
                    "error": type(error).__name__,
                }
            if active.steps is None or step in active.steps:
                item = (event, call.begin_ns, end, extra, step)
                queue = active.queue
                # One that holds something has its writer running.
                if 0 < len(queue) < active.limit:
                    queue.append(item)
                else:
                    active.append(item)
        if cpu:
            active.add_cpu(cpu)
        active.wrapper_ns += now() - end
    except FAILURES as failure:
        if call.binding is not None:
            _unbind(call)
        _failed(probe, failure)
    if error is not None:
        call.release()


def _unbind(call: Call) -> None:
    binding, call.binding = call.binding, None
    if binding is not None:
        token, value = binding
        context.restore(token, value)
        if isinstance(value, EngineCall):
            value.end()


def _item(probe: Probe, call: Call | None, item: Any) -> None:
    active = recorder._active
    if call is None or probe.item is None or active is None:
        return
    section = active.begin_section()
    try:
        probe.item(call, item)
    except FAILURES as error:
        _failed(probe, error)
    active.end_section(*section)


def status_of(error: BaseException) -> str:
    """Return the `status` of a call that ended with this exception."""
    if isinstance(error, GeneratorExit):
        return "unfinished"
    return "error" if isinstance(error, Exception) else "cancelled"


def _failed(probe: Probe, error: BaseException) -> None:
    status.errors[probe.name] += 1
    if status.errors[probe.name] > 1:
        return
    # At the recursion limit, or with an exception whose text cannot be had, this fails too.
    with contextlib.suppress(*FAILURES):
        lines = "".join(traceback.format_exception(error)).rstrip()
        recorder.say(
            f"WARNING probe {probe.name!r} failed; training is not affected, further failures "
            f"are only counted. (probe-failed)\n{lines}"
        )
