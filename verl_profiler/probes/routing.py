"""Generate calls that the load balancer did not send to the least loaded replica; in its process.

The balancer receives no step, so all its lines are in one file: choices that follow from the client's
`server_acquire` alone are not recorded again.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.values import plain
from verl_profiler.recording.call import Call

__all__ = ["PROBES"]

# Not of subclasses that choose by rules of their own.
_BALANCER = "verl.workers.rollout.router:GlobalRequestLoadBalancer"


def _begin_route(call: Call) -> None:
    balancer = call.arguments["self"]
    is_sticky = call.arguments["request_id"] in balancer._request_id_to_server
    call.state = balancer, is_sticky, min(balancer._inflight_requests.values(), default=0)


def _end_route(call: Call, result: Any) -> None:
    if call.state is None or not isinstance(result, tuple):
        call.event = None
        return
    balancer, is_sticky, least = call.state
    # verl has counted this call by now.
    in_flight = balancer._inflight_requests[result[0]] - 1
    if in_flight <= least:
        call.event = None
        return
    # An instant: the choice takes microseconds.
    call.begin_ns = None
    call.extra = {
        "request_id": plain(call.arguments["request_id"]),
        "server": plain(result[0]),
        "reason": "sticky" if is_sticky else "hash",
        "in_flight": in_flight,
        "least_in_flight": least,
    }


PROBES = (
    Probe(
        "server_route",
        "rollout",
        (f"{_BALANCER}.acquire_server",),
        reads=("request_id",),
        enter=_begin_route,
        leave=_end_route,
        optional=True,
    ),
)
