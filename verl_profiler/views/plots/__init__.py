"""The figures: each is named after the table that it draws, and computes nothing that it lacks.

from verl_profiler.views.plots import PLOTS
from verl_profiler.views.plots.choice import Choice

plot = PLOTS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
figure = plot.figure(plot.tables(run.tables, choice), choice)
"""

from __future__ import annotations

from verl_profiler.views.plots import (
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
    whys,
    workers,
)
from verl_profiler.views.plots.choice import Choice, NothingToDraw, Plot

__all__ = ["PLOTS", "Choice", "NothingToDraw", "Plot"]

# In reading order.
PLOTS: dict[str, Plot] = {
    **steps.PLOTS,
    **whys.PLOTS,
    **shares.PLOTS,
    **rollouts.PLOTS,
    **workers.PLOTS,
    **requests.PLOTS,
    **turns.PLOTS,
    **engines.PLOTS,
    **tools.PLOTS,
    **transfers.PLOTS,
    **tq.PLOTS,
    **memory.PLOTS,
    **processes.PLOTS,
}
