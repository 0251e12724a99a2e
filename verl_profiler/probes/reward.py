"""The reward function, in the reward workers."""

from __future__ import annotations

import contextlib
from typing import Any

from verl_profiler.events.json_values import is_object
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.instrumentation.wrapping import wrap
from verl_profiler.probes.values import scalar
from verl_profiler.recording import context
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

_probe = of_family("reward")

# The dict that verl passes to the user's function as `extra_info`, the function's start and end, and
# the sample's identity, of each call under way; by the `id` of that dict: a thread pool runs the
# function, in a context of its own.  None: two calls share a dict.
_running: dict[int, list[Any] | None] = {}
# More than that are left over from an earlier recording.
_MOST_RUNNING = 10_000


class _ScoredSample(context.Request):
    """What the spans of a reward function carry: a reward worker receives no request id."""

    def full_identity(self) -> dict[str, Any]:
        extra = super().full_identity()
        if self.uid is not None:
            extra["uid"] = self.uid
        return extra


def _begin_score(call: Call) -> None:
    sample = getattr(call.arguments["data"], "non_tensor_batch", {})

    def first(key: str) -> Any:
        values = sample.get(key)
        return None if values is None or len(values) == 0 else scalar(values[0])

    extra = {
        name: value
        for name, value in (
            ("sample", first("index")),
            ("session", first("session_id")),
            ("uid", first("uid")),
        )
        if value is not None
    }
    call.extra = extra
    step = first("global_steps")
    if isinstance(step, int):
        call.step = context.process.step = step
    _time_function(getattr(call.args[0], "reward_manager", None) if call.args else None)
    infos = sample.get("extra_info")
    if infos is not None and len(infos) and isinstance(infos[-1], dict):
        if len(_running) > _MOST_RUNNING:
            _running.clear()
        request = _ScoredSample(context.process.current_step())
        request.sample, request.session = extra.get("sample"), extra.get("session")
        request.uid = extra.get("uid")
        call.state = [infos[-1], 0, 0, request]
        key = id(infos[-1])
        _running[key] = None if key in _running else call.state


def _time_function(manager: Any) -> None:
    """Put a clock around the function that a reward manager of verl's calls for each score."""
    function = getattr(manager, "__dict__", {}).get("compute_score")
    if callable(function) and not hasattr(function, "_verl_profiler_timed"):
        with contextlib.suppress(Exception):
            timed: Any = wrap(_FUNCTION, function)
            timed._verl_profiler_timed = True
            manager.compute_score = timed


def _begin_function(call: Call) -> None:
    call.state = _running.get(id(call.kwargs.get("extra_info")))
    if call.state is not None:
        call.state[1] = now()
        call.bind(context.current_request, call.state[3])


def _end_function(call: Call, _result: Any) -> None:
    if call.state is not None:
        call.state[2] = call.end_ns


_FUNCTION = _probe(None, "compute_score", enter=_begin_function, leave=_end_function)


def _end_score(call: Call, result: Any) -> None:
    if call.state is not None:
        info, begin_ns, end_ns, _ = call.state
        _running.pop(id(info), None)
        if end_ns and call.begin_ns is not None:
            times = {"wait_s": round((begin_ns - call.begin_ns) / 1e9, 6)}
            times["compute_s"] = round((end_ns - begin_ns) / 1e9, 6)
            call.extra = {**(call.extra or {}), **times}
    if is_object(result) and "reward_score" in result:
        call.extra = {**(call.extra or {}), "score": float(result["reward_score"])}


PROBES = (
    _probe(
        "reward_score",
        "verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score",
        reads=("data",),
        enter=_begin_score,
        leave=_end_score,
    ),
)
