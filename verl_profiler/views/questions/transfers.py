"""Views of what is moved: weights, and the data of TransferQueue."""

from __future__ import annotations

from statistics import fmean

from verl_profiler.analysis.selection import Rows, grouped, summed
from verl_profiler.analysis.tq import FAIR_MIB_S, GOOD_MIB_S, tq_functions, tq_over_time
from verl_profiler.analysis.tq_findings import HIGH_OVERHEAD, SMALL_BYTES
from verl_profiler.analysis.transfers import transfer_totals, weight_transfers
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.render.charts import Spec, chart, colored, layer, name_bars, panel, quantity
from verl_profiler.render.colors import ACCENT, GRID, MUTED, PHASE_COLORS, TQ_COLORS
from verl_profiler.units import counted, rate, seconds, share, size
from verl_profiler.views.view import Choice, DataTables, column, known, view

_WAYS = {
    "send": ("sends weights", PHASE_COLORS["update_weights"]),
    "receive": ("receives weights", "#0072B2"),
    "load": ("loads weights into the engine", "#E69F00"),
}
_PROCESSES = 16


@view(
    "weight_transfers",
    "How fast does each rank send, receive or load new weights, and who waits for whom?",
    weight_transfers,
    empty="no weights were sent there, or by an earlier version of the profiler.",
    example="--csv",
)
def _weight_transfers(data: DataTables, choice: Choice) -> Spec:
    rows = [row for row in data["weight_transfers"] if row["step"] != 0] or data["weight_transfers"]
    groups = grouped(rows, "name", "way")
    means = {key: sum(r["total_s"] for r in own) / len(own) for key, own in groups.items()}
    order = sorted(means, key=lambda key: (-means[key], key))
    shown = order[:_PROCESSES]
    caused = summed(rows, "caused_wait_s", "name")
    syncs = len({row["step"] for row in rows})
    longest = order[0]
    title = (
        f"{longest[0]} {_WAYS[longest[1]][0]} for {seconds(means[longest])} per sync, the longest"
    )
    last = max(caused, key=lambda name: (caused[name], name))
    if caused[last] > 0:
        title += f"; the others wait {seconds(caused[last] / syncs)} for {last}"
    more = "" if len(shown) == len(order) else f" ({len(shown)} of {len(order)})"
    texts = [_moved(groups[key]) for key in shown]
    bars = name_bars(
        [f"{name} {_WAYS[way][0]}" for name, way in shown],
        [
            (way, [means[key] if key[1] == way else 0 for key in shown], code)
            for way, (_, code) in _WAYS.items()
        ],
        "time per step",
        above=f"processes that move weights{more}",
        form="s",
        texts=texts,
        legend=False,
    )
    return chart(
        title,
        f"{choice.text()}: {counted(syncs, 'step')} with a sync; means per step",
        bars,
        notes=(
            "Waiting: until all ranks of the checkpoint engine take part in a bucket. Speed: of the "
            "time after that where buckets were recorded, else of the whole."
            if any(texts)
            else ()
        ),
    )


def _moved(rows: Rows) -> str:
    """Return the mean bytes, speed and waiting of a process, as far as they are known."""
    means = {
        key: fmean(known(rows, key))
        for key in ("size_bytes", "bytes_per_s", "waited_s")
        if known(rows, key)
    }
    parts = [size(means["size_bytes"])] if "size_bytes" in means else []
    parts += [f"{size(means['bytes_per_s'])}/s"] if "bytes_per_s" in means else []
    parts += [f"waits {seconds(means['waited_s'])}"] if "waited_s" in means else []
    return ", ".join(parts)


_FUNCTIONS = 16
_CALLERS = 12
_PARTS = 60
_EVENT_COLORS = {
    "tq_put": "#0072B2",
    "tq_get": "#E69F00",
    "tq_meta": "#5E3267",
    "tq_clear": "#C4C4C4",
}


@view(
    "tq_functions",
    "How much of each function's time goes to TransferQueue's gets and puts?",
    tq_functions,
    empty="no traced function was recorded there. Functions are traced with TQ_TRACE_ENABLED=1.",
)
def _functions(data: DataTables, choice: Choice) -> Spec:
    rows = data["tq_functions"]
    timed = [row for row in rows if row["overhead_share"] is not None]
    busy = [row for row in timed if not row["waits"]] or timed
    most = max(busy, key=lambda row: row["overhead_share"], default=None)
    title = "No traced call has an end"
    if most is not None:
        title = (
            f"{most['func']} spends the largest share on TransferQueue: "
            f"{share(most['overhead_share'])} of its time is get and put, "
            f"{seconds(most['total_s'] * most['overhead_share'])} in all"
        )
    shown = rows[:_FUNCTIONS]
    traced, calls = (sum(row[key] for row in rows) for key in ("traced", "calls"))
    about = f"{choice.text()} and validation: {calls:,} calls of {len(rows)} functions"
    notes = [
        (
            "A call of a bridged function gets, computes and puts sequentially; concurrent calls "
            "of one process count separately."
        )
    ]
    if traced != calls:
        notes.append(f"{traced:,} calls were traced; the others are estimated from them.")
    names = [row["func"] for row in shown]
    calls_of = name_bars(
        names,
        [(s, column(shown, f"{s}_mean_s"), TQ_COLORS[s]) for s in TQ_STAGES],
        "mean time of a call",
        above="" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} functions",
        form="s",
        texts=[
            counted(row["calls"], "call")
            + (f", {row['failed']} failed" if row["failed"] else "")
            + (
                ""
                if row["overhead_share"] is None
                else f", {share(row['overhead_share'])} get and put"
            )
            + (" (waits for others)" if row["waits"] else "")
            for row in shown
        ],
    )
    return chart(
        title,
        about,
        calls_of,
        notes=notes,
    )


@view(
    "tq_over_time",
    "When was TransferQueue slow, and which processes spend time on it?",
    tq_over_time,
    transfer_totals,
    empty="no get, put or traced function of TransferQueue was recorded there.",
    example="--steps 3:10",
)
def _over_time(data: DataTables, choice: Choice) -> Spec:
    rows, callers = data["tq_over_time"], data["transfer_totals"]
    rated = [row for row in rows if row["mib_per_s"] is not None]
    loaded = [row for row in rows if row["overhead_share"] is not None]
    sentences: list[str] = []
    if rated:
        slow = sum(row["speed"] == "poor" for row in rated)
        slowest = min(rated, key=lambda row: row["mib_per_s"])
        mean_bytes = sum(row["size_bytes"] for row in rated) / sum(
            row["transfers"] for row in rated
        )
        sentences.append(
            f"Transfers of {size(mean_bytes)} on average are too small to grade their throughput"
            if mean_bytes < SMALL_BYTES
            else f"{slow} of {len(rated)} parts of the run move less than {FAIR_MIB_S} MiB/s; the slowest "
            f"{rate(slowest['mib_per_s'])} MiB/s, {seconds(slowest['begin_s'])} after the first call"
        )
    if loaded:
        worst = max(loaded, key=lambda row: row["overhead_share"])
        sentences.append(f"get and put take {share(worst['overhead_share'])} at most")
    x = quantity("begin_s", "time after the first call", form="s", ends=(0, rows[-1]["end_s"]))
    panels = [
        *([_rates(rows, x)] if rated else []),
        *([_load(loaded, x)] if loaded else []),
        *([_callers(callers)] if callers else []),
    ]
    return chart(
        "; ".join(sentences) or "Neither rates nor functions are known",
        f"{choice.text()} and validation: {sum(row['transfers'] for row in rows):,} gets and puts, "
        f"{sum(row['calls'] for row in rows):,} traced calls",
        *panels,
        notes=(
            f"The run is divided into {_PARTS} equal intervals; a call belongs to the interval in "
            "which it starts. Rates are per call; concurrent calls move more together, and count "
            "separately in the time of callers."
        ),
    )


def _callers(rows: Rows) -> Spec:
    """Draw the time in calls by role and kind, longest first, with their number and bytes."""
    sums, of_caller = summed(rows, "total_s", "role", "event"), grouped(rows, "role", "event")
    order = sorted(sums, key=lambda key: (-sums[key], key))
    shown = order[:_CALLERS]
    texts: list[str] = []
    for key in shown:
        moved = sum(known(of_caller[key], "size_bytes"))
        number = counted(sum(row["calls"] for row in of_caller[key]), "call")
        texts.append(f"{number}, {size(moved)}" if moved else number)
    more = "" if len(shown) == len(order) else f" ({len(shown)} of {len(order)})"
    return name_bars(
        [f"{event} of {role}" for role, event in shown],
        [
            (kind, [sums[key] if key[1] == kind else 0 for key in shown], code)
            for kind, code in {event: _EVENT_COLORS.get(event, GRID) for _, event in shown}.items()
        ],
        "time of all callers together",
        above=f"time in calls{more}",
        form="s",
        texts=texts,
        legend=False,
    )


def _rates(rows: Rows, x: Spec) -> Spec:
    codes = {
        operation: TQ_COLORS[operation]
        for operation in ("get", "put")
        if known(rows, f"{operation}_mib_per_s")
    }
    by_part = {row["part"]: row for row in rows}
    length_s = rows[0]["end_s"] - rows[0]["begin_s"]
    # A part without a call is a gap, not a slope.
    points = [
        {
            "begin_s": rows[0]["begin_s"] + (part - rows[0]["part"] + 0.5) * length_s,
            "operation": operation,
            "rate": by_part.get(part, {}).get(f"{operation}_mib_per_s"),
        }
        for operation in codes
        for part in range(rows[0]["part"], rows[-1]["part"] + 1)
    ]
    top = max(known(points, "rate"))
    bounds = [
        {"rate": bound, "text": f"{name} {bound}"}
        for bound, name in ((GOOD_MIB_S, "good above"), (FAIR_MIB_S, "poor below"))
        if bound < top
    ]
    y = quantity("rate", "MiB/s")
    text = {"type": "text", "align": "right", "baseline": "bottom", "dy": -2}
    marked = [
        layer(bounds, {"type": "rule", "strokeDash": [4, 3]}, y=y),
        layer(bounds, text, x={"value": "width"}, y=y, text={"field": "text"}, color=MUTED),
    ]
    return panel(
        # Vega warns of a layer without rows.
        *(marked if bounds else ()),
        layer(
            points,
            {"type": "line", "point": {"size": 22, "filled": True}},
            tip=("begin_s", "operation", "rate"),
            x=x,
            y=y,
            color=colored("operation", codes),
        ),
        title="throughput of gets and puts",
        height=150,
    )


def _load(rows: Rows, x: Spec) -> Spec:
    drawn = [
        {
            "begin_s": row["begin_s"],
            "end_s": row["end_s"],
            "zero": 0,
            "share": row["overhead_share"],
            "level": "high" if row["overhead_share"] > HIGH_OVERHEAD else "not high",
        }
        for row in rows
    ]
    top = max(HIGH_OVERHEAD * 1.1, *known(rows, "overhead_share"))
    y = quantity("share", "share of calls' time", form="%", ends=(0, top))
    levels = {"high": ACCENT, "not high": GRID}
    return panel(
        layer(
            drawn,
            {"type": "rect", "stroke": "white", "strokeWidth": 0.4},
            tip=("begin_s", "share"),
            x=x,
            x2={"field": "end_s"},
            y=y,
            y2={"field": "zero"},
            color=colored("level", levels, legend=False),
        ),
        layer([{"share": HIGH_OVERHEAD}], {"type": "rule", "strokeDash": [4, 3]}, y=y),
        title=f"get and put in the time of functions; above {share(HIGH_OVERHEAD)} is high",
        height=120,
    )
