"""Views of the engines: what generate calls consist of, and tokens per second."""

from __future__ import annotations

from verl_profiler.analysis.engine import (
    replica_token_rates,
    request_token_rates,
    token_rates,
)
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    name_bars,
    panel,
    step_bars,
    step_lines,
    tint,
)
from verl_profiler.render.colors import PART_COLORS
from verl_profiler.units import seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, view


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
