"""Views of what is moved: TransferQueue data and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.transfers import weight_sync, weight_transfers
from verl_profiler.render.axes import (
    step_lines,
    time_unit,
)
from verl_profiler.render.bars import bar_texts, colored_bars
from verl_profiler.render.colors import PHASE_COLORS
from verl_profiler.render.figure import sheet, short
from verl_profiler.units import counted, seconds, share, size
from verl_profiler.views.columns import common
from verl_profiler.views.view import (
    Choice,
    DataTables,
    Section,
    View,
    asking,
    known,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["TABLES", "VIEWS"]

_WEIGHT_LINES = (
    ("trainer_s", "whole sync (trainer)", PHASE_COLORS["update_weights"]),
    ("slowest_rank_s", "slowest rank", "#0072B2"),
    ("transfer_s", "transfer", "#E69F00"),
    ("release_s", "memory released", "#CC79A7"),
    ("resume_s", "memory resumed", "#5E3267"),
)


def _weights(data: DataTables, choice: Choice) -> Figure:
    # At start-up, before the first step, engines and buffers are made in the sync.
    first = [row for row in data["weight_sync"] if row["step"] == 0]
    rows = [row for row in data["weight_sync"] if row["step"] != 0] or first
    wholes = known(rows, "trainer_s") or known(rows, "slowest_rank_s")
    title = f"A weight sync takes {seconds(sum(wholes) / len(wholes))}"
    if len(wholes) > 1:
        title += f" on average, {seconds(max(wholes))} at most"
    both = [row for row in rows if row["trainer_s"] and row["transfer_s"] is not None]
    if both:
        part = sum(row["transfer_s"] for row in both) / sum(row["trainer_s"] for row in both)
        title += f"; {share(part)} of it is the transfer itself"
    notes = ["Ranks and memory: the slowest process. They overlap and do not add up to the sync."]
    if first and rows is not first:
        length = first[0]["trainer_s"] or first[0]["slowest_rank_s"]
        notes.append(f"Not drawn: the sync of start-up, {seconds(length)}.")
    figure, (axes,) = sheet(
        title,
        f"{choice.text()}: {counted(len(rows), 'step')} with a sync",
        size=(10.5, 4.8),
        notes=notes,
    )
    steps = [row["step"] for row in rows]
    longest = max(
        (value for row in rows for key, _, _ in _WEIGHT_LINES if (value := row[key])), default=0
    )
    factor, unit = time_unit(longest)
    step_lines(
        axes,
        [(rows, *line) for line in _WEIGHT_LINES],
        steps,
        f"time [{unit}]",
        factor=factor,
        markersize=4,
    )
    return figure


_WAYS = {
    "send": ("sends", PHASE_COLORS["update_weights"]),
    "receive": ("receives", "#0072B2"),
    "load": ("passes to its engine", "#E69F00"),
}
_PROCESSES = 16


def _weight_transfers(data: DataTables, choice: Choice) -> Figure:
    rows = [row for row in data["weight_transfers"] if row["step"] != 0] or data["weight_transfers"]
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["name"], row["way"]), []).append(row)
    means = {key: sum(r["total_s"] for r in own) / len(own) for key, own in groups.items()}
    order = sorted(means, key=lambda key: (-means[key], key))
    shown = order[:_PROCESSES]
    caused: dict[str, float] = {}
    for row in rows:
        caused[row["name"]] = caused.get(row["name"], 0.0) + (row["caused_wait_s"] or 0)
    syncs = len({row["step"] for row in rows})
    longest = order[0]
    title = (
        f"{short(longest[0], 24)} {_WAYS[longest[1]][0]} weights for "
        f"{seconds(means[longest])} per sync, the longest"
    )
    last = max(caused, key=lambda name: (caused[name], name))
    if caused[last] > 0:
        title += f"; the others wait {seconds(caused[last] / syncs)} for {short(last, 24)}"
    figure, (axes,) = sheet(
        title,
        f"{choice.text()}: {counted(syncs, 'step')} with a sync; means per step",
        size=(11, 1.6 + 0.36 * len(shown)),
        notes=(
            "Waiting: until all ranks of the checkpoint engine take part in a bucket. Speed: of the "
            "time after that where buckets were recorded, else of the whole."
        ),
    )
    factor, unit = time_unit(max(means.values()))
    lengths = colored_bars(
        axes,
        [f"{short(name, 22)} {_WAYS[way][0]}" for name, way in shown],
        [means[key] * factor for key in shown],
        [_WAYS[way][1] for _, way in shown],
    )
    texts: list[str] = []
    for key in shown:
        own = groups[key]
        sizes, speeds = known(own, "size_bytes"), known(own, "bytes_per_s")
        waits = known(own, "waited_s")
        parts = [size(sum(sizes) / len(sizes))] if sizes else []
        parts += [f"{size(sum(speeds) / len(speeds))}/s"] if speeds else []
        parts += [f"waits {seconds(sum(waits) / len(waits))}"] if waits else []
        texts.append(", ".join(parts))
    bar_texts(axes, lengths, texts, f"time per step [{unit}]", room=1.6)
    more = "" if len(shown) == len(order) else f" ({len(shown)} of {len(order)})"
    axes.set_title(f"processes that move weights{more}")
    return figure


VIEWS = (
    View(
        name="weight_sync",
        question="How long does it take to send new weights to the engines?",
        analysis=asking(weight_sync),
        columns=common("run step")
        | {
            "trainer_s": (
                "the whole sync by the trainer's timer, in s; empty, like all columns, if not "
                "recorded"
            ),
            "slowest_rank_s": "the slowest rank's part, in s",
            "slowest_rank": "process of that rank",
            "transfer_s": "the transfer, slowest rank, in s",
            "release_s": "release of device memory, slowest process, in s",
            "resume_s": "resume of device memory, slowest process, in s",
        },
        draw=_weights,
        empty="no weight sync was recorded there.",
        section="weights",
        shows="""
            By step: the whole sync as the trainer times it, the slowest rank's part, the
            transfer itself, and release and resume of device memory.
        """,
        conclude="""
            - The transfer is nearly all of it: bandwidth, or the bucket size.
            - The sync is much longer than the transfer: sleep and wake-up of the engines, or
              waiting for one of them.
            - The first sync is longer than the others: it creates buffers and connections.
        """,
        limits="""
            The lines overlap in time and are not additive. Step 0 has no timer of the trainer: its
            sync is part of start-up.
        """,
    ),
    View(
        name="weight_transfers",
        question="How fast does each rank send, receive or load new weights, and who waits for whom?",
        analysis=asking(weight_transfers),
        columns=common("run step name role size_bytes")
        | {
            "way": (
                "`send` or `receive` through a checkpoint engine; `load`: the adapter passes them "
                "to its engine, with hybrid replicas from the trainer's own rank"
            ),
            "buckets": "number of buckets; empty where the engine has none or they are not recorded",
            "tensors": "number of tensors",
            "total_s": "the whole of it, in s",
            "moving_s": (
                "part of it in which buckets move: after all ranks have come, or their loading, in "
                "s; empty without buckets"
            ),
            "waited_s": "part of it until all ranks take part in each bucket, in s",
            "caused_wait_s": "how long the other ranks together waited for this one, in s",
            "bytes_per_s": "bytes per second of `moving_s`, or else of `total_s`",
        },
        draw=_weight_transfers,
        empty="no weights were sent there, or by an earlier version of the profiler.",
        section=Section(
            "weight_transfers",
            "Weight transfers",
            "bytes and speed of each rank in the weight sync, and which rank the others wait for",
        ),
        shows="""
            The time of each process that sends, receives or loads weights, mean per step, with
            bytes, speed, and waiting for the other ranks.
        """,
        conclude="""
            - The sender causes the waiting: it gathers the weights more slowly than they are sent;
              larger buckets do not help.
            - A receiver causes it: its engine loads a bucket more slowly than the next one comes, and
              all others wait for it.
            - No one waits and the speed is far below that of the network: larger buckets
              (`actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes`), or a
              faster checkpoint engine.
        """,
        limits="""
            Buckets are recorded of the NCCL, HCCL, NIXL, Mooncake and Kimi engines, of the rehearsal's
            gloo engine, and where SGLang's adapter passes them to its engine; of others only the whole
            is known, and of the `mooncake`, `kimi_ckpt_engine` and `delta_sharded` senders not the bytes.
            With NIXL and Mooncake, a sender's bucket is its wait until the other side has read it. One
            that NIXL receives ends when the receiver notices, which first passes on the one before.
            With Kimi, a bucket is its broadcast among the ranks that receive, by the one that read it.
            With NCCL, a bucket ends when its broadcast is enqueued, not when it is on the other side.
            Waiting is of the first 64 buckets of a sync; the later ones count as moving.
            Ranks on other hosts: to the accuracy of the clocks' alignment.
        """,
        labels={"way": "what", "moving_s": "moving", "caused_wait_s": "others waited for it"},
        example="--csv",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "transfer_totals": common(
        "run step role event calls failed total_s p95_s max_s size_bytes rows"
    ),
}
