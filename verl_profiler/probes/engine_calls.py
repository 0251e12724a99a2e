"""Generate calls as the agent loop sees them, with the attempts of those that the engine aborts.

The client of asynchronous trainers calls the one of the others until an attempt is not aborted (verl 0.9.1
llm_server.py:289).  The outer call is the `engine_call`; its attempts are distinguished only once one was
aborted.

A framework of its own, outside of verl's agent loops, calls the client without a request, unless a span
of the user's names one.  uni-agent does so in its gateways, which its agents reach by HTTP; the id that it
passes to the client, by which calls keep their replica, is that of its session.

Which replica the load balancer chose for a call, why, and how loaded each was is recorded in the balancer's
process, which receives no step, so all its lines are in one file.  Where only a share of the requests is recorded
in detail, choices that follow from the client's `server_acquire` alone are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_profiler.events.json_values import is_list, is_tuple, mapping_or_empty
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.rollout import with_request
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall, Request
from verl_profiler.recording.requests import close_turn, open_turn

_probe = of_family("rollout")

_MODULE = "verl.workers.rollout.llm_server"
_CLIENT = f"{_MODULE}:LLMServerClient"
# It calls `LLMServerClient.generate` until an attempt is not aborted.
_REPEATING_CLIENTS = (
    f"{_MODULE}:FullyAsyncLLMServerClient",
    # verl 0.8.
    "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerClient",
)
# How vLLM (also the stand-in) and SGLang report an aborted call.
_ABORTED = ("aborted", "abort")
# Not of subclasses that choose by rules of their own.
_BALANCERS = (
    "verl.workers.rollout.router:GlobalRequestLoadBalancer",
    # verl before 0.9.1.
    "verl.workers.rollout.llm_server:GlobalRequestLoadBalancer",
)

# The replicas in the order of `loads`, as recorded last for each balancer.
_named: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _begin_engine_call(call: Call) -> None:
    outer = context.current_engine_call.get()
    if outer is not None and outer.repeats and not outer.is_over:
        _begin_attempt(call, outer)
        return
    _begin_generate_call(call, EngineCall())


def _begin_repeating_call(call: Call) -> None:
    _begin_generate_call(call, EngineCall(repeats=True))


def _begin_generate_call(call: Call, engine_call: EngineCall) -> None:
    event = call.event
    request = with_request(call)
    if request is None:
        call.event, call.request = event, Request(context.process.current_step())
        engine_call.request = request = call.request
        request.validate = context.process.validate
        request.learns_step = request.explicit_turns = True
    arguments = call.arguments
    call.extra = {"prompt_tokens": len(arguments["prompt_ids"])}
    if engine_call.request is not None:
        call.extra["conversation"] = plain(arguments["request_id"])
    if request.request_id is None and engine_call.request is None:
        request.request_id = plain(arguments["request_id"])
    if not request.explicit_turns and request.calls_open == 0:
        close_turn(request, call.begin_ns or now())
        open_turn(request, request.turns)
    request.calls_open += 1
    call.state = engine_call
    call.bind(context.current_engine_call, engine_call)


def _begin_attempt(call: Call, outer: EngineCall) -> None:
    call.request = request = with_request(call) or outer.request
    call.event = "engine_attempt"
    call.extra = {"prompt_tokens": len(call.arguments["prompt_ids"]), "attempt": outer.attempts}
    if outer.attempts and request is not None:
        extra = {**request.identity(), "attempt": outer.attempts - 1}
        recorder.record("parked", outer.ended_ns, call.begin_ns or now(), extra, request.step)
    call.state = attempt = EngineCall(outer=outer)
    call.bind(context.current_engine_call, attempt)


def _end_engine_call(call: Call, result: Any) -> None:
    request: Request | None = call.request
    engine_call: EngineCall | None = call.state
    if request is None or engine_call is None:
        return
    extra = call.extra or {}
    if engine_call.engine_request_id is not None:
        extra["engine_request_id"] = engine_call.engine_request_id
    tokens = getattr(result, "token_ids", result)
    count = 0
    if is_list(tokens) or is_tuple(tokens):
        extra["response_tokens"] = count = len(tokens)
    reason = getattr(result, "stop_reason", None)
    if reason is not None:
        extra["finish_reason"] = plain(reason)
    call.extra = extra
    fields = mapping_or_empty(getattr(result, "extra_fields", None))
    version = fields.get("global_steps")
    if request.learns_step and isinstance(version, int):
        context.process.learn_step(version)
        if request.request_id is None:
            request.step = context.process.current_step()
    if engine_call.outer is not None:
        _end_attempt(call, engine_call.outer, fields, reason in _ABORTED, count)
        return
    request.calls_open -= 1
    _keep_versions(request, fields)
    if engine_call.aborted_tokens or engine_call.attempts > 1:
        extra["attempts"] = engine_call.attempts
        extra["aborted_tokens"] = engine_call.aborted_tokens
        request.attempts += engine_call.attempts
        for name in ("min", "max"):
            version = fields.get(f"{name}_global_steps")
            if version is not None:
                extra[f"{name}_weight_version"] = plain(version)
    elif request.attempts:
        request.attempts += 1


def _end_attempt(
    call: Call, outer: EngineCall, fields: Mapping[str, Any], aborted: bool, tokens: int
) -> None:
    if fields.get("global_steps") is not None and call.extra is not None:
        call.extra["weight_version"] = plain(fields["global_steps"])
    outer.engine_request_id = call.state.engine_request_id
    if outer.attempts == 0 and not aborted:
        # The call's only attempt: its line has it all.
        call.event = None
    outer.attempts += 1
    outer.ended_ns = call.end_ns
    if aborted:
        outer.aborted_tokens += tokens


def _keep_versions(request: Request, fields: Mapping[str, Any]) -> None:
    """Keep the oldest and the newest version that tokens of a request were made with."""
    oldest, newest = fields.get("min_global_steps"), fields.get("max_global_steps")
    if isinstance(oldest, int) and isinstance(newest, int):
        known = request.min_weight_version, request.max_weight_version
        request.min_weight_version = oldest if known[0] is None else min(known[0], oldest)
        request.max_weight_version = newest if known[1] is None else max(known[1], newest)


def _keep_engine_request_id(_call: Call, result: Any) -> None:
    engine_call = context.current_engine_call.get()
    name = result if isinstance(result, str) else getattr(result, "hex", None)
    if engine_call is not None and isinstance(name, str):
        engine_call.engine_request_id = plain(name)


def _end_acquire(call: Call, result: Any) -> None:
    engine_call = context.current_engine_call.get()
    if engine_call is None:
        call.event = None
        return
    if isinstance(result, tuple) and result:
        call.extra = {"server": plain(result[0])}
        engine_call.server = call.extra["server"]
        outer = engine_call.outer
        if outer is not None and outer.attempts:
            call.extra["attempt"] = outer.attempts


class _Before(NamedTuple):
    """What the balancer chooses from: calls in flight by replica, and the reason for its choice."""

    loads: dict[Any, int]
    reason: str


def _begin_route(call: Call) -> None:
    balancer = call.arguments["self"]
    loads = dict(balancer._inflight_requests)
    earlier = balancer._request_id_to_server.get(call.arguments["request_id"])
    if len(loads) == 1:
        reason = "only_one"
    elif earlier in loads:
        reason = "sticky"
    else:
        reason = "hash" if getattr(balancer, "_full_determinism", False) else "least_loaded"
    call.state = _Before(loads, reason)


def _end_route(call: Call, result: Any) -> None:
    before: _Before | None = call.state
    active = recorder.active()
    if before is None or active is None or not isinstance(result, tuple):
        call.event = None
        return
    server = plain(result[0])
    in_flight = before.loads.get(server)
    least = min(before.loads.values(), default=0)
    if in_flight is None or (in_flight <= least and active.config.events.detail_share < 1):
        call.event = None
        return
    # An instant: the choice takes microseconds.
    call.begin_ns = None
    call.extra = {
        "request_id": plain(call.arguments["request_id"]),
        "server": server,
        "reason": before.reason,
        "in_flight": in_flight,
        # Mostly the same.
        **({} if least == in_flight else {"least_in_flight": least}),
        "loads": list(before.loads.values()),
    }
    balancer, servers = call.arguments["self"], list(before.loads)
    if servers != _named.get(balancer):
        _named[balancer] = servers
        call.extra["servers"] = [plain(server) for server in servers]


PROBES = (
    _probe(
        "engine_call",
        f"{_CLIENT}.generate",
        reads=("request_id", "prompt_ids"),
        enter=_begin_engine_call,
        leave=_end_engine_call,
    ),
    _probe(
        "engine_call",
        *(f"{client}.generate" for client in _REPEATING_CLIENTS),
        reads=("request_id", "prompt_ids"),
        enter=_begin_repeating_call,
        leave=_end_engine_call,
        # It is in one of the two modules.
        optional=True,
    ),
    _probe(
        None,
        # verl 0.8 makes the id of a request to the server in `generate` (llm_server.py:210).
        f"{_CLIENT}._vllm_request_id",
        f"{_MODULE}:uuid4",
        leave=_keep_engine_request_id,
        lost="which request of an engine a generate call is",
    ),
    _probe("server_acquire", f"{_CLIENT}._acquire_server", leave=_end_acquire),
    _probe(
        "server_route",
        *(f"{balancer}.acquire_server" for balancer in _BALANCERS),
        reads=("request_id",),
        enter=_begin_route,
        leave=_end_route,
        optional=True,
    ),
)
