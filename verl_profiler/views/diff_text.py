"""A comparison of two runs as text, the conclusion first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.compare.comparison import ALPHA, HEADLINES, WORKLOAD
from verl_profiler.analysis.compare.step_metrics import DEVICE, STALENESS
from verl_profiler.analysis.selection import grouped
from verl_profiler.render.text import align, short
from verl_profiler.units import counted, seconds, share

_HEADINGS = ("metric", "A", "B", "change", "", "95 % interval", "p")
_NOTE = (
    "Each interval is for one metric alone; p is adjusted for multiple comparisons and significant "
    "at 0.05 or below."
)
_ESTIMATED = (
    "≈ is estimated from the requests whose details were recorded (profiler.events.detail_share); its "
    "error is part of the variation between steps."
)
_LAUNCHES = (
    "What differs between two launches of the same command (another node, another hour) is in no interval; "
    "diff A1,A2 B1,B2 includes it."
)
# The time between steps is reported where its change is this share of the time from step to step.
_BETWEEN = 0.03
# Changes below this share are written as none.
_ROUNDING = 5e-4
# With so many steps, and fewer than one in so many of them independent, p-values are too small.
_MANY_STEPS = 20
_AUTOCORRELATED = 4
_LISTED = 12
_WIDEST = 60
# A step's time changes by no more than so many times the share by which its work does.
_BEYOND = 4
# What is smaller than this share of both values is a rounding error.
_NONE = 1e-9


def diff_text(document: Mapping[str, Any], *, everything: bool = False) -> str:
    """Return a comparison as text.

    Args:
        document: What `verl-profiler diff --json` prints.
        everything: Show all metrics, however many there are.
    """
    parts = diff_parts(document)
    blocks = [*parts["conclusion"], "\n".join(parts["sides"]), parts["differences"]]
    hidden: list[str] = []
    for title, rows in parts["tables"]:
        most, kind = _BOUNDED.get(title, (len(rows), ""))
        shown = rows if everything else rows[:most]
        if shown:
            blocks.append(f"{title}\n{align([_HEADINGS, *shown])}")
        if len(shown) < len(rows):
            hidden.append(f"{len(rows) - len(shown):,} {kind}")
    note, *names = parts["notes"]
    more = [f"Metrics not shown: {', '.join(hidden)}; --all shows them."] if hidden else []
    blocks += [note, *more, *names, *map(_verdict, document["conditions"])]
    return "\n\n".join(block for block in blocks if block) + "\n"


def diff_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison as the parts of a page, in their order.

    Returns:
        conclusion and sides (sentences), differences (lines), headings and tables (title and rows of cells)
        and notes (sentences).
    """
    estimated = any(row["estimated"] for row in document["metrics"])
    notes = [f"{_NOTE} {_ESTIMATED}" if estimated else _NOTE]
    if document["left_out"]:
        count = f"{document['left_out']:,}"
        notes.append(f"{count} more names with less time per step were not compared.")
    return {
        "conclusion": _paragraphs(document),
        "sides": _sides(document),
        "differences": _differences(document),
        "headings": _HEADINGS,
        "tables": [(title, [*map(_cells, rows)]) for title, rows in _groups(document)],
        "notes": notes,
    }


def verification_text(result: Mapping[str, Any]) -> str:
    """Return as text whether a change achieved the gain that a finding predicted.

    Args:
        result: What `verification.verified` returns.
    """

    def span(low: float | None, high: float | None) -> str:
        return "" if low is None or high is None else f" ({seconds(low)} to {seconds(high)})"

    who = f" ({result['culprit_text']})" if result["culprit_text"] else ""
    left = result["remaining_s"]
    lines = [
        f"{result['finding']}{who}: {result['verdict']}; {result['reason']}",
        f"  predicted  {seconds(result['predicted_s'])} per step"
        + span(result["low_s"], result["high_s"]),
        f"  measured   {seconds(result['measured_s'])} per step"
        + span(result["measured_low_s"], result["measured_high_s"])
        + f": {seconds(result['before_s'])} in {result['steps_before']} steps before, "
        f"{seconds(result['after_s'])} in {result['steps_after']} after",
        f"  missed by  {seconds(result['miss_s'])}",
        "  remaining  none; the finding no longer triggers"
        if left is None
        else f"  remaining  up to {seconds(left)} per step",
    ]
    lines += [
        f"  WARNING {name} per step changed by {share(change)}; steps are not comparable"
        for name, change in result["work_changes"].items()
    ]
    return "\n".join(lines) + "\n"


_HEADLINE, _WORK = "Headline metrics", "Work per step"
_DEVICES = "Device-seconds and staleness per step"
_SIGNIFICANT = "Significant changes"
_NOT_SIGNIFICANT = "No significant change"
_NOT_TESTABLE = "Not testable (a maximum, or too few steps: a doubling could be missed)"
_TITLES = (_HEADLINE, _WORK, _DEVICES, _SIGNIFICANT, _NOT_SIGNIFICANT, _NOT_TESTABLE)
# Tables of which only so many rows are shown without --all, and what their rows are.
_BOUNDED = {
    _SIGNIFICANT: (10, "with a significant change"),
    _NOT_SIGNIFICANT: (0, "without a significant change"),
    _NOT_TESTABLE: (0, "not testable"),
}


def _groups(document: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the tables that have rows, each metric in one of them."""
    groups: dict[str, list[Mapping[str, Any]]] = {title: [] for title in _TITLES}
    for row in document["metrics"]:
        groups[_group(row)].append(row)
    return [(title, rows) for title, rows in groups.items() if rows]


def _group(row: Mapping[str, Any]) -> str:
    name = row["metric"]
    if row["headline"]:
        return _HEADLINE
    if name in WORKLOAD:
        return _WORK
    if name.startswith(DEVICE) or name.removesuffix(".mean") in STALENESS:
        return _DEVICES
    if row["significant"]:
        return _SIGNIFICANT
    return _NOT_SIGNIFICANT if row["testable"] else _NOT_TESTABLE


def _sides(document: Mapping[str, Any]) -> list[str]:
    """Return the compared steps of both sides."""
    return [
        f"{letter}: {run['name']}, {_steps(run)}"
        for letter, run in zip("AB", document["runs"], strict=True)
    ]


def _differences(document: Mapping[str, Any]) -> str:
    """Return differences in settings, and names that only one run has."""
    changed = document["configuration"]
    lines = ["Configuration (run.json)"] if changed else []
    for each in changed[:_LISTED]:
        a, b = (
            "(absent)" if each[side] is None else short(each[side], _WIDEST) for side in ("a", "b")
        )
        lines.append(f"  {each['name']} {a} to {b}")
    if len(changed) > _LISTED:
        lines.append(f"  and {len(changed) - _LISTED} more; --json lists them")
    for letter, own in grouped(document["only_in_one"], "run").items():
        names = [
            f"{each['name']} ({_amount(each['count'], '')} per step"
            + (f", {seconds(each['step_s'])})" if each["step_s"] else ")")
            for each in own
        ]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        lines.append(f"Only in {letter}: {', '.join(names[:_LISTED])}{more}")
    return "\n".join(lines)


def _paragraphs(document: Mapping[str, Any]) -> list[str]:
    """Return the conclusion: work and configuration first, then the step."""
    step = next(row for row in document["metrics"] if row["metric"] == HEADLINES[0])
    texts = (_modes(document), _premises(document), _step(step, document), _power(step, document))
    return [text for text in texts if text]


def _modes(document: Mapping[str, Any]) -> str:
    """Return how asynchronous runs are compared; empty without any."""
    runs = document["runs"]
    modes = ["asynchronous" if run["asynchronous"] else "synchronous" for run in runs]
    if "asynchronous" not in modes:
        return ""
    bounds = [
        f"  {name}: {run['bound']}." for name, run in zip("AB", runs, strict=True) if run["bound"]
    ]
    return (
        f"A is {modes[0]}; B is {modes[1]}: compare rates and device time.  Requests and tokens are those that a "
        "step consumed; gen, rollout and tails are left out, because an asynchronous step only waits for its "
        f"samples.{''.join(bounds)}"
    )


def _premises(document: Mapping[str, Any]) -> str:
    """Return sentences about differences in work and configuration."""
    sentences: list[str] = []
    work = [row for row in document["metrics"] if row["metric"] in document["workload"]]
    if work:
        named = ", ".join(
            f"{row['metric'].removesuffix('.mean')} {_amount(row['a'], '')} to "
            f"{_amount(row['b'], '')}{_in_brackets(row['share'])}"
            for row in work
        )
        most = max(abs(row["share"] or 0.0) for row in work)
        step = next(
            (row["share"] for row in document["metrics"] if row["metric"] == "step.mean"), None
        )
        far = most and step is not None and abs(step) > _BEYOND * most
        what = "change by far more" if far else "are not comparable"
        sentences.append(f"The work per step differs: {named}; step times {what}.")
    changed = len(document["configuration"])
    if changed:
        sentences.append(
            f"The configuration differs in {counted(changed, 'setting')}, listed below."
        )
    return "  ".join(sentences)


def _step(step: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Return the step's change, and the largest other change."""
    rows = document["metrics"]
    length = f"A step takes {seconds(step['a'])} in A and {seconds(step['b'])} in B"
    if step["p"] is None:
        return (
            f"{length}; too few steps to distinguish a change from noise.  Compare at least 3 "
            "steps of each."
        )
    interval = f"95 % interval {_moved(step, step['low'])} to {_moved(step, step['high'])}"
    text = f"{length}: {_moved(step)}{_in_brackets(step['share'])}, "
    if step["drift"]:
        text += "but a linear drift over both ranges explains the difference."
        drift = document["drift"]
        if drift and drift["phase"]:
            text += (
                f"  The step grows by {seconds(drift['step_s_per_step'])} per step; most of it is "
                f"{drift['phase']} ({seconds(drift['phase_s_per_step'])})."
            )
    elif not step["testable"]:
        stalled = _stalled(document)
        text += (
            f"not testable: {stalled or 'too few steps'}, a doubling could be missed ({interval})."
        )
    else:
        kind = "significant" if step["significant"] else "not significant"
        text += f"{kind} ({interval})."
    text += _from_start_to_start(document) + _at_equal_tokens(step, document["equal_tokens"])
    others = [
        row
        for row in rows
        if row["significant"] and not row["metric"].startswith(("step.", "step_to_step."))
    ]
    lengths = [row for row in others if row["unit"] == "s"]
    if lengths:
        row = max(lengths, key=lambda row: abs(row["difference"]))
        text += f"  The largest other significant change is {row['metric']}, {_moved(row)}."
    elif not others and not step["significant"] and step["testable"]:
        text += "  No other metric changed significantly."
    return text


def _stalled(document: Mapping[str, Any]) -> str:
    """Return the steps that took many times the median, and what the median step changed."""
    named = [
        f"step {each['step']} of {letter} takes {each['step_s'] / each['median_s']:.2g} times the median"
        for letter, run in zip("AB", document["runs"], strict=True)
        for each in run["stalled"][:_LISTED]
    ]
    typical = next((row for row in document["metrics"] if row["metric"] == "step.p50"), None)
    if not named or typical is None:
        return ""
    return f"{' and '.join(named)} (the median step changes by {_moved(typical)})"


def _from_start_to_start(document: Mapping[str, Any]) -> str:
    """Return the change of the time from start to start, where it is not that of the step."""
    by_name = {row["metric"]: row for row in document["metrics"]}
    whole, between_s = by_name.get("step_to_step.mean"), document["between_steps_s"]
    if whole is None or not whole["significant"] or between_s is None:
        return ""
    if abs(between_s) < _BETWEEN * whole["a"]:
        return ""
    return (
        f"  From the start of a step to the start of the next one it is {_moved(whole)}"
        f"{_in_brackets(whole['share'])}, significant: {_moved(whole, between_s)} of that is between steps."
    )


def _at_equal_tokens(step: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    """Return the change of the step at equal tokens; empty where these do not explain it."""
    if not found:
        return ""
    kind = "significant" if found["p"] <= ALPHA else "not significant"
    return (
        f"  At equal {found['tokens']} it is {_moved(step, found['difference'])}, {kind} "
        f"({_moved(step, found['low'])} to {_moved(step, found['high'])})."
    )


def _power(step: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Return the smallest detectable change."""
    if step["detectable"] is None:
        return ""
    counts = [len(run["steps"]) for run in document["runs"]]
    launches = [run["launches"] for run in document["runs"]]
    worth = " and ".join(_amount(each, "") for each in step["effective_steps"])
    of = "pairs of steps" if len(step["effective_steps"]) == 1 else "steps"
    compared = " and ".join(map(str, counts[: len(step["effective_steps"])]))
    if max(launches) > 1:
        text = (
            f"The unit is a launch ({launches[0]} of A, {launches[1]} of B), so intervals include what "
            "differs between launches.  A "
        )
    else:
        text = f"Allowing for autocorrelation, the {compared} {of} count as {worth} independent ones.  A "
    text += f"change of step.mean by {seconds(step['detectable'])}"
    if step["a"]:
        text += f" ({share(step['detectable'] / step['a'])})"
    text += " would be detected with 80 % power; smaller changes may be missed."
    if max(launches) > 1:
        return text
    if not document["one_run"]:
        text += f"  {_LAUNCHES}"
    if any(
        count >= _MANY_STEPS and effective < count / _AUTOCORRELATED
        for count, effective in zip(counts, step["effective_steps"], strict=False)
    ):
        text += (
            "  WARNING: the steps are strongly autocorrelated, so p is too small and intervals are too "
            "narrow.  Repeat both runs, and trust what both pairs show."
        )
    return text


def _verdict(each: Mapping[str, Any]) -> str:
    """Return the result of a condition."""
    measured = f"A {_amount(each['a'], each['unit'])}, B {_amount(each['b'], each['unit'])}"
    if each["p"] is not None:
        measured += f"; p {each['p']:.3f}, significant at {each['significant_p']:.3f} or below"
    if each["holds"]:
        return f"FAILED: {each['condition']} ({measured})"
    if each["exceeded"]:
        return f"passed: {each['condition']}, but not significantly ({measured})"
    return f"passed: {_within(each['condition'])} ({measured})"


def _within(condition: str) -> str:
    """Return the negation of a condition: `step.p50 within +5 %`, `step.p50 at most 90 s`."""
    name, sign, limit = re.split(r"\s*([<>])\s*", condition, maxsplit=1)
    relation = "within" if limit[0] in "+-" else "at most" if sign == ">" else "at least"
    return f"{name} {relation} {re.sub(r'(?<=[0-9])(?=[%ms])', ' ', limit)}"


def _steps(run: Mapping[str, Any]) -> str:
    steps, left_out = run["steps"], run["warm_up"]
    text = f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    if run["launches"] > 1:
        text = f"{run['launches']} launches with {len(steps)} steps"
    names = ", ".join(map(str, left_out))
    return text + (f"; step {names} left out as warm-up" if left_out else "")


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: metric, both values, the change, its interval and p."""
    low, high = row["low"], row["high"]
    interval = "drift" if row["drift"] else "-"
    if low is not None:
        interval = f"{_moved(row, low)} to {_moved(row, high)}"
    chance = row["adjusted_p"]
    return [
        f"≈ {row['metric']}" if row["estimated"] else row["metric"],
        _amount(row["a"], row["unit"]),
        _amount(row["b"], row["unit"]),
        _moved(row),
        _signed(row["share"]),
        interval,
        "-" if chance is None else f"{chance:.3f}" if chance >= 0.001 else "<0.001",
    ]


def _amount(value: float, unit: str) -> str:
    """Write a value of a metric."""
    if unit == "s":
        return seconds(value)
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number}{unit}"


def _signed(value: float | None) -> str:
    """Write a relative change, with its sign."""
    if value is None:
        return "-"
    # Rounding of times is no change.
    value = 0.0 if abs(value) < _ROUNDING else value
    return f"{_sign(value)}{share(abs(value))}"


def _moved(row: Mapping[str, Any], value: float | None = None) -> str:
    """Write the difference of a metric, or another one of its unit, with its sign."""
    difference = row["difference"] if value is None else value
    if value is None and row["share"] is not None and abs(row["share"]) < _ROUNDING:
        difference = 0.0
    if abs(difference) < _NONE * max(abs(row["a"]), abs(row["b"]), _NONE):
        difference = 0.0
    return f"{_sign(difference)}{_amount(abs(difference), row['unit'])}"


def _sign(value: float) -> str:
    return "+" if value > 0 else "-" if value < 0 else ""


def _in_brackets(value: float | None) -> str:
    """Write a relative change in parentheses; empty for None."""
    return "" if value is None else f" ({_signed(value)})"
