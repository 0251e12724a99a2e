"""A view of the weights that are moved, and the tables of what is moved."""

from __future__ import annotations

from statistics import fmean

from verl_profiler.analysis.selection import Rows, grouped, summed
from verl_profiler.analysis.transfers import weight_transfers
from verl_profiler.render.charts import Spec, chart, name_bars, panel
from verl_profiler.render.colors import PHASE_COLORS
from verl_profiler.units import counted, seconds, size
from verl_profiler.views.view import Choice, DataTables, known, view

_WAYS = {
    "send": ("sends", PHASE_COLORS["update_weights"]),
    "receive": ("receives", "#0072B2"),
    "load": ("loads into the engine", "#E69F00"),
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
        f"{longest[0]} {_WAYS[longest[1]][0]} weights for "
        f"{seconds(means[longest])} per sync, the longest"
    )
    last = max(caused, key=lambda name: (caused[name], name))
    if caused[last] > 0:
        title += f"; the others wait {seconds(caused[last] / syncs)} for {last}"
    bars = name_bars(
        [f"{name} {_WAYS[way][0]}" for name, way in shown],
        [
            (way, [means[key] if key[1] == way else 0 for key in shown], code)
            for way, (_, code) in _WAYS.items()
        ],
        "time per step",
        form="s",
        texts=[_moved(groups[key]) for key in shown],
        legend=False,
        room=1.6,
    )
    more = "" if len(shown) == len(order) else f" ({len(shown)} of {len(order)})"
    return chart(
        title,
        f"{choice.text()}: {counted(syncs, 'step')} with a sync; means per step",
        panel(bars, title=f"processes that move weights{more}", height=0),
        notes=(
            "Waiting: until all ranks of the checkpoint engine take part in a bucket. Speed: of the "
            "time after that where buckets were recorded, else of the whole."
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
