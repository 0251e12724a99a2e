"""The view of devices: what each second of theirs went to."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.explain.ledger import (
    ACCOUNTS,
    POOLS,
    USEFUL,
    account_totals,
    bubble_ledger,
)
from verl_profiler.analysis.selection import Rows, named, steady, warm_ups
from verl_profiler.render.charts import Series, Spec, chart, panel, step_bars
from verl_profiler.render.colors import account_color
from verl_profiler.render.text import without
from verl_profiler.units import counted, share
from verl_profiler.views.columns import common
from verl_profiler.views.ledger_text import pool_text
from verl_profiler.views.view import Choice, DataTables, View, asking

__all__ = ["TABLES", "VIEWS"]

_NAMES = {account: account.replace("_", " ") for account in ACCOUNTS}
# Accounts below this share of a pool are in the table, and not in the plot.
_SMALL = 0.002
# Pieces of bars of a pool.
_PIECES = 1_500


def _ledger(data: DataTables, choice: Choice) -> Spec:
    rows = data["bubble_ledger"]
    steps = sorted({row["step"] for row in rows})
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    left_out = warm_ups(rows, choice.steps)
    kept = steady(rows, left_out)
    sums = account_totals(kept)
    total = sum(sums.values())
    useful = sum(sums.get(account, 0.0) for account in USEFUL)
    lost = {account: spent for account, spent in sums.items() if account not in USEFUL}
    title = f"{share(useful / total)} of device time is training and consumed generation"
    if lost:
        largest = max(lost, key=lambda account: lost[account])
        title += f"; next is {_NAMES[largest]}, {share(lost[largest] / total)}"
    of_pool = {row["pool"]: pool_text(row) for row in rows}
    return chart(
        title,
        f"{choice.text()}: {counted(len(steps), 'step')}{without(named(left_out, rows))}; {', '.join(of_pool.values())}",
        *[
            panel(
                _bars([row for row in rows if row["pool"] == pool], steps),
                title=POOLS[pool] if len(pools) > 1 else "",
                height=200,
            )
            for pool in pools
        ],
        notes=(
            "Every device-second is attributed to exactly one account, from the start of a step to the start of the next."
        ),
    )


def _bars(rows: Rows, steps: list[int]) -> list[Spec]:
    shares = {(row["step"], row["account"]): row["share"] for row in rows}
    sums = account_totals(rows)
    series: list[Series] = [
        (_NAMES[account], [shares.get((step, account)) for step in steps], account_color(account))
        for account in sums
        if sums[account] >= _SMALL * sum(sums.values())
    ]
    return step_bars(steps, series, "share of device time", form="%", most=_PIECES)


_ACCOUNT_TABLE = "\n".join(
    ["| account | what the device time is spent on |", "| --- | --- |"]
    + [f"| `{account}` | {text} |" for account, text in ACCOUNTS.items()]
)

VIEWS = (
    View(
        name="bubble_ledger",
        question="How much of the device time is useful work, and what is the rest spent on?",
        analysis=asking(bubble_ledger),
        columns=common("run step")
        | {
            "pool": "`shared` (trainer and replicas on the same devices), `trainer` or `rollout`",
            "account": "what the time went to",
            "devices": "number of devices of the pool",
            "device_s": (
                "device-seconds, in s; the accounts of a pool and step add up to its devices times "
                "the step's time"
            ),
            "share": "part of the pool's time in the step",
        },
        chart=_ledger,
        empty="no step finished there.",
        section="devices",
        shows=f"""\
The device-seconds of each pool and step, from the start of the step to the start of the next, by account.
Generate calls that a replica runs at the same time share its devices' time evenly.

{_ACCOUNT_TABLE}""",
        conclude="""
            - A long `waiting_for_samples`: rollout bounds the run. On shared devices it is the time
              in which some replicas have no calls left while others still run, plus polling.
            - A long `staleness_limit`: the trainer bounds the run; the rollout is ahead of what may
              be consumed.
            - A long `rollout_idle`: tools, rewards, or an uneven distribution over replicas.
            - `generating_dropped` and `generating_aborted`: work that is done twice.
            - `weight_sync`: both pools wait.
        """,
        limits="""
            It counts time, not speed: a replica with a single call counts as generating. Devices
            are counted by the trainer's ranks; each replica has an equal share. Whether a sample
            was consumed is recorded by the step that consumed it; in older runs without that
            record, every call counts as `generating`. Without recorded engines the client's calls
            are used, including transport.
        """,
    ),
)

_GPU_WORK = {
    "launches": "number of kernels, graphs and copies that were launched inside",
    "gpu_s": "time of these kernels, graphs and copies on the GPU, in s, whenever they ran",
}

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "range_times": common("run step name event total_s max_s")
    | {
        "domain": "NVTX domain",
        "ranges": "number of ranges",
        **_GPU_WORK,
    },
    "span_kernels": common("run step name event request_id turn duration_s")
    | {
        **_GPU_WORK,
    },
    "top_kernels": common("run step name max_s")
    | {
        "kernel": "name of the kernel",
        "kind": "kind of GPU work",
        "launches": "number of launches",
        "total_s": "time on the GPU, in s",
        "share": "part of all GPU work of the process in the step",
    },
    "gpu_idle": common("run step")
    | {
        "host": "host of the GPU",
        "gpu": "name of the device",
        "processes": "captured processes that used it",
        "captured_s": "length of the capture, in s",
        "busy_s": "time of the capture with any GPU work, in s",
        "idle_share": "part of the capture without GPU work",
        "gen_s": (
            "part of `gen` inside the capture, in s; empty if the trainer's `gen` of the step was "
            "not recorded or is outside the capture"
        ),
        "gen_busy_s": "time of that with any GPU work, in s",
        "gen_idle_share": "part of gen_s without GPU work",
    },
}
