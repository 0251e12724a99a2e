"""Findings as text: the sentence, the culprit, the cause, the fix, and the command that verifies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.explain.fixes import FILES
from verl_profiler.analysis.explain.rules import ONLY_IN_REPORT
from verl_profiler.analysis.selection import NOTHING, LeftOut, Rows, named
from verl_profiler.render.text import clipped, without, wrapped
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds, share

_WIDTH = 92
# A culprit with more characters is not repeated below the message that names it.
_LONG = 40


def finding_texts(rows: Rows) -> list[dict[str, Any]]:
    """Return findings, the rows of `Finding.row`, as texts.

    Returns:
        message, brief (what is recoverable, in a word), gain, who, beside (what the message does not
        name), why, try, paste (overrides), files (name and text), proof (a command), see
        (names of views) and evidence (lines).
    """
    several = len({row["run"] for row in rows}) > 1
    return [_texts(row, f" of {row['run']}" if several else "") for row in rows]


def _texts(row: Mapping[str, Any], of: str) -> dict[str, Any]:
    gain = f"{seconds(row['recoverable_s'])} per step ({share(row['share'])}){of}"
    bounded = row["dominates"] or (
        row["bound_s"] is None and (not row["unseen"] or row["low_s"] is None)
    )
    brief = f"{'≤ ' * bounded}{seconds(row['recoverable_s'])}"
    if not row["recoverable_s"]:
        brief = "no step time"
    if row.get("finding") in ("work", "pool_work"):
        brief = "no anomaly"
        gain = f"none measured, of {gain}; not an anomaly"
    elif row["dominates"]:
        gain = f"at most {gain}; not an anomaly, but what bounds the step"
    elif not row["recoverable_s"]:
        gain = f"no step time{of}"
    elif row["bound_s"] is not None:
        gain += f", at most {seconds(row['bound_s'])}"
    elif not row["unseen"] or row["low_s"] is None:
        gain = f"up to {gain}"
    else:
        gain += (
            f", from {seconds(row['low_s'])} (replicas already saturated) to "
            f"{seconds(row['high_s'])} (no additional slowdown per call)"
        )
    if row["replayed"] is not None and row["replayed"] < row["steps"]:
        gain += f", from replays of {row['replayed']} of {row['steps']} steps"
    if row["mostly_step"] is not None:
        gain += f", mostly {'after' if row['between'] else 'in'} step {row['mostly_step']}"
    # The message is of the account itself.
    who = "" if row["culprit_kind"] == "account" else row["culprit_text"]
    # A setting's name is a phrase, and so are requests.
    phrase = row["culprit_kind"] in (None, "setting", "request")
    if who and row["culprit"] is not None and not phrase:
        who = f"{row['culprit_kind']} {who}"
    if row["where"] and row["where"] not in who:
        who = f"{who}, {row['where']}" if who else row["where"]
    named = row["culprit_text"] and row["culprit_text"] in row["message"]
    return {
        "message": row["message"],
        "brief": brief,
        "gain": gain,
        "who": who,
        "beside": "; ".join(filter(None, ("" if named else who, of.strip()))),
        "why": row["cause"],
        "try": row["advice"],
        "paste": row["overrides"],
        "files": sorted(row["files"].items()),
        "proof": row["proof"],
        "see": list(row["shows"]),
        "evidence": [_evidence(each) for each in row["evidence"]],
    }


def _evidence(row: Mapping[str, Any]) -> str:
    what = f" in {row['what']}" if row["what"] else ""
    return f"step {row['step']}: {row['who']} {seconds(row['seconds'])}{what}"


def _see(names: list[str]) -> str:
    """Return what to look at: plots, and tables that only the report has."""
    tables = [name for name in names if name in ONLY_IN_REPORT]
    plots = [name for name in names if name not in tables]
    return ", ".join([*plots, f"{', '.join(tables)} in the report"] if tables else plots)


def finding_list(rows: Rows, left_out: LeftOut = NOTHING) -> str:
    """Return the findings for a terminal; empty without findings.

    Args:
        rows: Findings.
        left_out: The steps that they leave out as warm-up.
    """
    lines: list[str] = []
    for number, text in enumerate(finding_texts(rows), 1):
        lines += wrapped(f"{number}. {text['message']}", 3, _WIDTH, most=None)
        parts = {
            "gain": text["gain"],
            "culprit": text["who"],
            "why": text["why"],
            "fix": text["try"],
            "see": _see(text["see"]),
        }
        for label, each in parts.items():
            if each:
                lines += wrapped(f"   {label}: {each}", 8, _WIDTH, most=None)
        # Never wrapped, so that they can be pasted.
        lines += [f"   paste: {each}" for each in text["paste"]]
        for name, _ in text["files"]:
            # The copy in the rows is escaped to one line.
            own = FILES[name].splitlines()
            lines += [f"   {name}:", *(f"        {line}" for line in own if line)]
        lines += [f"   prove: {text['proof']}"] if text["proof"] else []
    return _titled(lines, rows, left_out)


def short_findings(rows: Rows, most: int = 3) -> list[list[str]]:
    """Return the first findings as lines: the message, the gain with the culprit, of the first why, and the fix."""
    found: list[list[str]] = []
    for number, (row, text) in enumerate(zip(rows, finding_texts(rows[:most]), strict=False), 1):
        lines = wrapped(f"{number}. {text['message']}", 3, 100)
        culprit = f"culprit: {text['who']}" if text["who"] else ""
        if len(row["culprit_text"]) > _LONG and row["culprit_text"] in row["message"]:
            culprit = row["where"]
        parts = [text["gain"], *([culprit] if culprit else [])]
        lines.append(clipped(f"   gain: {'; '.join(parts)}"))
        if text["why"] and number == 1:
            lines += wrapped(f"   why: {text['why']}", 8)
        names = " and ".join(name for name, _ in text["files"])
        # What can be pasted is never cut off.
        fix = " ".join(text["paste"]) + f"  ({names}: summary -v)" * bool(names)
        if fix or text["try"]:
            advice = f"   fix: {text['try']}"
            whole = [visible(f"   fix: {fix}")] if fix else wrapped(advice, 6)
            lines += whole if fix or number == 1 else [clipped(advice)]
        found.append(lines)
    return found


def brief_findings(rows: Rows, left_out: LeftOut = NOTHING) -> str:
    """Return the first findings for a terminal; empty without findings."""
    short = short_findings(rows)
    of = f"; {len(short)} of {len(rows)}" if len(rows) > len(short) else ""
    return _titled([line for lines in short for line in lines], rows, left_out, of)


def _titled(lines: list[str], rows: Rows, left_out: LeftOut, of: str = "") -> str:
    if not lines:
        return ""
    steps = max(row["steps"] for row in rows)
    title = "Findings of one step"
    if steps > 1:
        means = f"mean per step{without(named(left_out, rows))}"
        if len({row["run"] for row in rows}) == 1:
            means += f"; shares of {seconds(rows[0]['step_s'])} from step to step"
        title = f"Findings of {steps} steps ({means})"
    return "\n".join([title + of, *map(visible, lines)])
