"""Every question that has a view, by topic and in reading order.

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

__all__ = ["TOPICS", "VIEWS"]

_MODULES = {
    "Steps": (steps, critical_path, stragglers),
    "Devices and training": (*(devices, device_use, training, pools, critical_cycle, staleness),),
    "Rollout": (
        *(rollouts, workers, requests, turns, engines, engine_time, engine_timeline),
        *(engine_load, routing, tools, own_spans),
    ),
    "Data transfer": (transfers, tq),
    "Memory and event loops": (memory, processes),
}
TOPICS: dict[str, tuple[View, ...]] = {
    topic: tuple(
        each for module in modules for each in vars(module).values() if isinstance(each, View)
    )
    for topic, modules in _MODULES.items()
}
VIEWS: dict[str, View] = {view.name: view for views in TOPICS.values() for view in views}
