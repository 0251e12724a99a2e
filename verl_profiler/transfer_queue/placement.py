"""What is traced, and the wrappers around it.

A wrapper closes over a frozen `Target` and functions of this package that can be imported, nothing
else: a class of the user's that is pickled by value takes its wrappers along (see `instrumentation.wrapping`).
Where nothing is traced they only call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.instrumentation.wrapping import FAILURES, resolve, stands_below
from verl_profiler.probes.transfer_queue import end_get
from verl_profiler.recording import recorder
from verl_profiler.recording.call import Call
from verl_profiler.transfer_queue import calls, lines, metrics
from verl_profiler.transfer_queue.switches import Switches
from verl_profiler.transfer_queue.trace_ids import Origin, find_meta, of_batch, set_run

__all__ = ["TARGETS", "Target", "install", "name_calls", "place_in_main", "uninstall"]


@dataclass(frozen=True)
class Target:
    """One callable that is traced.

    Args:
        kind: How: `bridge` makes decorators, `bridged` and `compute` are what they decorate,
            `direct` reads and writes the queue itself, `rollout` too but knows its samples from
            the trajectory, `get` and `put` are the key-value interface, `client_get` and
            `client_put` the client below it, `log` logs verl's metrics.
        path: `module:Class.attribute`; of `bridged` and `compute` the function's name.
        waits: See `FunctionCall`.
        optional: True where a verl or TransferQueue may do without it.
    """

    kind: str
    path: str
    waits: bool = False
    optional: bool = False

    @property
    def name(self) -> str:
        """The attribute."""
        return self.path.rpartition(":")[2].rpartition(".")[2]


_CLIENT = "transfer_queue.client:AsyncTransferQueueClient"
_SYNC_TRAINER = "verl.trainer.main_ppo_sync:PPOTrainer"  # verl 0.8
_TRAINERS = ("verl.trainer.ppo.v1.trainer_base:PPOTrainer", _SYNC_TRAINER)
# What the trainers do themselves, and whether it waits for workers.
_DIRECT = {
    "_compute_reward_colocate": True,
    "_balance_batch": False,
    "_compute_old_log_prob": True,
    "_compute_ref_log_prob": True,
    "_compute_values": True,
    "_compute_advantage": False,
    "_compute_metrics": False,
    "_log_rollout_data": False,
}
_INTERFACE = (
    ("get", "kv_batch_get"),
    ("get", "kv_batch_get_by_meta"),
    ("put", "kv_batch_put"),
    ("put", "kv_put"),
)

TARGETS = (
    # Every method with `@register` whose argument is metadata: compute_log_prob, update_actor, …
    Target("bridge", "verl.utils.transferqueue_utils:tqbridge"),
    Target("rollout", "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop"),
    *(
        Target("direct", f"{trainer}.{name}", waits=waits, optional=True)
        for trainer in _TRAINERS
        for name, waits in _DIRECT.items()
    ),
    Target("direct", f"{_SYNC_TRAINER}._add_remax_reward_baselines", optional=True),
    # The package re-exports them under its own name.
    *(
        Target(kind, f"{module}:{prefix}{name}", optional=True)
        for module in ("transfer_queue.interface", "transfer_queue")
        for prefix in ("async_", "")
        for kind, name in _INTERFACE
    ),
    Target("client_get", f"{_CLIENT}.async_get_data"),
    Target("client_put", f"{_CLIENT}.async_put"),
    Target("log", "verl.utils.tracking:Tracking.log"),
)

_failures: Counter[str] = Counter()
_places: list[tuple[Any, str, Any, Any]] = []
_on = False


def install(switches: Switches, run: str, *, records: bool) -> None:
    """Trace in this process, now or when the modules are imported.  Never raises.

    Args:
        switches: What is on.
        run: The run's name.
        records: Whether events of the family `transfer_queue` are recorded in this process.
    """
    global _on
    calls.configure(switches, records=records)
    set_run(run)
    if switches.wants_metrics:
        metrics.start(run)
    if _on:
        return
    _on = True
    for target in TARGETS:
        if target.kind == "log" and not switches.wants_metrics:
            continue
        hook = functools.partial(_place, target)
        module = sys.modules.get(target.path.partition(":")[0])
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            hook(module)
        else:
            wrapt.register_post_import_hook(hook, target.path.partition(":")[0])


def name_calls(probes: Iterable[Probe]) -> list[Probe]:
    """Return the probes, those of the client's gets and puts with trace and call ids."""
    leaves = {"tq_get": _leave_get, "tq_put": _add_ids}
    return [
        dataclasses.replace(probe, leave=leaves[probe.name]) if probe.name in leaves else probe
        for probe in probes
    ]


def _leave_get(call: Call, result: Any) -> None:
    end_get(call, result)
    _add_ids(call, result)


def _add_ids(call: Call, _result: Any) -> None:
    client = calls.current_client.get()
    if client is not None:
        call.extra = {**(call.extra or {}), **client.ids()}


def uninstall() -> None:
    """Take the wrappers off; for tests."""
    global _on
    _on = False
    left = []
    for place in reversed(_places):
        owner, attribute, original, wrapper = place
        current = inspect.getattr_static(owner, attribute, None)
        if current is wrapper:
            setattr(owner, attribute, original)
        elif stands_below(wrapper, current):
            left.append(place)
    _places[:] = reversed(left)
    _failures.clear()
    metrics.stop()
    lines.stop()
    calls.configure(Switches(), records=False)


def place_in_main() -> None:
    """Wrap the targets that are classes of `__main__`: `python -m verl.trainer.main_ppo_sync`.

    Ray ships those by value, with their wrappers, which trace where tracing is on.
    """
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "").as_posix()
    for target in TARGETS:
        module = target.path.partition(":")[0]
        if path.endswith(f"/{module.replace('.', '/')}.py"):
            _put_on(target, main)


def _place(target: Target, module: ModuleType) -> None:
    if _on:
        _put_on(target, module)


def _put_on(target: Target, module: ModuleType) -> None:
    try:
        found = resolve(module, target.path.partition(":")[2])
        if found is None:
            if not target.optional:
                _miss(target, f"{module.__name__} has no {target.path.partition(':')[2]}")
            return
        owner, attribute, original = found
        # A package that re-exports a function may have taken the wrapped one; another plugin's
        # wrapper may stand on it.
        if any(stands_below(wrapper, original) for *_, wrapper in _places):
            return
        wrapper = (
            _bridge(original)
            if target.kind == "bridge"
            else metrics.log_with_metrics(original)
            if target.kind == "log"
            else around(target, original)
        )
        setattr(owner, attribute, wrapper)
        _places.append((owner, attribute, original, wrapper))
    except Exception as error:  # noqa: BLE001  an exception here makes the host's import fail
        _miss(target, repr(error))


def _miss(target: Target, reason: str) -> None:
    recorder.say(
        f"WARNING TransferQueue tracing: {reason}. Training is not affected; calls of "
        f"{target.name} will be missing. (target-changed)"
    )


def _bridge(tqbridge: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's `tqbridge` with both what it gets and what it makes wrapped."""

    @functools.wraps(tqbridge)
    def traced_tqbridge(*args: Any, **kwargs: Any) -> Any:
        decorate = tqbridge(*args, **kwargs)

        def decorator(function: Any) -> Any:
            name = getattr(function, "__name__", str(function))
            bridged = decorate(around(Target("compute", name), function))
            return around(Target("bridged", name), bridged)

        return decorator

    return traced_tqbridge


def around(target: Target, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable of the same kind whose calls are traced."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            call = _begin(target, args, kwargs)
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                _end(target, call, None, error)
                raise
            _end(target, call, result, None)
            return result

    else:

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            call = _begin(target, args, kwargs)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                _end(target, call, None, error)
                raise
            _end(target, call, result, None)
            return result

    return traced


def _begin(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what is to be ended with the call, or None."""
    if not _on:
        return None
    section = _begin_section()
    try:
        return _BEGINNINGS[target.kind](target, args, kwargs)
    except FAILURES as error:
        _failed(target, error)
        return None
    finally:
        _end_section(section)


def _end(target: Target, call: Any, result: Any, error: BaseException | None) -> None:
    if call is None:
        return
    section = _begin_section()
    try:
        call.end(result, error)
    except FAILURES as failure:
        _failed(target, failure)
    finally:
        _end_section(section)


def _begin_section() -> tuple[int, int]:
    active = recorder.active()
    return (0, 0) if active is None else active.begin_section()


def _end_section(section: tuple[int, int]) -> None:
    active = recorder.active()
    if active is not None and section[0]:
        active.end_section(*section)


def _failed(target: Target, error: BaseException) -> None:
    _failures[target.path] += 1
    if _failures[target.path] > 1:
        return
    with contextlib.suppress(*FAILURES):
        lines = "".join(traceback.format_exception(error)).rstrip()
        recorder.say(
            f"WARNING TransferQueue tracing of {target.name} failed; training is not affected, "
            f"further failures are only counted. (probe-failed)\n{lines}"
        )


def _begin_batch(target: Target, args: Any, kwargs: Any) -> Any:
    meta = find_meta((*args, *kwargs.values()))
    if meta is None:
        return None
    bridged = target.kind == "bridged"
    return calls.begin_function(
        target.name, calls.find_origin(meta), bridged=bridged, waits=target.waits
    )


def _begin_rollout(target: Target, args: Any, kwargs: Any) -> Any:
    # The other agent-loop workers hand their samples back by Ray (verl 0.9's V0 trainer, 0.8's
    # main_ppo), or put them from a bridged `generate_sequences` (0.6, 0.7.0).
    if not any(kind.__name__ == "AgentLoopWorkerTQ" for kind in type(args[0]).__mro__):
        return None
    trajectory = kwargs.get("trajectory", args[2] if len(args) > 2 else None) or {}
    step = kwargs.get("global_steps", trajectory.get("step"))
    # As verl's agent_loop_tq.py files them (verl 0.9.1).
    partition = "val" if trajectory.get("validate") else "train"
    ids = () if step is None else (of_batch(partition, step),)
    origin = Origin(ids, step if isinstance(step, int) else None, 1)
    return calls.begin_function(target.name, origin, bridged=False, waits=target.waits)


@dataclass
class _Compute:
    function: calls.FunctionCall

    def end(self, _result: Any, error: BaseException | None) -> None:
        self.function.end_compute(error)


@dataclass
class _Operation:
    function: calls.FunctionCall

    def end(self, _result: Any, error: BaseException | None) -> None:
        self.function.end_operation(error)


def _begin_compute(_target: Target, _args: Any, _kwargs: Any) -> Any:
    function = calls.current.get()
    return _Compute(function) if function is not None and function.begin_compute() else None


def _begin_operation(target: Target, args: Any, kwargs: Any) -> Any:
    function = calls.current.get()
    if function is None:
        return None
    # A put of tags alone moves no data.
    if target.kind == "put" and kwargs.get("fields", args[2] if len(args) > 2 else None) is None:
        return None
    return _Operation(function) if function.begin_operation(target.kind.upper()) else None


def _begin_client(target: Target, args: Any, kwargs: Any) -> Any:
    arguments = {**dict(zip(_PARAMETERS[target.kind], args)), **kwargs}  # noqa: B905
    return calls.begin_client_call(target.kind.rpartition("_")[2].upper(), arguments)


# The same in all releases of TransferQueue up to 0.1.11; further ones are not read.
_PARAMETERS = {
    "client_get": ("self", "metadata"),
    "client_put": ("self", "data", "metadata"),
}

_BEGINNINGS: dict[str, Callable[[Target, Any, Any], Any]] = {
    "bridged": _begin_batch,
    "direct": _begin_batch,
    "rollout": _begin_rollout,
    "compute": _begin_compute,
    "get": _begin_operation,
    "put": _begin_operation,
    "client_get": _begin_client,
    "client_put": _begin_client,
}
