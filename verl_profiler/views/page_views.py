"""The views of a run as the report page shows them: the chart of each, its table, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.reader import Run
from verl_profiler.render.charts import Spec
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.columns import page_view
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice, NothingToDraw, View, of_run

__all__ = ["charts_of", "page_views"]

_Run = TypeVar("_Run")


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


def charts_of(runs: Iterable[_Run], draw: Callable[[_Run], Spec]) -> tuple[list[Spec], list[str]]:
    """Return the charts of runs, and why the others have none."""
    charts: list[Spec] = []
    missing: list[str] = []
    for run in runs:
        try:
            charts.append(draw(run))
        except NothingToDraw as reason:
            missing.append(short_text(str(reason)))
    return charts, missing


def _shown(
    view: View,
    run: Run,
    steps: Steps,
    kept: Callable[[Rows], Rows],
    known: Mapping[str, Rows],
) -> dict[str, Any]:
    choice = Choice(steps=steps)
    data = view.analysis(run.tables, choice, known)
    charts, missing = charts_of(
        run.labels, lambda label: view.spec(of_run(data, label), replace(choice, run=label))
    )
    rows = data[view.name]
    if rows and "step" in rows[0]:
        rows = kept(rows)
    table = frame(rows, drop=("run", "step") if len(run.labels) == 1 else ("step",))
    return page_view(view.table or view.name, view.question, table, charts, missing)
