"""Compare two runs, or two ranges of steps: what changed, beyond noise.

    verl-profiler diff logs/base logs/new
    verl-profiler diff logs/my-run@2:5 logs/my-run@6:10
    verl-profiler diff logs/base-1,logs/base-2 logs/new-1,logs/new-2
    verl-profiler diff before.log after.log
    verl-profiler diff logs/base logs/new --fail-if 'step.p50 > +5%'
    verl-profiler diff --verify event_loop logs/before logs/after

RUN@N:M selects the steps N to M; the default is all finished steps without the
first (warm-up), if at least two others remain. RUN,RUN are launches of the
same command; the tests then compare launches instead of steps. Of logs (a
console, or metrics of a logger), the timers are compared.
Exits with 1 if a --fail-if condition holds: the change exceeds the limit and
is significant; with --verify, if less than half of the predicted gain was
achieved, or noise hides it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.diff_sides import Read, Side, read_both, read_findings, side, sides
from verl_profiler.cli.options import did_you_mean
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.analysis.compare.comparison import Change, Metric
    from verl_profiler.analysis.compare.conditions import Condition
    from verl_profiler.analysis.selection import Rows

__all__ = ["add_arguments", "comparison", "run", "side"]

# Compared by default, by rows per step or once per step.  Each additional
# metric reduces the statistical power for all, so none of these is redundant.
_ONCE = {"step": ("mean", "p50")}
_MANY = {
    "request": ("p50", "p95", "max"),
    "engine_call": ("p50", "p95", "count"),
    "tool_call": ("p50", "p95", "count"),
    "turn": ("count",),
}
_MANY_OTHERS = ("mean",)
# Maximum number of names compared, those with most time first; user code can create any number.
_COMPARED = 300
# Settings that differ between any two runs and do not affect steps.
_NAMES = ("output_dir", "experiment_name", "project_name", "default_local_dir", "hydra.run.dir")
_OVERRIDE = re.compile(r"[+~]*(?P<name>[\w.@/-]+)=(?P<value>.*)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    for name, text in (("a", "the baseline run"), ("b", "the run to compare with it")):
        parser.add_argument(
            name,
            metavar=name.upper(),
            type=sides,
            help=f"{text}; RUN@N:M selects steps, RUN,RUN are launches of the same command",
        )
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if this condition holds, such as 'step.p50 > +5%%' or 'request.p95 > 90s'",
    )
    parser.add_argument(
        "--verify",
        metavar="FINDING",
        help="check instead whether B achieved the gain that this finding of A predicts: kept, not "
        "kept or undecided; a name from `why A --json`, such as polling or slow_tools",
    )
    parser.add_argument(
        "--warmup",
        metavar="STEPS",
        type=int,
        help="finished steps to leave out at the start of a run without @N:M (default: 1, if at "
        "least two others remain)",
    )
    parser.add_argument(
        "--all", action="store_true", help="show all metrics, not only those that changed most"
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as JSON")
    parser.add_argument(
        "--no-cache", action="store_true", help="do not read or write the runs' .cache folders"
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 0, or 1 if a --fail-if condition holds or a gain was not kept.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.views.diff_text import diff_text

    if args.verify is not None:
        return _verify(args)
    document = comparison(args.a, args.b, args.fail_if, args.warmup, cache=not args.no_cache)
    if args.json:
        kept, cut = bounded({"only_in_one": document["only_in_one"]})
        print_json(
            {
                "format": 2,
                **document,
                **kept,
                "only_in_one_left_out": cut.get("only_in_one", 0),
            }
        )
    else:
        sys.stdout.write(diff_text(shown(document), everything=args.all))
    return int(any(verdict["holds"] for verdict in document["conditions"]))


def comparison(
    given_a: Sequence[Side],
    given_b: Sequence[Side],
    fail_if: Sequence[str] = (),
    warmup: int | None = None,
    *,
    cache: bool,
) -> dict[str, Any]:
    """Compare two sides; return what `--json` prints.

    Raises:
        ReadingError: They cannot be compared, or a condition cannot be tested.
    """
    from verl_profiler.analysis.compare.asynchronous_metrics import NOT_COMPARED
    from verl_profiler.analysis.compare.comparison import adjusted, change, step_of
    from verl_profiler.analysis.compare.conditions import condition
    from verl_profiler.analysis.selection import grouped
    from verl_profiler.views.diff_text import metric_rows
    from verl_profiler.views.ledger_text import bound_text

    conditions = [condition(text) for text in fail_if]
    a, b = read_both(given_a, given_b, warmup, cache=cache)
    asynchronous = a.asynchronous or b.asynchronous
    alone = _only_in_one(a.rows, b.rows)
    if asynchronous:
        alone = [each for each in alone if each["name"] not in NOT_COMPARED]
    _fill(a, b)
    one_run = len(given_a) == len(given_b) == 1 and _same(given_a[0].path, given_b[0].path)
    first, second = grouped(a.rows, "name"), grouped(b.rows, "name")
    compared, left_out = _compared(first, second, {each["name"] for each in alone})
    if asynchronous:
        compared = {name: once for name, once in compared.items() if name not in NOT_COMPARED}
    metrics = _metrics(compared, first, second, one_run=one_run)
    changes = [change(metric) for metric in metrics]
    adjusted(changes)
    verdicts = _verdicts(conditions, first, second, one_run=one_run)
    return {
        "runs": [
            {
                "name": ",".join(each.shown for each in given),
                "launches": read.launches,
                "steps": [step_of(place) for place in read.steps],
                "warm_up": read.warm_up,
                "asynchronous": read.asynchronous,
                "bound": bound_text(read.ledger),
            }
            for given, read in ((given_a, a), (given_b, b))
        ],
        **metric_rows(changes),
        "configuration": _configuration(a.launch, b.launch),
        # A run's last step has no next one.
        "only_in_one": [each for each in alone if each["name"] != "step_to_step"],
        "left_out": left_out,
        "one_run": one_run,
        "drift": (_drift(changes) or {}) if one_run else {},
        "between_steps_s": _between_steps(first, second),
        "equal_tokens": _at_equal_tokens(changes, first, second) or {},
        "conditions": verdicts,
    }


def _verify(args: argparse.Namespace) -> int:
    """Print whether B achieved the gain that a finding of A predicts; return 0 if it did, else 1."""
    from verl_profiler.analysis.explain.rules import RULES
    from verl_profiler.analysis.explain.verification import verified
    from verl_profiler.views.diff_text import verification_text

    given = {"--fail-if": args.fail_if, "--all": args.all, "--warmup": args.warmup is not None}
    if any(given.values()):
        option = next(name for name, value in given.items() if value)
        raise ReadingError(
            f"--verify compares the length of the steps only, so it cannot be used with {option}.\n"
            "Omit one of them",
            "option-not-heeded",
        )
    a, b = _single(args.a), _single(args.b)
    found, before = read_findings(a, cache=not args.no_cache)
    remaining, after = read_findings(b, cache=not args.no_cache)
    if args.verify not in found:
        # Findings of categories without a rule have the category's name.
        if args.verify in {*RULES, *remaining}:
            problem = f"{a.shown} does not have the finding {args.verify}."
        else:
            near = did_you_mean(args.verify, [*found, *RULES])
            problem = f"{args.verify!r} is not a finding{near}"
        raise ReadingError(
            f"{problem}\n{a.shown} has {', '.join(found) or 'no findings'}", "no-such-finding"
        )
    left = remaining.get(args.verify)
    result = verified(
        found[args.verify], before, after, None if left is None else left["recoverable_s"]
    )
    if args.json:
        print_json({"format": 2, **result})
    else:
        sys.stdout.write(verification_text(shown(result)))
    return int(result["verdict"] != "kept")


def _single(given: Sequence[Side]) -> Side:
    if len(given) > 1:
        raise ReadingError(
            "--verify compares one launch with one.\nName a single run for A and for B",
            "option-not-heeded",
        )
    return given[0]


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _names(rows: Rows) -> dict[str, bool]:
    """Return the names in the rows, and whether each occurs once per step."""
    return {row["name"]: row["value"] is not None for row in rows}


def _only_in_one(first: Rows, second: Rows) -> list[dict[str, Any]]:
    """List names that only one side has, with their count per step."""
    found: list[dict[str, Any]] = []
    for letter, own, other in (("A", first, second), ("B", second, first)):
        steps = len({row["step"] for row in own})
        counts: dict[str, float] = {}
        for row in own:
            count = 1.0 if row["value"] is not None else row["count"]
            counts[row["name"]] = counts.get(row["name"], 0.0) + count
        missing = counts.keys() - _names(other)
        found += [
            {"run": letter, "name": name, "count": counts[name] / steps} for name in sorted(missing)
        ]
    return found


def _fill(first: Read, second: Read) -> None:
    """Add zeros to each side for events that only the other has."""
    from verl_profiler.analysis.compare.step_metrics import PER_EVENT

    for own, other in ((first, second), (second, first)):
        missing = {name for name, once in _names(other.rows).items() if not once}
        missing -= _names(own.rows).keys()
        empty = dict.fromkeys((*PER_EVENT, "value"))
        own.rows += [
            {**empty, "step": step, "name": name, "unit": "s", "total": 0.0, "count": 0.0}
            for name in sorted(missing)
            for step in own.steps
        ]


def _configuration(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List differences between two `run.json`: training, settings, versions and overrides.

    A value that neither has recorded may differ, and is listed.
    """
    from verl_profiler.events.redaction import OMITTED

    a, b = _settings(first), _settings(second)
    return [
        {"name": name, "a": a.get(name), "b": b.get(name)}
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name) or a.get(name) == OMITTED
    ]


def _settings(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a launch, by dotted name."""
    from verl_profiler.events.json_values import is_list, is_mapping
    from verl_profiler.events.redaction import recorded_command, recorded_values

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


_Named = Mapping[str, "Rows"]


def _compared(first: _Named, second: _Named, alone: Collection[str]) -> tuple[dict[str, bool], int]:
    """Choose the names that are compared by default.

    Args:
        first: The rows of A by name.
        second: Those of B.
        alone: Names that only one of them has; there is no mean of them to compare.

    Returns:
        The names, in order, and whether each occurs once per step; how many are left out.
    """
    once = {
        name: single
        for name, single in _once(first, second).items()
        if name in _MANY or name not in alone
    }
    if len(once) <= _COMPARED:
        return once, 0

    def time_s(name: str) -> float:
        rows = (*first[name], *second[name])
        return sum(row["value"] or row["total"] or 0 for row in rows if row["unit"] == "s")

    # Per-step quantities have fixed names.
    ours = {
        name for name in once if first[name][0]["unit"] != "s" or name in _MANY or name == "step"
    }
    others = sorted(once.keys() - ours, key=lambda name: (-time_s(name), name))
    kept = ours.union(others[: max(_COMPARED - len(ours), 0)])
    return {name: single for name, single in once.items() if name in kept}, len(once) - len(kept)


def _metrics(
    compared: Mapping[str, bool], first: _Named, second: _Named, *, one_run: bool
) -> list[Metric]:
    """Return what is compared by default."""
    found: list[Metric] = []
    for name, single in compared.items():
        statistics = _ONCE.get(name, ("mean",)) if single else _MANY.get(name, _MANY_OTHERS)
        found += [
            _metric(name, statistic, first, second, one_run=one_run) for statistic in statistics
        ]
    return [metric for metric in found if metric.a and metric.b]


def _once(first: _Named, second: _Named) -> dict[str, bool]:
    """Return the names in both, and whether each occurs once per step."""
    return {name: rows[-1]["value"] is not None for name, rows in first.items() if name in second}


def _metric(name: str, statistic: str, first: _Named, second: _Named, *, one_run: bool) -> Metric:
    from verl_profiler.analysis.compare.comparison import Metric

    values: list[dict[int, float]] = []
    unit, single = "", False
    for named in (first, second):
        values.append({})
        for row in named.get(name, ()):
            single = row["value"] is not None
            unit = row["unit"] if statistic != "count" else ""
            value = row["value"] if single else row[statistic]
            # A step without calls has no median.
            if value is not None:
                values[-1][row["step"]] = value
    over_steps = statistic if single else "mean"
    before, after = values
    estimated = any(
        row.get("estimated") for named in (first, second) for row in named.get(name, ())
    )
    return Metric(
        f"{name}.{statistic}", unit, before, after, over_steps, one_run, estimated, single
    )


def _drift(changes: Sequence[Change]) -> dict[str, Any] | None:
    """Return by how much the step and the phase that drifts most grow per step, if the step drifts."""
    from verl_profiler.analysis.compare.step_metrics import NOT_PHASES
    from verl_profiler.analysis.intervals import slope

    once = {
        name: slope({**each.metric.a, **each.metric.b})
        for each in changes
        if each.metric.unit == "s" and each.metric.name.endswith(".mean") and each.metric.once
        for name in [each.metric.name.removesuffix(".mean")]
    }
    if not any(each.drift and each.metric.name == "step.mean" for each in changes):
        return None
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


def _between_steps(first: _Named, second: _Named) -> float | None:
    """Return by how much the mean time between steps is longer in B, of steps with a next one."""
    means: list[float] = []
    for named in (first, second):
        lengths = {row["step"]: row["value"] for row in named.get("step", ())}
        gaps = [row["value"] - lengths[row["step"]] for row in named.get("step_to_step", ())]
        if gaps:
            means.append(sum(gaps) / len(gaps))
    return means[1] - means[0] if len(means) > 1 else None


def _at_equal_tokens(
    changes: Sequence[Change], first: _Named, second: _Named
) -> dict[str, Any] | None:
    """Return the change of the step at equal tokens per step, if these explain its steps."""
    from verl_profiler.analysis.compare.comparison import ALPHA
    from verl_profiler.analysis.intervals import difference_at_equal

    step = next((each.metric for each in changes if each.metric.name == "step.mean"), None)
    for name in ("update_actor_tokens", "total_tokens", "generated_tokens"):
        if step is not None and name in first and name in second:
            tokens = _metric(name, "mean", first, second, one_run=step.one_run)
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
    return None


def _would_be_seen(found: Change) -> str:
    if found.detectable is None or not found.a:
        return ""
    return f"they vary so much that only {found.detectable / abs(found.a):+.0%} would be noticed; "


def _verdicts(
    conditions: Sequence[Condition], first: _Named, second: _Named, *, one_run: bool
) -> list[dict[str, Any]]:
    from verl_profiler.analysis.compare.comparison import ALPHA, change
    from verl_profiler.analysis.compare.conditions import statistic_of

    once = _once(first, second)
    verdicts: list[dict[str, Any]] = []
    for each in conditions:
        statistic_of(each, once)
        metric = _metric(each.name, each.statistic, first, second, one_run=one_run)
        if not metric.a or not metric.b:
            raise ReadingError(
                f"{each.text!r}: no step has enough {each.name} samples for {each.statistic}; p90 needs "
                "10 per step, p95 20 and p99 100.\nUse p50, mean or max instead",
                "too-few-steps",
            )
        found = change(metric)
        p = each.p(metric) if each.relative else None
        level = ALPHA / len(conditions)
        exceeded = each.exceeded(found)
        blind = p is not None and p > level and exceeded and not found.testable
        if each.relative and (p is None or blind):
            raise ReadingError(
                f"{each.text!r}: {len(metric.a)} and {len(metric.b)} steps are too few to tell such "
                f"a change from noise: {_would_be_seen(found) if blind else ''}mean and p50 over the steps need 3 of each, p90 10, p95 20, "
                "p99 100, and max has no interval.\nCompare more steps, or give a limit instead of "
                f"a change, such as '{each.name}.{each.statistic} > {found.a:.3g}"
                f"{metric.unit if metric.unit == 's' else ''}'",
                "too-few-steps",
            )
        verdicts.append(
            {
                "condition": each.text,
                "unit": found.metric.unit,
                "a": found.a,
                "b": found.b,
                "share": found.share,
                "p": p,
                "significant_p": level,
                "exceeded": exceeded,
                "holds": exceeded and (p is None or p <= level),
            }
        )
    return verdicts
