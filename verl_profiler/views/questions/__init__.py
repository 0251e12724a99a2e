"""Every question that has a view, by topic and in reading order.

from verl_profiler.render.charts import render
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

view = VIEWS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
picture = render(view.spec(view.analysis(run.tables, choice), choice), "png")
"""

from __future__ import annotations

from verl_profiler.views.questions import (
    critical_path,
    devices,
    engine_timeline,
    memory,
    requests,
    rollouts,
    steps,
)
from verl_profiler.views.view import View

__all__ = ["TOPICS", "VIEWS"]

_MODULES = {
    "Steps": (steps, critical_path),
    "Devices and training": (devices,),
    "Rollout": (rollouts, requests, engine_timeline),
    "Data transfer": (),
    "Memory and event loops": (memory,),
}
TOPICS: dict[str, tuple[View, ...]] = {
    topic: tuple(
        each for module in modules for each in vars(module).values() if isinstance(each, View)
    )
    for topic, modules in _MODULES.items()
}
VIEWS: dict[str, View] = {view.name: view for views in TOPICS.values() for view in views}
