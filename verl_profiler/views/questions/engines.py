"""Views of the engines: tokens per second, what generate calls consist of, where they went."""

from __future__ import annotations

from verl_profiler.analysis.engine import replica_token_rates, request_token_rates, token_rates
from verl_profiler.analysis.engine_time import CALL_PARTS, UNRECORDED, request_engine_time
from verl_profiler.analysis.routing import routes
from verl_profiler.analysis.selection import Rows, grouped
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
    more = "" if len(cut) == len(shown) else f" (slowest and fastest 5 of {len(shown)})"
    each = name_bars(
        [row["replica"] for row in cut],
        [("", column(cut, "engine_tokens_per_s"), PART_COLORS["decode"])],
        rate,
        above=f"each replica{more}",
        texts=[f"busy {seconds(row['busy_s'])}" for row in cut],
    )
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
        f"{choice.text()}: {counted(sum(row['calls'] for row in rows), 'generate call')} in {counted(len(rows), 'step')}",
        panel(step_bars(steps, series, "tokens"), title="tokens of each step", height=150),
        panel(together, title="all replicas", height=150),
        each,
        panel(single, title="single requests", height=150),
        notes=(
            "A conversation's tokens are prompt tokens again in each later turn. Rates: of "
            "engines, per second with at least one call in progress; of a request, per second in "
            "generate calls; over the whole step, tokens of finished requests by the step's "
            "length."
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


_SHOWN = 16


@view(
    "routes",
    "Does the load balancer spread generate calls over the replicas, and why not?",
    routes,
    empty="no choice of a replica was recorded there.",
)
def _routes(data: DataTables, choice: Choice) -> Spec:
    rows = data["routes"]
    calls = sum(row["calls"] for row in rows)
    replicas: Rows = []
    for server, own in grouped(rows, "server").items():
        replicas.append(
            {
                "name": next((row["replica"] for row in own if row["replica"]), server),
                "calls": sum(row["calls"] for row in own),
                "sticky": sum(row["sticky"] for row in own),
                "excess": sum((row["excess"] or 0) * row["calls"] for row in own),
            }
        )
    replicas.sort(key=lambda replica: -replica["calls"])
    shown = replicas[:_SHOWN]
    cut = "" if len(shown) == len(replicas) else f" (first {_SHOWN} of {len(replicas)})"
    names = [replica["name"] for replica in shown]
    unbalanced = known(rows, "unbalanced")
    if len(replicas) == 1:
        title = f"All {calls:,} generate calls went to the only replica"
    else:
        sticky = share(sum(replica["sticky"] for replica in replicas) / calls)
        title = f"{sticky} of the generate calls are sticky"
    if any(unbalanced):
        title += (
            f"; {share(sum(unbalanced) / calls)} went to a replica that was not the least loaded"
        )
    series: list[Series] = [
        ("sticky", [replica["sticky"] for replica in shown], PART_COLORS["prefill"]),
        (
            "first, or moved",
            [replica["calls"] - replica["sticky"] for replica in shown],
            PART_COLORS["decode"],
        ),
    ]
    texts = [share(replica["calls"] / calls) for replica in shown]
    above = f"calls of each replica{cut}"
    panels = [name_bars(names, series, "generate calls", above=above, texts=texts)]
    if any(unbalanced):
        means = [replica["excess"] / replica["calls"] for replica in shown]
        bars = name_bars(
            names,
            [("", means, PART_COLORS["queue"])],
            "calls in flight above the least loaded replica, mean",
            above="load when a call was added",
            texts=[f"{mean:.1f}" for mean in means],
        )
        panels.append(bars)
    return chart(
        title,
        f"{choice.text()}: {calls:,} generate calls, {counted(len(replicas), 'replica')}",
        *panels,
        notes=(
            "verl sends later turns of a request to the replica that has its prefix cached (sticky). "
            "Loads are the load balancer's own counts of calls in flight, before each call."
        ),
    )
