"""What a view is, and which part of a run it is to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.requests import PERCENTILES
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Choice", "NothingToDraw", "Sheets", "View", "asking", "column", "known", "marks"]

# The rows of each table that a plot draws, by the table's name; the plot's own table is first.
Sheets = Mapping[str, Rows]


class NothingToDraw(Exception):  # noqa: N818
    """The chosen part of the run has no data for this plot; the message says which and why."""


@dataclass(frozen=True)
class Choice:
    """Which part of a run to show.

    Args:
        run: The run's label, for the line below the title.
        steps: First and last; None for all.
        worker: The rank of an agent-loop worker; None for all.
        validate: Validation instead of training.
        percentiles: Those to mark, where a plot marks any.
        count: How many rows, where a plot lists the slowest.
    """

    run: str = ""
    steps: Steps = None
    worker: int | None = None
    validate: bool = False
    percentiles: tuple[float, ...] = PERCENTILES
    count: int = 20

    def words(self) -> str:
        """Say which part this is: `my-run, steps 3 to 10, worker 2, validation`."""
        parts = [self.run] if self.run else []
        if self.steps is None:
            parts.append("all steps")
        elif self.steps[0] == self.steps[1]:
            parts.append(f"step {self.steps[0]}")
        else:
            parts.append(f"steps {self.steps[0]} to {self.steps[1]}")
        if self.worker is not None:
            parts.append(f"worker {self.worker}")
        parts.append("validation" if self.validate else "training")
        return ", ".join(parts)


@dataclass(frozen=True)
class View:
    """A figure: the tables that it shows, and how it draws them.

    Args:
        question: What it answers, in one sentence.
        tables: Gives the rows by table name; the table named like the plot comes first.
        draw: Draws those rows, of one run, and computes nothing that they lack.
        empty: Why there may be nothing to draw, and what to do about it.
        takes: Which of `worker`, `validate`, `percentiles` and `count` it heeds.
    """

    question: str
    tables: Callable[[Tables, Choice], dict[str, Rows]]
    draw: Callable[[Sheets, Choice], Figure]
    empty: str
    takes: frozenset[str] = field(default_factory=frozenset)

    def figure(self, sheets: Sheets, choice: Choice) -> Figure:
        """Draw the rows of one run.

        Raises:
            NothingToDraw: The first table has no rows.
        """
        from verl_profiler.render.figure import settings

        if not next(iter(sheets.values()), []):
            raise NothingToDraw(f"{choice.words()}: {self.empty}")
        with settings():
            return self.draw(sheets, choice)


def asking(*analyses: Callable[..., Rows]) -> Callable[[Tables, Choice], dict[str, Rows]]:
    """Give the tables of these analyses, each narrowed by what it heeds of the choice."""

    def tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
        chosen = {"worker": choice.worker, "validate": choice.validate}
        return {
            analysis.__name__: analysis(
                tables,
                choice.steps,
                **{key: chosen[key] for key in chosen if key in (analysis.__kwdefaults__ or {})},
            )
            for analysis in analyses
        }

    return tables


def column(rows: Rows, name: str, factor: float = 1.0) -> list[float]:
    """Return a column's numbers; None becomes 0, which draws nothing."""
    return [(row[name] or 0) * factor for row in rows]


def marks(rows: Rows, name: str, factor: float = 1.0) -> list[float]:
    """Return a column's numbers; None becomes a number that nothing is drawn for."""
    return [math.nan if row[name] is None else row[name] * factor for row in rows]


def known(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column that are there."""
    return [row[name] for row in rows if row[name] is not None]
