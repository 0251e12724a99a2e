"""Views of what is moved: weights, and the data of TransferQueue."""

from __future__ import annotations

from statistics import fmean

from verl_profiler.analysis.selection import Rows, grouped, summed
from verl_profiler.analysis.tq import tq_functions
from verl_profiler.analysis.transfers import weight_transfers
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.render.charts import Spec, chart, name_bars
from verl_profiler.render.colors import PHASE_COLORS, TQ_COLORS
from verl_profiler.units import counted, seconds, share, size
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
