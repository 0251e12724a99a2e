"""What a view is, and which part of a run it is to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import Series, Spec
from verl_profiler.render.frames import short_text
from verl_profiler.render.text import short

# In every drawn plot, so that it may be replaced.
MARK = "verl-profiler plot"

# The rows of each table that a plot draws, by the table's name; the plot's own table is first.
DataTables = Mapping[str, Rows]
_Run = TypeVar("_Run")
_NARROWING = frozenset({"worker", "validate"})


class NothingToDraw(Exception):  # noqa: N818
    """The chosen part of the run has no data for this plot; the message names it and the reason."""


@dataclass(frozen=True)
class Choice:
    """Which part of a run to show.

    Args:
        run: The run's label, for the line below the title.
        steps: First and last; None for all.
        worker: The rank of an agent-loop worker; None for all.
        validate: Validation instead of training.
    """

    run: str = ""
    steps: Steps = None
    worker: int | None = None
    validate: bool = False

    def text(self) -> str:
        """Return which part this is: `my-run, steps 3 to 10, worker 2, validation`."""
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
    """A question to a run: the rows that answer it, and how every output shows them.

    `columns.md` describes its columns, and `plots.md` how to read it.

    `plot --list`, the plot, its tables as JSON or CSV, the sections of the report page and
    the list of plots are made of views; `view` makes them.

    Args:
        name: Of the view, and of its own table.
        question: One sentence with a question mark.
        analyses: Give its tables; its own comes first, and the others have the names of their functions.
        chart: Makes a Vega-Lite specification of the rows of one run (`render.charts.chart`), and
            computes nothing that they lack.
        empty: Why there may be no rows, and what to do about it.
        table: Whose columns its table has, where that is no table of its name.
        example: Options of the example command.
        only_of: `synchronous` or `asynchronous`, where it has no rows of other runs by design.
        default_steps: What it shows where no steps are chosen; None for all.
        kept: A column; of its own table it shows the rows that have it.
    """

    name: str
    question: str
    analyses: tuple[Callable[..., Rows], ...]
    chart: Callable[[DataTables, Choice], Spec]
    empty: str
    table: str = ""
    example: str = ""
    only_of: str = ""
    default_steps: Callable[[Tables], Steps] | None = None
    kept: str = ""

    @property
    def takes(self) -> frozenset[str]:
        """Return which of `worker` and `validate` all of its analyses honor."""
        return _NARROWING.intersection(*(each.__kwdefaults__ or () for each in self.analyses))

    def analysis(
        self, tables: Tables, choice: Choice, known: Mapping[str, Rows] | None = None
    ) -> dict[str, Rows]:
        """Return the rows of each table, by its name.

        Args:
            tables: Of the runs.
            choice: What to show.
            known: Rows of analyses of the same steps that were not narrowed.
        """
        found: dict[str, Rows] = {}
        default = self.default_steps
        steps = choice.steps or (default(tables) if default is not None else None)
        for analysis in self.analyses:
            usual = analysis.__kwdefaults__ or {}
            narrowed = {key: getattr(choice, key) for key in _NARROWING if key in usual}
            name = analysis.__name__
            found[name if found else self.name] = (
                known[name]
                if known and name in known and narrowed.items() <= usual.items()
                else analysis(tables, steps, **narrowed)
            )
        found[self.name] = [row for row in found[self.name] if not self.kept or row[self.kept]]
        return found

    def spec(self, data: DataTables, choice: Choice) -> Spec:
        """Return the chart of the rows of one run as a Vega-Lite specification.

        Raises:
            NothingToDraw: The first table has no rows.
        """
        if not next(iter(data.values()), None):
            raise NothingToDraw(f"{choice.text()}: {self.empty}")
        return self.chart(data, choice)

    def charts(
        self, data: DataTables, labels: Iterable[str], choice: Choice
    ) -> tuple[list[Spec], list[str]]:
        """Return the charts of runs, and why the others have none."""
        return charts_of(
            labels, lambda label: self.spec(of_run(data, label), replace(choice, run=label))
        )


def view(
    name: str, question: str, *analyses: Callable[..., Rows], **more: Any
) -> Callable[[Callable[[DataTables, Choice], Spec]], View]:
    """Make a `View` of the function that draws its chart; for the arguments see there."""
    return lambda chart: View(name, question, analyses, chart, **more)


def of_run(data: DataTables, label: str) -> dict[str, Rows]:
    """Return the rows of one run; tables without runs are of each."""
    return {
        name: [row for row in rows if row.get("run", label) == label] for name, rows in data.items()
    }


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


def column(rows: Rows, name: str) -> list[float]:
    """Return a column's numbers; None becomes 0, which draws nothing."""
    return [row[name] or 0 for row in rows]


def components(rows: Rows, parts: Iterable[str], colors: Mapping[str, str]) -> list[Series]:
    """Return what a bar per row is stacked of: its components, a column of seconds each."""
    return [(part, column(rows, f"{part}_s"), colors[part]) for part in parts]


def unfinished_text(count: int) -> str:
    """Return how many unfinished ones a chart leaves out, to be appended; empty for none."""
    return f"; {count:,} unfinished ones left out" if count else ""


def at_steps(rows: Rows, name: str, steps: Sequence[int]) -> list[float | None]:
    """Return a column's number at each of these steps; None where no row has it."""
    values = {row["step"]: row[name] for row in rows}
    return [values.get(step) for step in steps]


def known(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column that are there."""
    return [row[name] for row in rows if row[name] is not None]


def request_names(rows: Rows) -> list[str]:
    """Return a name for the bar of each request: its id, its worker and, if they have several, its step."""
    several = len({row["step"] for row in rows}) > 1
    return [
        f"{(row['request_id'] or '(no id)')[:8]}  {short(row['name'], 14)}"
        + (f"  step {row['step']}" if several else "")
        for row in rows
    ]
