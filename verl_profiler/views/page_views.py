"""The views of a run as the report page shows them: the chart of each, its table, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.reader import Run
from verl_profiler.render.charts import Spec
from verl_profiler.render.frames import frame
from verl_profiler.views.columns import page_view
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice, NothingToDraw, View, of_run

__all__ = ["page_views"]


def page_views(
    run: Run, steps: Steps, kept: Callable[[Rows], Rows], known: Mapping[str, Rows]
) -> dict[str, dict[str, Any]]:
    """Return what the page shows of each view.

    Args:
        run: An open run.
        steps: First and last step; all when None.
        kept: Names the step of rows by its place on the page, and bounds their number.
        known: Rows of analyses of these steps, by name.

    Returns:
        By the view's name: question; charts, one per run that has one; missing, why another run has
        none; table, the rows of its own table; columns, with name, title, format and sentence each.
    """
    return {name: _shown(view, run, steps, kept, known) for name, view in VIEWS.items()}


def _shown(
    view: View,
    run: Run,
    steps: Steps,
    kept: Callable[[Rows], Rows],
    known: Mapping[str, Rows],
) -> dict[str, Any]:
    choice = Choice(steps=steps)
    data = view.analysis(run.tables, choice, known)
    charts: list[Spec] = []
    missing: list[str] = []
    for label in run.labels:
        try:
            charts.append(view.spec(of_run(data, label), replace(choice, run=label)))
        except NothingToDraw as reason:
            missing.append(str(reason))
    rows = data[view.name]
    if rows and "step" in rows[0]:
        rows = kept(rows)
    table = frame(rows, drop=("run", "step") if len(run.labels) == 1 else ("step",))
    return page_view(view.table or view.name, view.question, table, charts, missing)
