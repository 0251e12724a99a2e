"""Which steps and rows an analysis covers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

if TYPE_CHECKING:
    from verl_profiler.reading.tables.tables import Tables

# First and last step, both included; None for all.
Steps = tuple[int, int] | None
Rows = list[dict[str, Any]]
_Row = TypeVar("_Row", bound=Mapping[str, Any])
_Key = TypeVar("_Key", bound=Hashable)

# Steps that means leave out, by run.
LeftOut = Mapping[str, Sequence[int]]
NOTHING: LeftOut = {}

# With fewer finished steps the first one counts, too.
_LEAST = 3


class _Kept(tuple[int, int]):  # noqa: SLOT001  a tuple with an attribute
    """First and last step of several runs, of which some runs' warm-up lies between them."""

    without: LeftOut

    def __new__(cls, first: int, last: int, without: LeftOut) -> Self:
        made = super().__new__(cls, (first, last))
        made.without = without
        return made


def in_steps(steps: Steps, column: str = "step") -> str:
    """Return the SQL condition for `steps`; the run is in the column beside."""
    if steps is None:
        return "true"
    condition = f"{column} BETWEEN {int(steps[0])} AND {int(steps[1])}"
    if isinstance(steps, _Kept):
        run = column.removesuffix("step").removesuffix("consumed_") + "run"
        quoted = {name: name.replace("'", "''") for name in steps.without}
        pairs = ", ".join(
            f"('{quoted[name]}', {step})" for name, left in steps.without.items() for step in left
        )
        condition = f"({condition} AND ({run}, {column}) NOT IN ({pairs}))"
    return condition


def steps_of(steps: Steps, run: str) -> Steps:
    """Return the first and last of `steps` of one run."""
    if not isinstance(steps, _Kept):
        return steps
    first = max((step + 1 for step in steps.without.get(run, ())), default=steps[0])
    return first, steps[1]


def warm_up(finished: Sequence[int], steps: Steps = None) -> list[int]:
    """Return the steps that means, findings, what-if and comparisons leave out: the first of a run.

    Workers, engines and caches warm up in it.  It counts where the user names steps, and where
    fewer than two others have finished.

    Args:
        finished: The run's finished training steps.
        steps: The steps that the user selected.
    """
    return [min(finished)] if steps is None and len(finished) >= _LEAST else []


def after_warm_up(tables: Tables, steps: Steps = None) -> Steps:
    """Return the steps without each run's warm-up; see `warm_up`."""
    finished = _finished(tables)
    without = warm_ups(finished, steps)
    if not without:
        return steps
    every = {row["step"] for row in finished}
    first = min(row["step"] for row in steady(finished, without))
    inside = {run: left for run, left in without.items() if left[-1] >= first}
    return _Kept(first, max(every), inside) if inside else (first, max(every))


def left_out(tables: Tables, steps: Steps = None) -> LeftOut:
    """Return the steps that means leave out; see `warm_up`."""
    return warm_ups(_finished(tables), steps)


def warm_ups(rows: Iterable[Mapping[str, Any]], steps: Steps = None) -> LeftOut:
    """Return the warm-up of each run, where it has one.

    Args:
        rows: Each with a run and a finished training step.
        steps: The steps that the user selected.
    """
    finished: dict[str, set[int]] = {}
    for row in rows:
        finished.setdefault(row["run"], set()).add(row["step"])
    found = {run: warm_up(sorted(own), steps) for run, own in finished.items()}
    return {run: left for run, left in found.items() if left}


def steady(rows: Sequence[_Row], left_out: LeftOut) -> list[_Row]:
    """Return the rows of the steps that means cover, or all where there are no others."""
    kept = [row for row in rows if row["step"] not in left_out.get(row["run"], ())]
    return kept or [*rows]


def named(left_out: LeftOut, rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the steps that are left out of the runs of these rows."""
    runs = {row["run"] for row in rows}
    return sorted({step for run in runs for step in left_out.get(run, ())})


def by_run(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    """Return the rows of each run."""
    return grouped(rows, "run")


def grouped(rows: Iterable[_Row], column: str, *more: str) -> dict[Any, list[_Row]]:
    """Return the rows by the value of a column, or by those of several as a tuple."""
    found: dict[Any, list[_Row]] = {}
    for row in rows:
        key = (row[column], *(row[name] for name in more)) if more else row[column]
        found.setdefault(key, []).append(row)
    return found


def nested(rows: Iterable[Mapping[str, Any]], value: str, *columns: str) -> dict[Any, Any]:
    """Return a column of each row by the values of others, one dict in the other."""
    found: dict[Any, Any] = {}
    for row in rows:
        own = found
        for name in columns[:-1]:
            own = own.setdefault(row[name], {})
        own[row[columns[-1]]] = row[value]
    return found


def summed(rows: Iterable[Mapping[str, Any]], value: str, *columns: str) -> dict[Any, float]:
    """Return the sum of a column by the values of others, the largest first; None counts as 0."""
    sums = {
        key: sum(row[value] or 0.0 for row in own) for key, own in grouped(rows, *columns).items()
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def spread(lengths: Mapping[_Key, float], count: int) -> list[_Key]:
    """Choose so many in their order: the longest half, and others spread evenly."""
    longest = sorted(lengths, key=lambda key: -lengths[key])[: (count + 1) // 2]
    chosen = {*longest}
    rest = [key for key in lengths if key not in chosen]
    wanted = min(count - len(longest), len(rest))
    distance = (len(rest) - 1) / max(1, wanted - 1)
    chosen |= {rest[round(place * distance)] for place in range(wanted)}
    return [key for key in lengths if key in chosen]


def _finished(tables: Tables) -> Rows:
    return tables.rows("SELECT run, step FROM steps WHERE finished AND step > 0 ORDER BY run, step")


def estimated(table: str) -> str:
    """Return the SQL of a table of details in which each row is as often as it counts.

    Where the details of one request in `sampled` were recorded, its rows stand for those of as many
    requests: counts, sums, means and quantiles over the result are Horvitz-Thompson estimates of all
    requests'.  Where nothing is sampled, it is the table.

    Args:
        table: `turns`, `tool_calls`, `engine_calls`, `server_routes` or `event_fields`.
    """
    return (
        f"(SELECT * FROM {table} UNION ALL SELECT * EXCLUDE (copy) FROM "
        f"(SELECT *, unnest(range(1, sampled)) AS copy FROM {table} WHERE sampled > 1))"
    )


def rows_of(
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool | None = None,
) -> str:
    """Return the SQL condition for a selection.

    Args:
        steps: First and last step; None for all.
        worker: The rank of an agent-loop worker (`worker_<rank>`, restarted ones too); None for all.
        validate: True for validation alone, False for training alone, None for both.
    """
    conditions = [in_steps(steps)]
    if worker is not None:
        conditions.append(f"regexp_full_match(name, 'worker_{int(worker)}(-\\d+)?')")
    if validate is not None:
        conditions.append(f"validate = {bool(validate)}")
    return " AND ".join(conditions)
