"""Plots of the engines: what generate calls consist of, and tokens per second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.engine import (
    engine_parts,
    replica_token_rates,
    request_token_rates,
    token_rates,
)
from verl_profiler.render.colors import PART_COLORS
from verl_profiler.render.figure import (
    SEQUENCE,
    bars,
    end_labels,
    legend,
    sheet,
    short,
    stack,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, Sheets, View, asking, column, known, marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_PARTS = ("queue", "prefill", "decode", "engine", "outside", "unseen")
_COLORS = {**PART_COLORS, "unseen": PART_COLORS["tool_parsing"]}
_WORDS = {
    "queue": "waiting in the engine's queue",
    "prefill": "prefill",
    "decode": "decode",
    "engine": "inside the engine",
    "outside": "on the way to the engine and back",
    "unseen": "engines that were not recorded",
}


def _parts(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["engine_parts"]
    steps = sorted({row["step"] for row in rows})
    totals = {
        part: sum(row["total_s"] for row in rows if row["part"] == part)
        for part in _PARTS
        if any(row["part"] == part for row in rows)
    }
    whole = sum(totals.values())
    largest = max(totals, key=lambda part: totals[part])
    title = f"{share(totals[largest] / whole if whole else 0)} of the time of generate calls is {_WORDS[largest]}"
    if "queue" in totals and largest != "queue":
        title += f", {share(totals['queue'] / whole)} waiting in the queue"
    elif "outside" in totals and largest != "outside":
        title += f", {share(totals['outside'] / whole)} {_WORDS['outside']}"
    calls = sum(
        max(row["calls"] for row in rows if row["step"] == step and row["part"] != "unseen")
        if any(row["step"] == step and row["part"] != "unseen" for row in rows)
        else 0
        for step in steps
    ) + sum(row["calls"] for row in rows if row["part"] == "unseen")
    notes = [
        (
            "outside: from the agent loop's call to the engine's begin, and back; also waiting for the "
            "agent loop's own event loop."
        )
    ]
    if "engine" in totals and "decode" in totals:
        notes.append("engine: inside the engine, but in none of the parts that it reports.")
    elif "engine" in totals:
        notes.append(
            "These engines do not say how long requests queued, or prefill and decode took."
        )
    figure, panels = sheet(
        title,
        f"{choice.words()}: {calls:,} generate calls",
        size=(11, 5),
        panels=(1, 2),
        notes=notes,
    )
    axes = panels[0]
    heights = [sum(row["total_s"] for row in rows if row["step"] == step) for step in steps]
    per_call: list[tuple[str, list[float], str]] = []
    factor, unit = time_unit(max(heights))
    value = {(row["step"], row["part"]): row for row in rows}
    for part in totals:
        numbers = [
            value[step, part]["total_s"] * factor if (step, part) in value else 0.0
            for step in steps
        ]
        # What the engine does not report in parts looks unlike the parts that it does.
        rest = part == "engine" and "decode" in totals
        per_call.append((part, numbers, PART_COLORS["other"] if rest else _COLORS[part]))
    stack(axes, steps, per_call)
    step_axis(axes, steps)
    value_axis(axes, f"time of all calls together [{unit}]")
    legend(axes, reverse=True)
    axes.set_title("by step")
    axes = panels[1]
    names = list(totals)
    longest = max(row["max_s"] for row in rows)
    factor, unit = time_unit(longest)
    for place, part in enumerate(names):
        mine = [row for row in rows if row["part"] == part]
        low = min(row["p50_s"] for row in mine)
        axes.hlines(
            place,
            low * factor,
            max(row["max_s"] for row in mine) * factor,
            color="#B8C0C8",
            linewidth=1,
        )
        for name, tint in (("p50", 0.15), ("p95", 0.5), ("p99", 0.75), ("max", 1.0)):
            axes.plot(
                marks(mine, f"{name}_s", factor),
                [place] * len(mine),
                "|" if name == "max" else "o",
                color=SEQUENCE(tint),
                markersize=11 if name == "max" else 5,
                markeredgewidth=1.6 if name == "max" else 0.3,
                label=(name if name == "max" else name.upper()) if place == 0 else None,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    value_axis(axes, f"time of one call [{unit}]", of="x")
    legend(axes)
    axes.set_title("by call" + ("; one mark per step" if len(steps) > 1 else ""))
    return figure


def _tokens(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["token_rates"]
    replicas = sheets["replica_token_rates"]
    requests = [row for row in sheets["request_token_rates"] if row["rate_p50"] is not None]
    rates = known(rows, "engine_tokens_per_s")
    tokens = sum(known(rows, "generated_tokens"))
    title = f"{tokens:,} generated tokens"
    if rates:
        title += f", {sum(rates) / len(rates):,.0f} per second while generating"
    speeds = known(replicas, "engine_tokens_per_s")
    if len(speeds) > 1:
        title += f"; the slowest replica has {share(min(speeds) / max(speeds))} of the fastest"
    steps = [row["step"] for row in rows]
    figure, panels = sheet(
        title,
        f"{choice.words()}: {sum(row['calls'] for row in rows):,} generate calls in {len(rows)} steps",
        size=(12, 6.4),
        panels=(2, 2),
        notes=[
            (
                "A conversation's tokens are prompt tokens again in each later turn. By second: of "
                "engines while at least one call was under way; of a request by its time in generate "
                "calls; over the whole step what finished requests generated, by its length."
            )
        ],
    )
    axes = panels[0]
    cached = known(rows, "cached_tokens")
    series = [
        ("generated", column(rows, "generated_tokens"), PART_COLORS["decode"]),
        (
            "prompt, not cached" if cached else "prompt",
            [max((r["prompt_tokens"] or 0) - (r["cached_tokens"] or 0), 0) for r in rows],
            PART_COLORS["prefill"],
        ),
    ]
    if cached:
        series.append(("prompt, cached", column(rows, "cached_tokens"), PART_COLORS["other"]))
    stack(axes, steps, series)
    step_axis(axes, steps)
    value_axis(axes, "tokens")
    legend(axes, reverse=True)
    axes.set_title("tokens of each step")
    axes = panels[1]
    labels = []
    for key, name, code in (
        ("engine_tokens_per_s", "while generating", PART_COLORS["decode"]),
        ("generated_tokens_per_s", "over the whole step", "#7A3B10"),
    ):
        line = [row for row in rows if row[key] is not None]
        if line:
            axes.plot(
                [row["step"] for row in line],
                column(line, key),
                color=code,
                marker="o" if len(rows) <= 30 else None,
                markersize=3.5,
            )
            labels.append((line[-1][key], name, code))
    step_axis(axes, steps)
    value_axis(axes, "generated tokens per second")
    end_labels(axes, labels, gap=0.08)
    axes.set_title("all replicas")
    axes = panels[2]
    shown = sorted(replicas, key=lambda row: row["engine_tokens_per_s"] or 0)
    cut = shown if len(shown) <= 10 else [*shown[:5], *shown[-5:]]
    lengths = bars(
        axes,
        [short(row["replica"], 22) for row in cut],
        [("", column(cut, "engine_tokens_per_s"), PART_COLORS["decode"])],
    )
    for place, (row, length) in enumerate(zip(cut, lengths, strict=True)):
        axes.text(length, place, f"  busy {seconds(row['busy_s'])}", va="center", fontsize=8)
    value_axis(axes, "generated tokens per second", of="x")
    axes.set_xlim(0, (max(lengths) or 1) * 1.3)
    more = "" if len(cut) == len(shown) else f" (slowest and fastest 5 of {len(shown)})"
    axes.set_title(f"each replica{more}")
    axes = panels[3]
    labels = []
    for name, code in (("rate_p5", "#8FBBDD"), ("rate_p50", "#4B8CC2"), ("rate_p95", "#0B2A4F")):
        if requests:
            axes.plot(
                [row["step"] for row in requests],
                marks(requests, name),
                color=code,
                marker="o" if len(rows) <= 30 else None,
                markersize=3.5,
            )
            if requests[-1][name] is not None:
                labels.append((requests[-1][name], name.replace("rate_p", "P"), code))
    step_axis(axes, steps)
    value_axis(axes, "generated tokens per second")
    end_labels(axes, labels, gap=0.08)
    axes.set_title("single requests")
    return figure


VIEWS: dict[str, View] = {
    "engine_parts": View(
        "Do generate calls wait, prefill or decode, and how much is not the engine at all?",
        asking(engine_parts),
        _parts,
        "no generate call was recorded there.",
        frozenset({"worker", "validate"}),
    ),
    "token_rates": View(
        "How many tokens, and how many per second, by step, replica and request?",
        asking(token_rates, replica_token_rates, request_token_rates),
        _tokens,
        "no generate call was recorded there.",
        frozenset({"validate"}),
    ),
}
