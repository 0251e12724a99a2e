"""The differences between two sides of a comparison: metrics, settings, names that only one has, conditions.

What `diff --fail-if` takes, a metric, a direction, and a change or a limit:

step.p50 > +5%             B's median step is significantly more than 5 % above A's
tool_call:search.p95 > +0.5s
generated_tokens_per_s < -10%
step.p50 > 90s             B's median step is above 90 s, regardless of A's
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from statistics import median
from typing import Any

from verl_profiler.analysis.compare.comparison import (
    ALPHA,
    Change,
    Metric,
    adjusted,
    change,
    step_of,
)
from verl_profiler.analysis.compare.step_metrics import (
    NOT_COMPARED,
    NOT_PHASES,
    PER_EVENT,
    PER_STEP,
)
from verl_profiler.analysis.intervals import difference_at_equal, slope
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.errors import ReadingError
from verl_profiler.events.json_values import is_list, is_mapping
from verl_profiler.events.redaction import OMITTED, recorded_command, recorded_values

# Compared by default, by rows per step or once per step.  Each additional
# metric reduces the statistical power for all, so none of these is redundant.
_ONCE = {"step": ("mean", "p50")}
_MANY = {
    "request": ("p50", "p95", "max"),
    "engine_call": ("p50", "p95", "count"),
    "tool_call": ("p50", "p95", "count"),
    "turn": ("count",),
}
# Maximum number of names compared, those with most time first; user code can create any number.
_COMPARED = 300
_TOKENS = ("update_actor_tokens", "total_tokens", "generated_tokens")
# Settings that differ between any two runs and do not affect steps.
_NAMES = ("output_dir", "experiment_name", "project_name", "default_local_dir", "hydra.run.dir")
# A step stalled if it takes so many times the median, of so many steps.
_STALLED, _LEAST_STEPS = 3.0, 4
_OVERRIDE = re.compile(r"[+~]*(?P<name>[\w.@/-]+)=(?P<value>.*)", re.DOTALL)


@dataclass
class Measured:
    """The metrics of one side.

    Args:
        rows: Those of `step_metrics` for the compared steps, by `comparison.key`.
        steps: The compared steps, of all launches.
        warm_up: The steps left out before them, in the first launch.
        launch: The run's `run.json`; empty where there is none.
        asynchronous: Whether steps train on samples of earlier steps.
        ledger: The rows of `bubble_ledger`, where one of the sides is asynchronous.
        launches: How many there are.
    """

    rows: Rows
    steps: list[int]
    warm_up: list[int]
    launch: Mapping[str, Any]
    asynchronous: bool
    ledger: Rows = field(default_factory=list[dict[str, Any]])
    launches: int = 1

    def stalled(self) -> Rows:
        """Return the steps that take many times the median: step, step_s and median_s."""
        own = [row for row in self.rows if row["name"] == "step" and row["value"] is not None]
        if len(own) < _LEAST_STEPS:
            return []
        median_s = median(row["value"] for row in own)
        return [
            {"step": step_of(row["step"]), "step_s": row["value"], "median_s": median_s}
            for row in own
            if row["value"] > _STALLED * median_s
        ]


class Comparison:
    """The metrics of two sides, by name.

    Args:
        a: The first side.
        b: The second side.
        one_run: Both are ranges of one run.
    """

    def __init__(self, a: Measured, b: Measured, *, one_run: bool) -> None:
        self._sides = a, b
        self._one_run = one_run
        self._named = grouped(a.rows, "name"), grouped(b.rows, "name")
        # Whether each occurs once per step.
        self._once = {
            name: rows[-1]["value"] is not None
            for named in self._named
            for name, rows in named.items()
        }
        self._both = self._named[0].keys() & self._named[1].keys()
        self._not_compared = NOT_COMPARED if a.asynchronous or b.asynchronous else frozenset[str]()
        names, self.left_out = self._names()
        metrics = (self._metric(*each) for each in names)
        self.changes = [change(metric) for metric in metrics if metric.a and metric.b]
        adjusted(self.changes)

    def only_in_one(self) -> list[dict[str, Any]]:
        """List names that only one side has, with their count, and their seconds if they are times, per step."""
        found: list[dict[str, Any]] = []
        for letter, side, named in zip("AB", self._sides, self._named, strict=True):
            for name in sorted(named.keys() - self._both - self._not_compared):
                # A run's last step has no next one.
                if name != "step_to_step":
                    # A log has each timer in each step, as 0 where it did not run.
                    own = [row for row in named[name] if row["value"] != 0.0]
                    count = sum(1.0 if self._once[name] else row["count"] for row in own)
                    spent_s = sum(row["value"] or row["total"] or 0.0 for row in own)
                    found.append(
                        {
                            "run": letter,
                            "name": name,
                            "count": count / len(side.steps),
                            "step_s": spent_s / len(side.steps)
                            if self._unit(name) == "s"
                            else None,
                        }
                    )
        return found

    def _names(self) -> tuple[list[tuple[str, str]], int]:
        """Return name and statistic of what is compared by default, and how many names are left out."""
        names = [
            name
            for name in self._once
            if (name in self._both or name in _MANY) and name not in self._not_compared
        ]
        # Per-step quantities have fixed names.
        fixed = [
            name for name in names if name in _MANY or name == "step" or self._unit(name) != "s"
        ]
        others = sorted({*names} - {*fixed}, key=lambda name: (-self._time_s(name), name))
        kept = fixed + others[: max(_COMPARED - len(fixed), 0)]
        statistics = _ONCE | _MANY
        pairs = [(name, each) for name in kept for each in statistics.get(name, ("mean",))]
        return pairs, len(names) - len(kept)

    def _rows(self, name: str) -> Iterator[Mapping[str, Any]]:
        return (row for named in self._named for row in named.get(name, ()))

    def _unit(self, name: str) -> str:
        return next(row["unit"] for row in self._rows(name))

    def _time_s(self, name: str) -> float:
        return sum(row["value"] or row["total"] or 0.0 for row in self._rows(name))

    def _metric(self, name: str, statistic: str) -> Metric:
        once = self._once[name]
        values: list[dict[int, float]] = []
        for side, named in zip(self._sides, self._named, strict=True):
            if name in named or once:
                column = "value" if once else statistic
                own = ((row["step"], row[column]) for row in named.get(name, ()))
                # A step without calls has no median.
                values.append({step: value for step, value in own if value is not None})
            else:
                # Events that only the other side has.
                has_zero = statistic in ("total", "count")
                values.append(dict.fromkeys(side.steps, 0.0) if has_zero else {})
        return Metric(
            name=f"{name}.{statistic}",
            unit="" if statistic == "count" else self._unit(name),
            a=values[0],
            b=values[1],
            statistic=statistic if once else "mean",
            one_run=self._one_run,
            estimated=any(row.get("estimated") for row in self._rows(name)),
        )

    def drift(self) -> dict[str, Any]:
        """Return by how much the step and the phase that drifts most grow per step, if the step of one run drifts."""
        if not any(each.drift and each.metric.name == "step.mean" for each in self.changes):
            return {}
        once = {
            name: slope({**each.metric.a, **each.metric.b})
            for each in self.changes
            for name, _, statistic in [each.metric.name.rpartition(".")]
            if each.metric.unit == "s" and statistic == "mean" and self._once[name]
        }
        phases = {
            name: each
            for name, each in once.items()
            if name not in NOT_PHASES and not name.endswith("_per_1k_tokens")
        }
        phase = max(phases, key=lambda name: phases[name] * once["step"], default=None)
        return {
            "step_s_per_step": once["step"],
            "phase": phase,
            "phase_s_per_step": None if phase is None else phases[phase],
        }

    def between_steps_s(self) -> float | None:
        """Return by how much the mean time between steps is longer in B, of steps with a next one."""
        means: list[float] = []
        for named in self._named:
            lengths = {row["step"]: row["value"] for row in named.get("step", ())}
            gaps = [row["value"] - lengths[row["step"]] for row in named.get("step_to_step", ())]
            if gaps:
                means.append(sum(gaps) / len(gaps))
        return means[1] - means[0] if len(means) > 1 else None

    def at_equal_tokens(self) -> dict[str, Any]:
        """Return the change of the step at equal tokens per step, if these explain its steps."""
        step = self._metric("step", "mean")
        for name in _TOKENS:
            if name in self._both:
                tokens = self._metric(name, "mean")
                found = difference_at_equal(step.a, step.b, tokens.a, tokens.b)
                if found is not None:
                    low, high = found.interval(1 - ALPHA)
                    return {
                        "tokens": name,
                        "difference": found.value,
                        "low": low,
                        "high": high,
                        "p": found.p,
                    }
        return {}

    def verdict(self, condition: Condition, level: float) -> dict[str, Any]:
        """Return whether a condition holds, at this significance level.

        Raises:
            ReadingError: It has no such metric, or there are too few steps.
        """
        condition.check(
            {name: once for name, once in self._once.items() if name in self._both or not once}
        )
        metric = self._metric(condition.name, condition.statistic)
        if not metric.a or not metric.b:
            raise ReadingError(
                f"{condition.text!r}: no step has enough {condition.name} samples for {condition.statistic}; "
                "p90 needs 10 per step, p95 20 and p99 100.\nUse p50, mean or max instead",
                "too-few-steps",
            )
        found = change(metric)
        p = condition.p(metric) if condition.relative else None
        exceeded = condition.exceeded(found)
        blind = p is not None and p > level and exceeded and not found.testable
        if condition.relative and (p is None or blind):
            raise ReadingError(
                f"{condition.text!r}: {len(metric.a)} and {len(metric.b)} steps are too few to tell such "
                f"a change from noise: {_would_be_seen(found) if blind else ''}mean and p50 over the steps "
                "need 3 of each, p90 10, p95 20, p99 100, and max has no interval.\nCompare more steps, or "
                f"give a limit instead of a change, such as '{metric.name} > {found.a:.3g}"
                f"{metric.unit if metric.unit == 's' else ''}'",
                "too-few-steps",
            )
        return {
            "condition": condition.text,
            "unit": metric.unit,
            "a": found.a,
            "b": found.b,
            "share": found.share,
            "p": p,
            "significant_p": level,
            "exceeded": exceeded,
            "holds": exceeded and (p is None or p <= level),
        }


def _would_be_seen(found: Change) -> str:
    if found.detectable is None or not found.a:
        return ""
    return f"they vary so much that only {found.detectable / abs(found.a):+.0%} would be noticed; "


def configuration(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List differences between two `run.json`: training, settings, versions and overrides.

    A value that neither has recorded may differ, and is listed.
    """
    a, b = _settings(first), _settings(second)
    return [
        {"name": name, "a": a.get(name), "b": b.get(name)}
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name) or a.get(name) == OMITTED
    ]


def _settings(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a launch, by dotted name."""
    found: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if is_mapping(value):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)
        elif not name.endswith(_NAMES):
            found[name] = value

    for part in ("training", "settings", "versions"):
        walk(part, recorded_values(launch.get(part, {}), part))
    command = launch.get("command")
    for argument in recorded_command([*map(str, command)]) if is_list(command) else ():
        match = _OVERRIDE.fullmatch(argument)
        if match and not match["name"].endswith(_NAMES):
            found[match["name"]] = match["value"]
    return found


_CONDITION = re.compile(
    r"(?P<metric>[^<>]+?)\s*(?P<sign>[<>])\s*(?P<change>[+-]?)\s*(?P<number>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>%|ms|s|)"
)
_FACTORS = {"%": 0.01, "ms": 0.001, "s": 1.0, "": 1.0}
_EXAMPLES = "For example --fail-if 'step.p50 > +5%' or --fail-if 'tool_call.p95 > 2s'"


@dataclass(frozen=True)
class Condition:
    """One `--fail-if` condition.

    Args:
        text: The argument as given.
        name: The metric, for example `step`.
        statistic: For example `p50`.
        above: Whether the limit is an upper one.
        relative: Whether the condition is about the change, or B's value.
        share: Whether the number is a share of A's value.
        number: In seconds, as a share, or without unit.
    """

    text: str
    name: str
    statistic: str
    above: bool
    relative: bool
    share: bool
    number: float

    def exceeded(self, found: Change) -> bool:
        """Return whether the point estimate is beyond the limit, regardless of noise."""
        value = found.b
        if self.relative:
            value = found.difference
            if self.share:
                if not found.a:
                    return value > 0 if self.above else value < 0
                value /= found.a
        return value > self.number if self.above else value < self.number

    def p(self, metric: Metric) -> float | None:
        """Return the one-sided p-value of a change beyond the limit; None with too few steps.

        The null hypothesis is a change of exactly the limit: A's values are moved by it, then compared.
        """
        moved = {
            step: value * (1 + self.number) if self.share else value + self.number
            for step, value in metric.a.items()
        }
        beyond = change(replace(metric, a=moved))
        if beyond.p is None:
            return None
        return beyond.p / 2 if (beyond.difference > 0) == self.above else 1 - beyond.p / 2

    def check(self, once: Mapping[str, bool]) -> None:
        """Check that both runs have this metric, with this statistic.

        Args:
            once: For every name in both runs, whether it occurs once per step.

        Raises:
            ReadingError: They do not.
        """
        if self.name not in once:
            near = get_close_matches(self.name, once, n=1) or ["step"]
            raise ReadingError(
                f"{self.text!r}: no metric {self.name} in both runs; did you mean "
                f"{near[0]}?\n`verl-profiler diff A B --all` lists them all",
                "no-such-metric",
            )
        if once[self.name] and self.statistic not in PER_STEP:
            raise ReadingError(
                f"{self.text!r}: {self.name} occurs once per step and has no {self.statistic}.\n"
                f"It has {', '.join(PER_STEP)}",
                "no-such-metric",
            )


def condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        ReadingError: The text is not a condition.
    """
    match = _CONDITION.fullmatch(text.strip())
    if match is None:
        raise ReadingError(
            f"{text!r} is not a condition.\nWrite METRIC > +CHANGE, METRIC < -CHANGE, or METRIC > "
            f"LIMIT.  {_EXAMPLES}",
            "bad-condition",
        )
    above, sign, unit = match["sign"] == ">", match["change"], match["unit"]
    if unit == "%" and not sign:
        raise ReadingError(
            f"{text!r} has a percentage without a sign.\n"
            f"Write +{match['number']}% or -{match['number']}% for a change.",
            "bad-condition",
        )
    name, _, statistic = match["metric"].rpartition(".")
    if not name or statistic not in PER_EVENT:
        name, statistic = match["metric"], "mean"
    number = float(match["number"]) * _FACTORS[unit] * (-1 if sign == "-" else 1)
    return Condition(text.strip(), name, statistic, above, bool(sign), unit == "%", number)
