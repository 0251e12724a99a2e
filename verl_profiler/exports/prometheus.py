"""TransferQueue metrics for Prometheus: as text for a textfile collector.

Names begin with `verl_tq_`; times are seconds, sizes bytes.  They are counted from the run's
beginning to its present end, so they grow while the run does.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from verl_profiler.analysis.selection import Rows, in_steps
from verl_profiler.analysis.tq import tq_functions
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.visible import visible

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

# Everything that is timed: run, labels, length, weight.
_CALLS = """
    SELECT run, func, '{stage}' AS stage, {column} AS length_us, coalesce(sampled, 1)::HUGEINT AS weight
    FROM tq_calls WHERE {column} IS NOT NULL AND {condition}"""
_TRANSFERS = """
    SELECT run, coalesce(func, role, name) AS func, substr(event, 4) AS stage,
        duration_us AS length_us, coalesce(sampled, 1)::HUGEINT AS weight
    FROM transfers
    WHERE event IN ('tq_get', 'tq_put') AND duration_us IS NOT NULL AND {condition}"""


def metrics(
    tables: Tables,
    steps: tuple[int, int] | None = None,
    counts: dict[str, dict[str, int]] | None = None,
) -> Iterator[Metric]:
    """Give the metrics of all runs; `counts` are, by run, how many log lines are `missing` or `unreadable`."""
    functions = tq_functions(tables, steps)
    condition = in_steps(steps)
    yield _counter(
        "verl_tq_calls",
        "Calls of functions that use TransferQueue, by status.",
        ("run", "function", "status"),
        (
            ((row["run"], row["func"], status), number)
            for row in functions
            for status, number in (
                ("ok", row["calls"] - row["failed"] - row["unfinished"]),
                ("error", row["failed"]),
                ("unfinished", row["unfinished"]),
            )
        ),
    )
    for name, about, labels, spans in (
        (
            "verl_tq_call_duration_seconds",
            "Time of whole calls.",
            ("run", "function"),
            _CALLS.format(stage="", column="duration_us", condition=condition),
        ),
        (
            "verl_tq_stage_duration_seconds",
            "Time of calls in get, compute and put.",
            ("run", "function", "stage"),
            " UNION ALL ".join(
                _CALLS.format(stage=stage, column=f"{stage}_us", condition=condition)
                for stage in ("get", "compute", "put")
            ),
        ),
        (
            "verl_tq_transfer_duration_seconds",
            "Time of the client's gets and puts.",
            ("run", "caller", "operation"),
            _TRANSFERS.format(condition=condition),
        ),
    ):
        yield _histogram(name, about, labels, tables.rows(_BUCKETED.format(spans=spans)))
    yield _counter(
        "verl_tq_transfer_bytes",
        "Bytes moved by gets and puts that report their size.",
        ("run", "caller", "operation"),
        (
            ((row["run"], row["caller"], row["operation"]), row["size_bytes"])
            for row in tables.rows(
                f"""
                SELECT run, coalesce(func, role, name) AS caller, substr(event, 4) AS operation,
                    try_cast(sum(size_bytes::HUGEINT * coalesce(sampled, 1)) AS BIGINT) AS size_bytes
                FROM transfers WHERE event IN ('tq_get', 'tq_put') AND size_bytes IS NOT NULL
                    AND {condition}
                GROUP BY ALL ORDER BY ALL
                """
            )
        ),
    )
    yield _filled(
        GaugeMetricFamily(
            "verl_tq_log_lines",
            "Log lines missing from these metrics, by reason.",
            labels=("run", "reason"),
        ),
        (
            ((run, reason), number)
            for run, reasons in (counts or {}).items()
            for reason, number in reasons.items()
        ),
    )


# Counts up to each bucket's bound, and the sum.
_BUCKETED = (
    "SELECT run, func, stage, sum(length_us * weight) / 1e6 AS total_s, list_value("
    + ", ".join(
        f"try_cast(coalesce(sum(weight) FILTER (length_us <= {bound * 1e6:.0f}), 0) AS BIGINT)"
        for bound in BUCKETS_S
    )
    + ", try_cast(sum(weight) AS BIGINT)) AS counts FROM ({spans}) GROUP BY ALL ORDER BY run, func, stage"
)


def _counter(name: str, about: str, labels: tuple[str, ...], samples: Any) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), samples)


def _filled(family: Any, samples: Any) -> Metric:
    for labels, value in samples:
        family.add_metric([visible(str(label)) for label in labels], value)
    return family


def _histogram(name: str, about: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels)
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    for row in rows:
        named = [row["run"], row["func"], row["stage"]][: len(labels)]
        buckets = list(zip(bounds, row["counts"], strict=True))
        family.add_metric(
            [visible(str(label)) for label in named], buckets, sum_value=row["total_s"]
        )
    return family


def exposition(given: list[Metric]) -> str:
    """Return the metrics as text, as Prometheus and its node exporter's textfile collector read it."""
    return prometheus_client.generate_latest(
        cast("Any", SimpleNamespace(collect=lambda: given))
    ).decode()
