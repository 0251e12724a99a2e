"""Every question that has a view, in reading order.

from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice

view = VIEWS["request_duration_cdf"]
choice = Choice(run="my-run", steps=(3, 10))
picture = view.picture(view.analysis(run.tables, choice), choice, "png")

The columns of every table of the analyses are described here too.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    request_tables,
    requests,
    rollouts,
    routing,
    staleness,
    steps,
    stragglers,
    tools,
    tq,
    tq_tables,
    training,
    transfers,
    turns,
    workers,
)
from verl_profiler.views.view import View

__all__ = ["COLUMNS", "VIEWS"]

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

# What each column of a table holds, by the table's name.  The view `slowest_requests` shows another
# table than the analysis of that name.
COLUMNS: dict[str, Mapping[str, str]] = {
    **{name: view.columns for name, view in VIEWS.items()},
    **{
        name: columns
        for topic in (
            critical_path,
            device_use,
            devices,
            engine_load,
            engines,
            memory,
            processes,
            request_tables,
            rollouts,
            steps,
            stragglers,
            tools,
            tq_tables,
            transfers,
            turns,
            workers,
        )
        for name, columns in topic.TABLES.items()
    },
}
