"""The figures: each is named after the table that it draws, and computes nothing that it lacks.

from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

plot = VIEWS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
figure = plot.figure(plot.tables(run.tables, choice), choice)
"""

from __future__ import annotations

from verl_profiler.views.questions import (
    critical_path,
    engines,
    memory,
    processes,
    requests,
    rollouts,
    shares,
    steps,
    tools,
    tq,
    transfers,
    turns,
    workers,
)
from verl_profiler.views.view import Choice, NothingToDraw, View

__all__ = ["VIEWS", "Choice", "NothingToDraw", "View"]

# In reading order.
VIEWS: dict[str, View] = {
    **steps.VIEWS,
    **critical_path.VIEWS,
    **shares.VIEWS,
    **rollouts.VIEWS,
    **workers.VIEWS,
    **requests.VIEWS,
    **turns.VIEWS,
    **engines.VIEWS,
    **tools.VIEWS,
    **transfers.VIEWS,
    **tq.VIEWS,
    **memory.VIEWS,
    **processes.VIEWS,
}
