"""Every question that has a view, in reading order.

from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

view = VIEWS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
picture = view.picture(view.analysis(run.tables, choice), choice, "png")
"""

from __future__ import annotations

from verl_profiler.views.questions import (
    critical_cycle,
    critical_path,
    device_use,
    devices,
    engine_load,
    engine_time,
    engine_timeline,
    engines,
    memory,
    own_spans,
    pools,
    processes,
    requests,
    rollouts,
    routing,
    staleness,
    steps,
    stragglers,
    tools,
    tq,
    training,
    transfers,
    turns,
    workers,
)
from verl_profiler.views.view import View

__all__ = ["VIEWS"]

VIEWS: dict[str, View] = {
    view.name: view
    for topic in (
        steps,
        critical_path,
        stragglers,
        devices,
        device_use,
        training,
        pools,
        critical_cycle,
        staleness,
        rollouts,
        workers,
        requests,
        turns,
        engines,
        engine_time,
        engine_timeline,
        engine_load,
        routing,
        tools,
        own_spans,
        transfers,
        tq,
        memory,
        processes,
    )
    for view in topic.VIEWS
}
