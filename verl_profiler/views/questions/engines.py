"""Views of the engines: what the generate calls of requests consist of."""

from __future__ import annotations

from verl_profiler.analysis.engine_time import CALL_PARTS, UNRECORDED, request_engine_time
from verl_profiler.render.charts import Series, Spec, chart, name_bars
from verl_profiler.render.colors import CALL_PART_COLORS
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, request_names, view


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
