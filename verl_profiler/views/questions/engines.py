"""Views of the engines: what generate calls consist of, and tokens per second."""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.engine import (
    engine_parts,
    replica_token_rates,
    request_token_rates,
    token_rates,
)
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    colored,
    layer,
    name_bars,
    names,
    panel,
    quantity,
    step_bars,
    step_lines,
    time_unit,
    tint,
)
from verl_profiler.render.colors import GRID, PART_COLORS
from verl_profiler.units import seconds, share
from verl_profiler.views.view import Choice, DataTables, View, asking, column, known

__all__ = ["VIEWS"]

_PARTS = ("queue", "prefill", "decode", "engine", "outside", "unseen")
_COLORS = {**PART_COLORS, "unseen": PART_COLORS["tool_parsing"]}
_MARKS = {"p50": "P50", "p95": "P95", "p99": "P99", "max": "max"}
# Places of marks on their axis.
_PLACES = 150
_WORDS = {
    "queue": "waiting in the engine's queue",
    "prefill": "prefill",
    "decode": "decode",
    "engine": "inside the engine",
    "outside": "in transport to the engine and back",
    "unseen": "engines that were not recorded",
}


def _parts(data: DataTables, choice: Choice) -> Spec:
    rows = data["engine_parts"]
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
            "outside: from the agent loop's call to the engine's start, and back; includes waiting "
            "for the agent loop's own event loop."
        )
    ]
    if "engine" in totals and "decode" in totals:
        notes.append("engine: inside the engine, but in none of the components that it reports.")
    elif "engine" in totals:
        notes.append("These engines do not report queue, prefill and decode times.")
    heights = [sum(row["total_s"] for row in rows if row["step"] == step) for step in steps]
    factor, unit = time_unit(max(heights))
    value = {(row["step"], row["part"]): row["total_s"] * factor for row in rows}
    series: list[Series] = [
        (
            part,
            [value.get((step, part)) for step in steps],
            # What the engine does not report in parts is drawn unlike the parts that it does.
            PART_COLORS["other"] if part == "engine" and "decode" in totals else _COLORS[part],
        )
        for part in totals
    ]
    bars = step_bars(steps, series, f"time of all calls together [{unit}]")
    by_call = "by call" + ("; one mark per step" if len(steps) > 1 else "")
    return chart(
        title,
        f"{choice.text()}: {calls:,} generate calls",
        panel(bars, title="by step"),
        panel(_by_call(rows, list(totals)), title=by_call, height=34 * len(totals)),
        notes=notes,
    )


def _by_call(rows: Rows, parts: list[str]) -> list[Spec]:
    """Mark percentiles of each component on a line up to its longest call."""
    longest = max(row["max_s"] for row in rows)
    factor, unit = time_unit(longest)
    # Marks that would cover each other are drawn once.
    marks: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        for name, text in _MARKS.items():
            took = row[f"{name}_s"]
            if took is not None:
                place = row["part"], name, round(_PLACES * took / (longest or 1))
                mark = {"part": row["part"], "mark": text, "step": row["step"]}
                marks.setdefault(place, mark | {"time": took * factor})
    x, y = quantity("time", f"time of one call [{unit}]"), names("part", parts)
    found = [mark["mark"] for mark in marks.values()]
    codes = {
        text: tint(place)
        for text, place in zip(_MARKS.values(), (0.15, 0.5, 0.75, 1.0), strict=True)
        if text in found
    }
    ranges = [
        {"part": part, "time": min(times), "to": max(times)}
        for part in parts
        for times in [[mark["time"] for mark in marks.values() if mark["part"] == part]]
    ]
    drawn = [layer(ranges, {"type": "rule", "color": GRID}, x=x, x2={"field": "to"}, y=y)]
    for mark, longest_ones in (
        ({"type": "point", "filled": True, "size": 40}, False),
        ({"type": "tick", "thickness": 2, "size": 16}, True),
    ):
        own = [each for each in marks.values() if (each["mark"] == "max") == longest_ones]
        drawn.append(
            layer(
                own,
                mark,
                tip=("part", "step", "mark", "time"),
                x=x,
                y=y,
                color=colored("mark", codes),
            )
        )
    return drawn


def _tokens(data: DataTables, choice: Choice) -> Spec:
    rows = data["token_rates"]
    replicas = data["replica_token_rates"]
    requests = [row for row in data["request_token_rates"] if row["rate_p50"] is not None]
    rates = known(rows, "engine_tokens_per_s")
    tokens = sum(known(rows, "generated_tokens"))
    title = f"{tokens:,} generated tokens"
    if rates:
        title += f", {sum(rates) / len(rates):,.0f} per second while generating"
    speeds = known(replicas, "engine_tokens_per_s")
    if len(speeds) > 1:
        title += f"; the slowest replica has {share(min(speeds) / max(speeds))} of the fastest"
    steps = [row["step"] for row in rows]
    cached = len(known(rows, "cached_tokens")) == len(rows)
    series: list[Series] = [
        ("generated", column(rows, "generated_tokens"), PART_COLORS["decode"]),
        (
            "prompt, not cached" if cached else "prompt",
            [max((r["prompt_tokens"] or 0) - cached * (r["cached_tokens"] or 0), 0) for r in rows],
            PART_COLORS["prefill"],
        ),
    ]
    if cached:
        series.append(("prompt, cached", column(rows, "cached_tokens"), PART_COLORS["other"]))
    rate = "generated tokens per second"
    together = step_lines(
        steps,
        [
            ("while generating", rows, "engine_tokens_per_s", PART_COLORS["decode"]),
            (
                "over the whole step",
                rows,
                "generated_tokens_per_s",
                PART_COLORS["tool_parsing"],
                [6, 3],
            ),
        ],
        rate,
    )
    shown = sorted(replicas, key=lambda row: row["engine_tokens_per_s"] or 0)
    cut = shown if len(shown) <= 10 else [*shown[:5], *shown[-5:]]
    each = name_bars(
        [row["replica"] for row in cut],
        [("replica", column(cut, "engine_tokens_per_s"), PART_COLORS["decode"])],
        rate,
        texts=[f"busy {seconds(row['busy_s'])}" for row in cut],
        legend=False,
    )
    more = "" if len(cut) == len(shown) else f" (slowest and fastest 5 of {len(shown)})"
    single = step_lines(
        steps,
        [
            (name.replace("rate_p", "P"), requests, name, tint(place))
            for name, place in (("rate_p5", 0.25), ("rate_p50", 0.5), ("rate_p95", 1.0))
        ],
        rate,
    )
    return chart(
        title,
        f"{choice.text()}: {sum(row['calls'] for row in rows):,} generate calls in {len(rows)} steps",
        panel(step_bars(steps, series, "tokens"), title="tokens of each step", height=150),
        panel(together, title="all replicas", height=150),
        panel(each, title=f"each replica{more}", height=0),
        panel(single, title="single requests", height=150),
        notes=(
            "A conversation's tokens are prompt tokens again in each later turn. Rates: of "
            "engines, per second with at least one call in progress; of a request, per second in "
            "generate calls; over the whole step, tokens of finished requests by the step's "
            "length."
        ),
    )


VIEWS = (
    View(
        name="engine_parts",
        question="How long do generate calls queue, prefill and decode, and how much time is outside the engine?",
        analysis=asking(engine_parts),
        chart=_parts,
        empty="no generate call was recorded there.",
        section="rollout",
        takes=frozenset({"worker", "validate"}),
        example="--validate",
    ),
    View(
        name="token_rates",
        question="How many tokens, and how many per second, by step, replica and request?",
        analysis=asking(token_rates, replica_token_rates, request_token_rates),
        chart=_tokens,
        empty="no generate call was recorded there.",
        section="workers",
        takes=frozenset({"validate"}),
    ),
)
