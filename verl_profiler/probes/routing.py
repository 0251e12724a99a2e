"""Which replica the load balancer chose for a generate call, why, and how loaded each was; in its process.

The balancer receives no step, so all its lines are in one file.  Where only a share of the requests is
recorded in detail, choices that follow from the client's `server_acquire` alone are left out.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.values import plain
from verl_profiler.recording import recorder
from verl_profiler.recording.call import Call

# Not of subclasses that choose by rules of their own.
_BALANCERS = (
    "verl.workers.rollout.router:GlobalRequestLoadBalancer",
    # verl before 0.9.1.
    "verl.workers.rollout.llm_server:GlobalRequestLoadBalancer",
)

# The replicas in the order of `loads`, as recorded last for each balancer.
_named: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


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
    Probe(
        "server_route",
        "rollout",
        tuple(f"{balancer}.acquire_server" for balancer in _BALANCERS),
        reads=("request_id",),
        enter=_begin_route,
        leave=_end_route,
        optional=True,
    ),
)
