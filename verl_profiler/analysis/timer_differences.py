"""The timers in a console log beside the spans that were recorded of the same steps."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

from verl_profiler.analysis.console_timers import logged_phases
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.json_values import is_object
from verl_profiler.reading.formats.console_steps import LoggedRun
from verl_profiler.reading.tables.tables import Tables

__all__ = ["logged_and_recorded", "timer_differences"]

# A probe reads the clock outside of verl's timer: the span is longer by what is between, which on
# a busy machine may be a time slice.
_PROBE_S = 0.002
_PROBE_SHARE = 0.001
_ROUNDED_S = 0.0005
# Of this many steps that both have, fewer than half agree when the log is that of another run.
_AGREEING = 0.5
_STEP = "step"
_REST = "unaccounted"


def logged_and_recorded(tables: Tables, run: LoggedRun, steps: Steps, problems: list[str]) -> Rows:
    """Compare each timer in a log with the span that was recorded of it.

    Args:
        tables: Of the recorded run.
        run: From the log.
        steps: Those to compare; all when None.
        problems: Takes a sentence when the log is not that of the recorded run.

    Returns:
        One row per step and timer (`step`, those directly inside it, those outside, and
        `unaccounted`), as the log has them, then those that it lacks: run (the latest that
        recorded the step), step, timer, logged_s, recorded_s (None where there is none),
        difference_s (recorded minus logged), reason (of the difference), explained (the reason is
        known).
    """
    logged = _logged(run, steps)
    recorded = _recorded(tables, steps)
    logged_values = _logged_values(tables, steps)
    rounded = {line.step: line.rounded for line in run.lines}
    recorded_steps = {step for step, _ in recorded}
    rows: Rows = []
    for step, timer in _ordered(logged, recorded):
        logged_s = logged.get((step, timer))
        span = recorded.get((step, timer))
        recorded_s = None if span is None else span["recorded_s"]
        difference_s = None if logged_s is None or recorded_s is None else recorded_s - logged_s
        if span is None:
            reason, explained = _not_recorded(step, timer, recorded_steps)
        elif difference_s is None:
            reason, explained = _not_logged(step, timer, rounded)
        elif timer == _REST:
            reason, explained = _rest_difference(
                difference_s, {key: row for key, row in recorded.items() if key[0] == step}, logged
            )
        else:
            reason, explained = _difference(
                difference_s,
                span["count"],
                logged_s or 0.0,
                logged_values.get((step, timer)),
                rounded=rounded[step],
            )
        rows.append(
            {
                "run": None if span is None else span["run"],
                "step": step,
                "timer": timer,
                "logged_s": logged_s,
                "recorded_s": recorded_s,
                "difference_s": difference_s,
                "reason": reason,
                "explained": explained,
            }
        )
    _check_same_run(rows, run, problems)
    return rows


def timer_differences(rows: Rows) -> Rows:
    """Bring the rows of `logged_and_recorded` together by timer.

    Returns:
        One row per timer: timer, steps (that both have), logged_s and recorded_s (sums over them),
        difference_s (of the sums), largest_s (the largest difference of a step, with its sign),
        largest_step, reason (of that step, or of the first where no step has both), explained (in
        every step), unexplained_steps.
    """
    by_timer: dict[str, Rows] = {}
    for row in rows:
        by_timer.setdefault(row["timer"], []).append(row)
    found: Rows = []
    for timer, each in sorted(by_timer.items(), key=lambda item: item[0] == _REST):
        both = [row for row in each if row["difference_s"] is not None]
        worst = max(
            both, key=lambda row: (not row["explained"], abs(row["difference_s"])), default=each[0]
        )
        logged_s, recorded_s = (
            sum(row[key] for row in both) if both else None for key in ("logged_s", "recorded_s")
        )
        found.append(
            {
                "timer": timer,
                "steps": len(both),
                "logged_s": logged_s,
                "recorded_s": recorded_s,
                "difference_s": None
                if logged_s is None or recorded_s is None
                else recorded_s - logged_s,
                "largest_s": worst["difference_s"],
                "largest_step": worst["step"],
                "reason": worst["reason"],
                "explained": all(row["explained"] for row in each),
                "unexplained_steps": sum(not row["explained"] for row in each),
            }
        )
    return found


def _logged(run: LoggedRun, steps: Steps) -> dict[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {
        (line.step, _STEP): line.values["timing_s/step"]
        for line in run.lines
        if "timing_s/step" in line.values
    }
    found |= {(row["step"], row["phase"]): row["duration_s"] for row in logged_phases(run)}
    return {
        key: value
        for key, value in found.items()
        if steps is None or steps[0] <= key[0] <= steps[1]
    }


def _recorded(tables: Tables, steps: Steps) -> dict[tuple[int, str], Any]:
    """Return the trainer's spans that verl has a timer for, by step and name."""
    rows = tables.rows(
        f"""
        WITH latest AS (
            SELECT step, arg_max(run, begin_us) AS run FROM steps
            WHERE step > 0 AND {in_steps(steps)} GROUP BY step
        ), timers AS (
            SELECT run, step, phase AS timer, duration_us, parent = 'step' AS inside FROM phases
            WHERE NOT validate AND (parent = 'step' OR parent IS NULL)
                AND phase NOT IN ('init', 'validation', 'sleep_replicas', 'sample_wait')
            UNION ALL
            SELECT run, step, 'unaccounted', unaccounted_us, true FROM steps WHERE finished
        )
        SELECT run, step, timer, sum(duration_us) / 1e6 AS recorded_s, count(*) AS count,
            coalesce(bool_or(inside), false) AS inside
        FROM timers JOIN latest USING (run, step) GROUP BY run, step, timer ORDER BY step, timer
        """
    )
    return {(row["step"], row["timer"]): row for row in rows}


def _parsed(metrics: str | None) -> Any:
    try:
        return json.loads(metrics or "null")
    except RecursionError:
        return None


def _logged_values(tables: Tables, steps: Steps) -> dict[tuple[int, str], float]:
    """Return what verl passed to its loggers, by step and timer."""
    rows = tables.rows(
        "SELECT step, extra->'$.metrics' AS metrics FROM events "
        f"WHERE event = 'metrics' AND {in_steps(steps)}"
    )
    logged_values = [(row["step"], _parsed(row["metrics"])) for row in rows]
    return {
        (step, name.removeprefix("timing_s/")): value
        for step, metrics in logged_values
        # A damaged line may hold anything.
        if is_object(metrics)
        for name, value in metrics.items()
        if name.startswith("timing_s/") and isinstance(value, (int, float))
    }


def _ordered(
    logged: Iterable[tuple[int, str]], recorded: Iterable[tuple[int, str]]
) -> list[tuple[int, str]]:
    """Sort by step, and within it as verl lists its timers, then those that it does not list."""
    places = {key: place for place, key in enumerate(dict.fromkeys((*logged, *recorded)))}
    return sorted(places, key=lambda key: (key[0], key[1] == _REST, places[key]))


def _not_recorded(step: int, timer: str, recorded_steps: set[int]) -> tuple[str, bool]:
    if step not in recorded_steps:
        return "this step was not recorded", True
    if timer == _REST:
        return "the recorded step has no end", True
    return "no span of this name was recorded in this step", False


def _not_logged(step: int, timer: str, rounded: dict[int, bool]) -> tuple[str, bool]:
    if step not in rounded:
        return "this step is not in the log", True
    if timer == "dump_rollout_generations":
        return "verl writes its line before this timer ends", True
    return "verl does not print this timer", True


def _rest_difference(
    difference_s: float, recorded: Mapping[tuple[int, str], Any], logged: Container[tuple[int, str]]
) -> tuple[str, bool]:
    """Explain the difference of what no timer covers, by the spans that verl does not print."""
    inside = {key: row for key, row in recorded.items() if row["inside"]}
    more = {key[1]: row["recorded_s"] for key, row in inside.items() if key not in logged}
    left_s = difference_s + sum(more.values())
    if abs(left_s) > _PROBE_S * len(inside):
        return "not known: the timers above differ, or are elsewhere", False
    if more:
        return f"the spans have {', '.join(more)}, which verl does not print", True
    return "remainder of the other differences", True


def _difference(
    difference_s: float,
    count: int,
    logged_s: float,
    told_s: float | None,
    *,
    rounded: bool,
) -> tuple[str, bool]:
    """Explain a difference."""
    allowed_s = _PROBE_S * count + _PROBE_SHARE * logged_s + (_ROUNDED_S if rounded else 0.0)
    if abs(difference_s) <= allowed_s:
        words = "the span lies around verl's timer" if difference_s >= 0 else "the same"
        if rounded:
            words += "; the log has three decimals"
        return words + (f"; {count} spans, which verl adds up" if count > 1 else ""), True
    if told_s is not None and abs(told_s - logged_s) <= _ROUNDED_S:
        return "not known: verl's own timer differs from the span", False
    return "not known; is this the log of the recorded run?", False


def _check_same_run(rows: Rows, run: LoggedRun, problems: list[str]) -> None:
    both = [row for row in rows if row["difference_s"] is not None and row["timer"] == _STEP]
    if not both:
        problems.append(f"{run.label} and the recorded run have no step in common.")
    elif sum(row["explained"] for row in both) < _AGREEING * len(both):
        problems.append(
            f"{run.label} seems to be the log of another run: "
            f"{sum(not row['explained'] for row in both)} of {len(both)} steps differ."
        )
