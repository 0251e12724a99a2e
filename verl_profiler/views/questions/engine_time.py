"""The view of requests' time in the engines: queue, pauses, prefill, decoding and what was repeated."""

from __future__ import annotations

from verl_profiler.analysis.engine_time import CALL_PARTS, UNRECORDED, request_engine_time
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import Series, Spec, chart, name_bars, panel, short, time_unit
from verl_profiler.render.colors import CALL_PART_COLORS
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, column, known

__all__ = ["VIEWS"]


def _tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = request_engine_time(
        tables, choice.steps, choice.count, worker=choice.worker, validate=choice.validate
    )
    return {"request_engine_time": rows}


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
    factor, unit = time_unit(worst["engine_s"])
    several_steps = len({row["step"] for row in rows}) > 1
    order = [
        f"{(row['request_id'] or '(no id)')[:8]}  {short(row['name'], 14)}"
        + (f"  step {row['step']}" if several_steps else "")
        for row in rows
    ]
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
        (part, column(rows, f"{part}_s", factor), CALL_PART_COLORS[part]) for part in parts
    ]
    axis = f"time of generate calls [{unit}]"
    return chart(
        title,
        f"{choice.text()}: the {counted(len(rows), 'request')} with the longest generate calls",
        panel(name_bars(order, series, axis, texts=texts, room=1.5), height=0),
        notes=[
            (
                "At the bars: tokens generated, mean batch of the replica while they were decoded, calls "
                "on another replica than the previous one, retractions."
            ),
            *([f"Not divided: {UNRECORDED}."] if any(known(rows, "undivided_s")) else []),
        ],
    )


VIEWS = (
    View(
        name="request_engine_time",
        question="How do the slowest requests spend the time of their generate calls?",
        analysis=_tables,
        columns=common("run step name request_id")
        | {
            "calls": "number of generate calls",
            "replicas": "number of replicas that served them",
            "engine_s": "time of the generate calls, in s; the parts add up to it",
            "outside_s": (
                "outside the engine server, in s; like all parts, empty if not recorded, and of the calls "
                "where it was"
            ),
            "parked_s": "the engine was paused for a weight sync, in s",
            "queue_s": "in the engine's queue, in s",
            "cold_s": (
                "prefill of tokens that the previous call had cached, in s: in proportion to "
                "cold_tokens (estimate)"
            ),
            "prefill_s": (
                "prefill of new tokens, in s; all prefill if the engine did not report cached tokens"
            ),
            "recomputed_s": (
                "lost to retractions, and prefill repeated after aborts, in s; of a retracted "
                "call, how much longer its decoding took than its tokens at the speed of the "
                "replica's other calls at that time (estimate)"
            ),
            "decode_s": "decoding, in s",
            "undivided_s": (
                "time of calls without queue and prefill times (`profiler.events.engine_timing`), in s"
            ),
            "mostly": "the largest part; empty without time",
            "tokens": "generated tokens, without each call's first one",
            "token_s": "decoding per token, in s; empty if the time of a call was not divided",
            "batch": (
                "requests in the replica's batch during decoding, mean by time; empty if the "
                "engine's part was not recorded"
            ),
            "moved": "calls that another replica served than the request's previous call",
            "cold_tokens": "prompt tokens computed again that the previous call had cached",
            "retractions": (
                "number of retractions: how often the engine removed the request from its batch"
            ),
        },
        chart=_draw,
        empty="no generate call was recorded there.",
        section="requests",
        shows="""
            A bar per request, the one with the longest generate calls on top.

            | part | |
            | --- | --- |
            | `way` | load balancer, transport and event loops |
            | `parked` | the call waited while the engine was paused, or between two attempts |
            | `queue` | the engine had accepted the call but not started it |
            | `cold` | prefill of the prefix that the request's previous call had left in a cache |
            | `prefill` | prefill of new tokens |
            | `recomputed` | the engine retracted the request, or aborted it |
            | `decode` | decoding |
            | `undivided` | calls whose queue and prefill times were not recorded |
        """,
        conclude="""
            - `decode` with a batch far above that of other requests: the replica is too full
              (`engine_load`, `routes`).
            - `decode` with the same batch as others: the request is long.
            - `cold`: calls of a conversation reach another replica, or its prefix was evicted.
            - `recomputed` or `queue`: the KV cache is too small for so many requests.
            - `parked`: weight syncs stop the request; see `staleness`.
        """,
        limits="""
            Queue and prefill exist only where the engine reports them
            (`profiler.events.engine_timing=true`); otherwise the call is `undivided`, and so is all of a
            call whose engine was not recorded. `cold` is prefill in proportion to the tokens, and
            needs cached tokens from the engine and less than half of the previous prompt in the
            cache. For a retraction, `recomputed` is the decoding time beyond that at the speed of
            the replica's other calls at that time; without such calls it stays in `decode`. The batch is
            counted from the recorded calls, not from the engine's own readings.
        """,
        takes=frozenset({"worker", "validate", "count"}),
        example="--steps 5 --slowest 30",
    ),
)
