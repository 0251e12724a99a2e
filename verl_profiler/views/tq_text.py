"""The TransferQueue report as text: findings first, then functions, stages, rates, steps, data.

In Chinese, functions and totals follow the format of the report in verl's TransferQueue guide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.rules import TEXTS
from verl_profiler.analysis.tq import tq_load
from verl_profiler.analysis.tq_findings import finding_lines
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, rate, seconds, share, size
from verl_profiler.views.text_tables import Rows, table_text, warnings

_WIDTH = 80
_CONCURRENT = 1.005
_ROWS = 30
_PATHS = 8

_QUANTILES = ("p50_s", "p95_s", "max_s")
_LOAD = (
    "total_s",
    "get_s",
    "compute_s",
    "put_s",
    "overhead_share",
    "size_bytes",
    "get_mib_per_s",
    "put_mib_per_s",
)
# What is shown of each table, below its title.
_TABLES = {
    "tq_functions": (
        "functions",
        ("func", "calls", "failed", "total_s", "mean_s", *_QUANTILES, "get_share", "compute_share",
         "put_share", "overhead_share"),
    ),
    "tq_throughput": (
        "gets and puts",
        ("event", "caller", "calls", "size_bytes", "mean_bytes", "mib_per_s", "p5_mib_per_s",
         "p50_mib_per_s", "speed", "good_share", "fair_share", "poor_share"),
    ),
    "tq_steps": ("steps", ("step", "calls", "transfers", *_LOAD)),
    "tq_over_time": ("over time", ("begin_s", "calls", "transfers", *_LOAD)),
    "tq_paths": ("same data, by trace id", ("trace_ids", "calls", "p50_s", "max_s", "waiting_share", "path")),
}  # fmt: skip


def tq_report(
    tables: Mapping[str, Rows], run: str, problems: Sequence[str], *, language: str = "en"
) -> str:
    """Return the TransferQueue report of one run.

    Args:
        tables: The rows of the analyses of that run, by name.
        run: Its label.
        problems: Data-quality warnings, shown last.
        language: `en` or `zh`.
    """
    blocks = [_headline(tables, run)] if language == "en" else [_guide_report(tables)]
    blocks.append(_findings(tables))
    steps = [row for row in tables["tq_steps"] if row["step"] is not None]
    shown: dict[str, Rows] = {
        "tq_functions": [_named(row) for row in tables["tq_functions"]],
        "tq_throughput": tables["tq_throughput"],
        "tq_steps": steps,
        "tq_over_time": [] if steps else tables["tq_over_time"],
        "tq_paths": [
            {**row, "path": " → ".join(row["path"])} for row in tables["tq_paths"][:_PATHS]
        ],
    }
    # The guide's report has no tables.
    for name, rows in shown.items() if language == "en" else ():
        title, columns = _TABLES[name]
        blocks.append(table_text(title, rows, columns, name, _ROWS))
    blocks.append(warnings(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _headline(tables: Mapping[str, Rows], run: str) -> str:
    """Return a summary of the cost of TransferQueue."""
    lines = [f"{run}: {_load(tables)}"]
    whole = next((row for row in tables["tq_wall"] if row["func"] is None), None)
    if whole is not None and (whole["concurrency"] or 0) > _CONCURRENT:
        lines.append(
            f"In wall-clock time (concurrent calls counted once) get and put take "
            f"{share(whole['wall_share'])}, and {share(whole['alone_share'])} without concurrent compute."
        )
    moved = [
        f"{row['event'].removeprefix('tq_')}s moved {size(row['size_bytes'])} at "
        f"{rate(row['mib_per_s'])} MiB/s"
        for row in tables["tq_throughput"]
        if row["caller"] is None
    ]
    lines.append(
        f"{moved[0][0].upper()}{'; '.join(moved)[1:]}."
        if moved
        else "Sizes of gets and puts were not recorded: set TQ_TRACE_DETAIL_ENABLED=1."
    )
    return "\n".join(map(visible, lines))


def _load(tables: Mapping[str, Rows]) -> str:
    functions = [row for row in tables["tq_functions"] if not row["waits"]]
    if not functions:
        return "no traced functions, so get, compute and put are unknown: set TQ_TRACE_ENABLED=1."
    load = tq_load(functions)
    names = ", ".join(row["func"] for row in functions[:4]) + ", …" * (len(functions) > 4)
    text = f"{counted(load['calls'], 'call')} of {names}"
    if load["traced"] != load["calls"]:
        text += f" (estimated from {load['traced']:,} traced ones)"
    if load["share"] is not None:
        text += (
            f"; {seconds(load['total_s'])} in total, {share(load['share'])} of it get and put "
            f"({seconds(load['tq_s'])})"
        )
    return f"{text}."


def _guide_report(tables: Mapping[str, Rows]) -> str:
    """Return the report in the format of the guide's analyze_tq_logs.py."""
    functions = [row for row in tables["tq_functions"] if row["total_s"]]
    identified = sum(row["trace_ids"] for row in tables["tq_trace_counts"])
    lines = ["=" * _WIDTH, "TransferQueue Performance Analysis Report", "=" * _WIDTH, ""]
    lines += [f"Total Traces: {identified}", ""]
    if not functions:
        return "\n".join([*lines, "没有找到完整的追踪数据。"])
    for row in functions:
        lines += ["─" * _WIDTH, f"Function: {visible(row['func'])}", "─" * _WIDTH]
        finished = row["calls"] - row["unfinished"]
        lines += [
            f"  调用次数:           {finished}",
            f"  平均总耗时:         {row['mean_s']:.6f}s",
        ]
        for stage, gap in zip(TQ_STAGES, (8, 4, 8), strict=True):
            part = row[f"{stage}_share"] or 0
            mean = part * row["total_s"] / finished
            name = f"平均{stage.upper()}耗时:"
            lines.append(f"  {name}{' ' * gap}{mean:.6f}s ({part * 100:.2f}%)")
        lines += [f"  TQ总开销:           {row['overhead_share'] * 100:.2f}%", ""]
    load = tq_load([row for row in functions if not row["waits"]])
    lines += ["=" * _WIDTH, "全局汇总", "=" * _WIDTH]
    lines += [f"  总执行时间:         {load['total_s']:.6f}s"]
    lines += [f"  总TQ时间:           {load['tq_s']:.6f}s"]
    lines += [f"  全局TQ开销占比:     {(load['share'] or 0) * 100:.2f}%", "=" * _WIDTH]
    return "\n".join(lines)


def _findings(tables: Mapping[str, Rows]) -> str:
    findings = tables["tq_findings"]
    if not findings:
        return (
            "No findings by the guide's thresholds: get and put at most 30 % of each function, stable get and "
            "put times, 100 MiB/s or more, each as far as it was recorded."
        )
    lines = ["findings"]
    for kind, rows in itertools.groupby(findings, lambda row: row["finding"]):
        for row in rows:
            first, *evidence = finding_lines(row)
            lines += [visible(f"  ! {first}"), *(f"      {text}" for text in evidence)]
        lines.append(f"      try: {TEXTS[kind, 'tq'].advice}")
    return "\n".join(lines)


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "func": f"{row['func']} (waits for others)"} if row["waits"] else {**row}
