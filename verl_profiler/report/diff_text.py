"""A comparison of two runs as text, the conclusion first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.comparison import Change
from verl_profiler.report.text import align, seconds, share

__all__ = ["HEADINGS", "change_cells", "conclusion", "diff_text", "gathered", "sides", "verdict"]

HEADINGS = ("figure", "A", "B", "change", "", "95 % interval", "p")
# So many uncertain changes are shown without --all.
_UNCERTAIN = 10


def gathered(
    names: Sequence[str],
    steps: Sequence[Sequence[int]],
    changes: Sequence[Change],
    verdicts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the comparison as plain values, for JSON, the text and the page.

    Args:
        names: What the user called the two.
        steps: The steps of each that were compared.
        changes: How each figure differs.
        verdicts: What became of the conditions.
    """
    return {
        "runs": [
            {"name": name, "steps": list(each)} for name, each in zip(names, steps, strict=True)
        ],
        "figures": [
            {
                "figure": each.figure.name,
                "unit": each.figure.unit,
                "a": each.a,
                "b": each.b,
                "difference": each.b - each.a,
                "share": each.share,
                "low": each.low,
                "high": each.high,
                "p": each.p,
                "adjusted_p": each.adjusted_p,
                "certain": each.certain,
            }
            for each in sorted(changes, key=_order)
        ],
        "conditions": list(verdicts),
    }


def diff_text(document: Mapping[str, Any], *, everything: bool = False) -> str:
    """Write a comparison.

    Args:
        document: What `gathered` returns.
        everything: Show all that did not change, too.
    """
    figures = document["figures"]
    certain = [row for row in figures if row["certain"]]
    others = [row for row in figures if not row["certain"]]
    hidden = 0 if everything else max(len(others) - _UNCERTAIN, 0)
    blocks = ["\n".join(sides(document)), conclusion(document)]
    for title, rows in (
        ("Certain changes", certain),
        ("Not certain" if certain else "Figures", others[: len(others) - hidden]),
    ):
        if rows:
            blocks.append(f"{title}\n{align([HEADINGS, *map(change_cells, rows)])}")
    if hidden:
        blocks.append(f"{hidden} more figures; --all shows them.")
    blocks += [verdict(each) for each in document["conditions"]]
    return "\n\n".join(blocks) + "\n"


def sides(document: Mapping[str, Any]) -> list[str]:
    """Say which steps of what are compared."""
    return [
        f"{letter}: {run['name']}, {_steps(run['steps'])}"
        for letter, run in zip("AB", document["runs"], strict=True)
    ]


def conclusion(document: Mapping[str, Any]) -> str:
    """Say in a sentence or two what changed."""
    by_name = {row["figure"]: row for row in document["figures"]}
    step = by_name["step.mean"]
    length = f"{seconds(step['a'])} in A and {seconds(step['b'])} in B"
    if step["p"] is None:
        return (
            f"A step takes {length}; with so few steps nothing can be told from noise.  Compare at "
            "least 4 steps of each."
        )
    certain = [row for row in document["figures"] if row["certain"]]
    if not certain:
        return f"Nothing changed that is more than noise; a step takes {length}."
    text = f"A step takes {length}, which may be noise."
    if step["certain"]:
        text = f"A step takes {length}: {_signed(step['share'])}."
    parts = [row for row in certain if row["unit"] == "s" and row["figure"] not in _STEP]
    if parts:
        row = max(parts, key=lambda row: abs(row["difference"]))
        text += f"  The largest certain change is {row['figure']}, {_moved(row)}."
    return text


def change_cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: figure, both values, the change, its interval and chance."""
    low, high = row["low"], row["high"]
    interval = "-" if low is None else f"{_moved(row, low)} to {_moved(row, high)}"
    chance = row["adjusted_p"]
    return [
        row["figure"],
        _amount(row["a"], row["unit"]),
        _amount(row["b"], row["unit"]),
        _moved(row),
        _signed(row["share"]),
        interval,
        "-" if chance is None else f"{chance:.3f}" if chance >= 0.001 else "<0.001",
    ]


def _amount(value: float, unit: str) -> str:
    """Write a value of a figure."""
    if unit == "s":
        return seconds(value)
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number}{unit}"


_STEP = ("step.mean", "step.p50")


def _order(each: Change) -> tuple[Any, ...]:
    name = each.figure.name
    place = _STEP.index(name) if name in _STEP else len(_STEP)
    lengths = each.figure.unit == "s"
    return (place, not lengths, -abs(each.b - each.a) if lengths else -abs(each.share or 0), name)


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    gaps = "" if len(steps) == steps[-1] - steps[0] + 1 else ", not all"
    return f"steps {steps[0]} to {steps[-1]} ({len(steps)}{gaps})"


def _signed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{'+' if value >= 0 else '-'}{share(abs(value))}"


def _moved(row: Mapping[str, Any], value: float | None = None) -> str:
    difference = row["difference"] if value is None else value
    return f"{'+' if difference >= 0 else '-'}{_amount(abs(difference), row['unit'])}"


def verdict(each: Mapping[str, Any]) -> str:
    """Say what became of a condition."""
    measured = f"A {_amount(each['a'], each['unit'])}, B {_amount(each['b'], each['unit'])}"
    if each["p"] is not None:
        measured += f"; p {each['p']:.3f}, certain from {each['certain_p']:.3f} on"
    if each["holds"]:
        return f"FAILED: {each['condition']} ({measured})"
    if each["exceeded"]:
        return f"passed: {each['condition']} is so, but not certain ({measured})"
    return f"passed: {each['condition']} is not so ({measured})"
