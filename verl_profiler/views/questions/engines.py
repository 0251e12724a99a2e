"""Views of the engines: tokens per second, what generate calls consist of, where they went."""

from __future__ import annotations

from verl_profiler.analysis.engine import replica_token_rates, request_token_rates, token_rates
from verl_profiler.analysis.engine_time import CALL_PARTS, UNRECORDED, request_engine_time
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    name_bars,
    panel,
    step_bars,
    step_lines,
)
from verl_profiler.render.colors import CALL_PART_COLORS, PART_COLORS
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, request_names, view


@view(
    "token_rates",
    "How many tokens, and how many per second, by step, replica and request?",
    token_rates,
    replica_token_rates,
    request_token_rates,
    empty="no generate call was recorded there.",
)
def _tokens(data: DataTables, choice: Choice) -> Spec:
    rows = data["token_rates"]
    rates = known(rows, "engine_tokens_per_s")
    tokens = sum(known(rows, "generated_tokens"))
    title = f"{tokens:,} generated tokens"
    if rates:
        title += f", {sum(rates) / len(rates):,.0f} per second while generating"
    speeds = known(data["replica_token_rates"], "engine_tokens_per_s")
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
        "generated tokens per second",
    )
    return chart(
        title,
        f"{choice.text()}: {counted(sum(row['calls'] for row in rows), 'generate call')} in {counted(len(rows), 'step')}",
        panel(step_bars(steps, series, "tokens"), title="tokens of each step", height=180),
        panel(together, title="all replicas", height=150),
        notes=(
            "A conversation's tokens are prompt tokens again in each later turn. Rates: while "
            "generating, per second with at least one call in progress; over the whole step, tokens "
            "of finished requests by the step's length."
        ),
    )


@view(
    "request_engine_time",
    "How do the slowest requests spend the time of their generate calls?",
    request_engine_time,
    empty="no generate call was recorded there.",
    example="--steps 5",
)
def _draw(data: DataTables, choice: Choice) -> Spec:
    rows = data["request_engine_time"]
    worst = rows[0]
    title = f"The longest generate calls of a request took {seconds(worst['engine_s'])}"
    if worst["mostly"] == "undivided":
        title += "; what they consist of was not recorded"
    elif worst["mostly"] is not None:
        part = worst["mostly"]
        title += f", {share(worst[f'{part}_s'] / worst['engine_s'])} of it {CALL_PARTS[part]}"
    parts = [part for part in CALL_PARTS if any(row[f"{part}_s"] for row in rows)]
    texts = [
        ", ".join(
            [
                seconds(row["engine_s"]),
                *([f"{row['tokens']:,} tokens"] if row["tokens"] is not None else []),
                *([f"batch {row['batch']:.1f}"] if row["batch"] is not None else []),
                *([f"{row['moved']} moved"] if row["moved"] else []),
                *([counted(row["retractions"], "retraction")] if row["retractions"] else []),
            ]
        )
        for row in rows
    ]
    series: list[Series] = [
        (part, column(rows, f"{part}_s"), CALL_PART_COLORS[part]) for part in parts
    ]
    bars = name_bars(request_names(rows), series, "time of generate calls", texts=texts, form="s")
    return chart(
        title,
        f"{choice.text()}: the {counted(len(rows), 'request')} with the longest generate calls",
        bars,
        notes=[
            (
                "At the bars: tokens generated, mean batch of the replica while they were decoded, calls "
                "on another replica than the previous one, retractions."
            ),
            *([f"Not divided: {UNRECORDED}."] if any(known(rows, "undivided_s")) else []),
        ],
    )
