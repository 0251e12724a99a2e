"""Every question that has a view, in reading order.

from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

view = VIEWS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
figure = view.figure(view.analysis(run.tables, choice), choice)
"""

from __future__ import annotations

from verl_profiler.views.questions import (
    critical_cycle,
    critical_path,
    devices,
    engine_load,
    engine_time,
    engines,
    memory,
    own_spans,
    processes,
    requests,
    rollouts,
    routing,
    shares,
    staleness,
    steps,
    stragglers,
    tools,
    tq,
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
        critical_cycle,
        staleness,
        shares,
        rollouts,
        workers,
        requests,
        turns,
        engines,
        engine_time,
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
