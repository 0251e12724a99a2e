"""A run on one screen: verdict, what to change first, phases, requests, and data-quality warnings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import quantile_texts, seconds, share
from verl_profiler.views.findings import finding_texts
from verl_profiler.views.ledger_text import ledger_lines
from verl_profiler.views.step_text import of_which
from verl_profiler.views.training_text import device_line, price_sentence

__all__ = ["TABLES", "overview_text"]

Rows = Sequence[Mapping[str, Any]]

# What an overview is made of.
TABLES = (
    "bubble_ledger",
    "device_use",
    "step_times",
    "phase_totals",
    "request_totals",
    "request_parts",
    "slowest_requests",
    "tool_latencies",
    "own_spans",
    "profiler_cost",
)

_FINDINGS = 3
_TOOLS = 3
_WARNINGS = 3
_WIDTH = 100
# Phases below this share of the steps are combined into one line.
_SMALL = 0.02
_BOLD, _DIM, _YELLOW, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[0m"


def overview_text(
    found: Mapping[str, Rows],
    about: Mapping[str, Any],
    findings: Rows,
    problems: Sequence[str],
    left_out: Sequence[int] = (),
    *,
    color: bool = False,
    price: float | None = None,
) -> str:
    """Return a run's overview.

    Args:
        found: Rows by name, of `TABLES`.
        about: `runs` (labels), `events` (how many) and `notes` (of the reader).
        findings: Rows of `views.findings.findings`.
        problems: Data-quality warnings.
        left_out: The steps that means leave out; `phase_totals` is without them.
        color: With ANSI codes for a terminal.
        price: Of a GPU-hour, if device time is shown in money.
    """
    paint = _painted if color else _plain
    heads: list[str] = []
    blocks: list[str] = []
    for run in about["runs"]:
        own = {name: [row for row in rows if row["run"] == run] for name, rows in found.items()}
        heads.append(paint(visible(_headline(run, own, left_out)), _BOLD))
        blocks.append(_details(own, left_out, price))
        if len(about["runs"]) > 1:
            blocks[-1] = f"{visible(run)}\n{blocks[-1]}"
    change = _changes(findings, found, about, paint)
    warnings = _warnings(problems, paint)
    notes = [textwrap.fill(visible(f"Note: {note}"), _WIDTH) for note in about["notes"]]
    every = ("\n".join(heads), change, *blocks, *notes, warnings)
    return "\n\n".join(block for block in every if block) + "\n"


def _plain(text: str, _code: str) -> str:
    return text


def _painted(text: str, code: str) -> str:
    return f"{code}{text}{_RESET}"


def _changes(
    findings: Rows, found: Mapping[str, Rows], about: Mapping[str, Any], paint: Any
) -> str:
    if not findings:
        finished = sum(row["finished"] for row in found["step_times"] if row["step"] > 0)
        if finished < 1 or about["notes"]:
            return ""
        return paint("No single change is worth 3 % of a step.", _BOLD)
    texts = finding_texts([dict(row) for row in findings])
    lines = [paint("What to change first (gains per step, not additive)", _BOLD)]
    for number, text in enumerate(texts[:_FINDINGS], 1):
        wrapped = textwrap.wrap(
            visible(f"{number}. {text['message']}"), _WIDTH, subsequent_indent="   "
        )
        lines += [paint(line, _YELLOW) for line in wrapped]
        lines += _wrapped("gain", text["gain"])
        lines += _wrapped("culprit", text["who"])
        fix = " ".join(text["paste"])
        if text["files"]:
            names = " and ".join(name for name, _ in text["files"])
            fix += f"  ({names}: summary -v)"
        lines += [visible(f"   fix: {fix}")] if fix else _wrapped("fix", text["try"])
    if len(texts) > _FINDINGS:
        lines.append(f"   and {len(texts) - _FINDINGS} more: summary -v")
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        visible(text), _WIDTH, initial_indent=f"   {label}: ", subsequent_indent="        "
    )


def _device_lines(
    found: Mapping[str, Rows], left_out: Sequence[int], price: float | None
) -> list[str]:
    ledger, use = (
        [row for row in found[name] if row["step"] not in left_out] or found[name]
        for name in ("bubble_ledger", "device_use")
    )
    lines = [*ledger_lines(found["bubble_ledger"], left_out), device_line(use)]
    if price is not None:
        lines.append(price_sentence(ledger, use, price))
    return [line for line in lines if line]


def _details(found: Mapping[str, Rows], left_out: Sequence[int], price: float | None) -> str:
    phases = _phases(found["phase_totals"])
    lines = [phases] if phases else []
    lines += [
        visible(f"{label:<12}{text}")
        for label, text in (
            *zip(
                ["devices", *[""] * 9],
                _device_lines(found, left_out, price),
                strict=False,
            ),
            ("requests", _requests(found)),
            ("slowest", _slowest(found)),
            ("tools", _tools(found["tool_latencies"])),
            ("your spans", _spans(found["own_spans"])),
            ("profiler", _cost(found["profiler_cost"])),
        )
        if text
    ]
    return "\n".join(lines)


def _headline(run: str, found: Mapping[str, Rows], left_out: Sequence[int]) -> str:
    finished = [row for row in found["step_times"] if row["finished"]]
    lengths = [row["duration_s"] for row in finished]
    if not lengths:
        seen = max((row["seen_s"] or 0 for row in found["step_times"]), default=0)
        return f"{run}: no finished steps; {seconds(seen)} were recorded"
    text = f"{run}: {len(lengths)} step{'s' * (len(lengths) > 1)}, {seconds(sum(lengths))}"
    if len(lengths) > 1:
        steady = [row for row in finished if row["step"] not in left_out] or finished
        lengths = [row["duration_s"] for row in steady]
        longest = max(steady, key=lambda row: row["duration_s"])
        text += (
            f"; mean {seconds(sum(lengths) / len(lengths))}, {seconds(min(lengths))} to "
            f"{seconds(longest['duration_s'])} (step {longest['step']})"
        )
        warm_up = [row for row in finished if row["step"] in left_out]
        text += "".join(
            f"; means without step {row['step']} ({seconds(row['duration_s'])})" for row in warm_up
        )
    return text


def _phases(rows: Rows) -> str:
    if not rows:
        return ""
    large = [row for row in rows if (row["share"] or 0) >= _SMALL]
    small = [row for row in rows if (row["share"] or 0) < _SMALL]
    several = rows[0]["steps"] > 1
    lines = [["phase", "mean" if several else "time", "share", *(["longest"] if several else [])]]
    lines += [
        [
            row["phase"],
            seconds(row["mean_s"]),
            share(row["share"]),
            *([f"{seconds(row['max_s'])} (step {row['max_step']})"] if several else []),
        ]
        for row in large
    ]
    if small:
        total = sum(row["mean_s"] for row in small)
        names = ", ".join(row["phase"] for row in small[:4]) + (", …" if len(small) > 4 else "")
        lines.append([names, seconds(total), share(sum(row["share"] or 0 for row in small))])
    return align(lines, left=(0, 3), indent="")


def _requests(found: Mapping[str, Rows]) -> str:
    if not found["request_totals"]:
        return ""
    (row,) = found["request_totals"]
    names = ("p50", "p95", "p99", "max")
    times = zip(names, quantile_texts(row, *names), strict=True)
    text = f"{row['requests']:,}: " + "  ".join(f"{name} {value}" for name, value in times)
    if row["mean_turns"] is not None:
        text += f"; {row['mean_turns']:.1f} turns"
    sums: dict[str, float] = {}
    for part in found["request_parts"]:
        if not part["validate"]:
            sums[part["part"]] = sums.get(part["part"], 0.0) + (part["total_s"] or 0)
    total = sum(sums.values())
    largest = sorted(sums.items(), key=lambda item: -item[1])[:3]
    if total:
        text += "; " + ", ".join(
            f"{share(spent / total)} {part}" for part, spent in largest if spent
        )
    bad = [f"{row[key]:,} {key}" for key in ("failed", "unfinished") if row[key]]
    return ", ".join([text, *bad])


def _slowest(found: Mapping[str, Rows]) -> str:
    rows = [row for row in found["slowest_requests"] if row["duration_s"] is not None]
    if not rows:
        return ""
    row = max(rows, key=lambda each: each["duration_s"])
    name = (row["request_id"] or "(no id)")[:8]
    text = f"request {name}, step {row['step']}, {row['name']}: {seconds(row['duration_s'])}"
    return text + of_which(row)


def _tools(rows: Rows) -> str:
    texts: list[str] = []
    for row in rows[:_TOOLS]:
        about = "≈ " if row["estimated"] else ""
        text = f"{row['tool']} {about}{row['calls']:,} × p50 {seconds(row['p50_s'])} max {seconds(row['max_s'])}"
        texts.append(text + (f", {row['failed']:,} failed" if row["failed"] else ""))
    more = [f"and {len(rows) - _TOOLS} more"] if len(rows) > _TOOLS else []
    return "; ".join([*texts, *more])


def _spans(rows: Rows) -> str:
    texts = [
        f"{row['event']} {row['calls']:,} × p50 {seconds(row['p50_s'])} max {seconds(row['max_s'])}"
        + (f", {row['failed']:,} failed" if row["failed"] else "")
        for row in rows[:_TOOLS]
    ]
    more = [f"and {len(rows) - _TOOLS} more"] if len(rows) > _TOOLS else []
    return "; ".join([*texts, *more])


def _cost(rows: Rows) -> str:
    shares = [row for row in rows if row["share"] is not None]
    if not shares:
        return ""
    row = max(shares, key=lambda each: each["share"])
    return f"at most {share(row['share'])} of a step ({row['costliest']}, step {row['step']})"


def _warnings(problems: Sequence[str], paint: Any) -> str:
    if not problems:
        return "Data quality: no problems found in the files."
    lines = [paint("Data-quality warnings", _BOLD)]
    for problem in problems[:_WARNINGS]:
        lines += textwrap.wrap(
            visible(problem), _WIDTH, initial_indent="  - ", subsequent_indent="    ",
            max_lines=3, placeholder=" … (-v)",
        )  # fmt: skip
    if len(problems) > _WARNINGS:
        lines.append(f"  - and {len(problems) - _WARNINGS} more: summary -v")
    return "\n".join(lines)
