"""TransferQueue analyses: by hand, few rows, and what must hold for all of them."""

import re

import pytest
from picked import picked

from verl_profiler.analysis.explain.rules import TEXTS
from verl_profiler.analysis.tq import (
    tq_functions,
    tq_over_time,
    tq_paths,
    tq_steps,
    tq_throughput,
    tq_trace_counts,
    tq_traces,
    tq_wall,
)
from verl_profiler.analysis.tq_findings import tq_findings
from verl_profiler.reading.tables.tables import Tables

MIB = 1 << 20


def made(*calls, transfers=()):
    """Return tables of calls: (begin, {stage: seconds}, more); the stages follow each other."""
    rows, stages = [], []
    for number, (begin_s, parts, more) in enumerate(calls):
        row = {"run": "r", "step": 1, "name": "w0", "func": "f", "call": str(number), **more}
        begin_us = at_us = round(begin_s * 1e6)
        for stage, length_s in parts.items():
            length_us = round(length_s * 1e6)
            row[f"{stage}_us"] = length_us
            interval = {"begin_us": at_us, "end_us": at_us + length_us, "duration_us": length_us}
            shared = {key: row[key] for key in ("run", "step", "name", "func", "call")}
            stages.append({**shared, "stage": stage, **interval})
            at_us += length_us
        row = {"begin_us": begin_us, "end_us": at_us, "duration_us": at_us - begin_us, **row}
        rows.append({"finished": row["duration_us"] is not None, "source": "events", **row})
    moved = []
    for event, length_s, mib, more in transfers:
        length_us = round(length_s * 1e6)
        row = {"run": "r", "step": 1, "name": "w0", "event": event, "begin_us": 0}
        row |= {"end_us": length_us, "duration_us": length_us}
        moved.append({**row, "size_bytes": None if mib is None else round(mib * MIB), **more})
    return Tables.of({"tq_calls": rows, "tq_stages": stages, "transfers": moved})


PARTS = {"get": 1.0, "compute": 2.0, "put": 1.0}


def test_functions_have_their_stages_and_shares():
    """Shares are of the time of all calls; a call without an end is in no time."""
    tables = made(
        (0, {"get": 1.0, "compute": 7.0, "put": 2.0}, {}),
        (20, {"get": 3.0, "compute": 7.0}, {"status": "error"}),
        (40, {"get": 9.0}, {"duration_us": None, "end_us": None}),
    )

    (row,) = tq_functions(tables)

    assert (3, 3, 1, 1, 1) == picked(row, "traced calls failed unfinished sampled")
    assert (20.0, 10.0) == (row["total_s"], row["mean_s"])
    assert (0.2, 0.7, 0.1, 0.3) == pytest.approx(
        [row[f"{key}_share"] for key in ("get", "compute", "put", "overhead")]
    )
    assert (3, 13.0, 3.0, 9.0) == tuple(
        row[f"get_{key}"] for key in ("calls", "s", "p50_s", "max_s")
    )


def test_every_nth_call_counts_n_times():
    """In counts, sums and shares; means are those of the calls."""
    tables = made(
        (0, {"get": 1.0, "compute": 3.0}, {"sampled": 10}),
        (9, {"get": 2.0, "compute": 2.0}, {}),
        transfers=[("tq_get", 1.0, 10, {"sampled": 10}), ("tq_get", 1.0, 120, {})],
    )

    (row,) = tq_functions(tables)
    rates = tq_throughput(tables)[0]

    assert (2, 11, 10) == (row["traced"], row["calls"], row["sampled"])
    assert (44.0, 4.0, 12 / 44) == pytest.approx(
        (row["total_s"], row["mean_s"], row["overhead_share"])
    )
    assert (11, 220 * MIB, 20.0) == (rates["calls"], rates["size_bytes"], rates["mib_per_s"])
    assert None is row["wall_share"]


def test_calls_at_the_same_time_count_once_on_the_clock():
    """Two calls of one process overlap; a third is in another."""
    tables = made(
        (0, {"get": 2.0, "compute": 4.0, "put": 2.0}, {}),
        (1, {"get": 2.0, "compute": 4.0, "put": 2.0}, {}),
        (0, {"get": 1.0, "compute": 1.0}, {"name": "w1"}),
    )

    whole, row = tq_wall(tables)

    # w0: a call from 0 to 9, gets and puts 0-3 and 6-9, computing 2-7; w1: a call 0-2, a get 0-1.
    assert (None, "f") == (whole["func"], row["func"])
    assert (11.0, 7.0, 5.0) == (row["busy_s"], row["tq_busy_s"], row["tq_alone_s"])
    assert (7 / 11, 5 / 11, 18 / 11) == pytest.approx(
        (row["wall_share"], row["alone_share"], row["concurrency"])
    )
    assert {**whole, "func": "f"} == row


def test_what_waits_for_others_is_not_in_the_whole():
    """Its time is counted where the work is."""
    tables = made((0, PARTS, {}), (0, {"compute": 50.0}, {"func": "manager", "waits": True}))

    whole = tq_wall(tables)[0]
    (step,) = tq_steps(tables)

    assert (4.0, 0.5) == (whole["busy_s"], whole["wall_share"])
    assert (1, 4.0) == (step["calls"], step["total_s"])


def test_rates_have_the_guides_classes():
    """Over 500 MB/s is good, 100 to 500 fair, below poor; each call by its own time."""
    tables = made(
        transfers=[
            ("tq_get", 1.0, 501, {"func": "f"}),
            ("tq_get", 1.0, 500, {"role": "actor"}),
            ("tq_get", 1.0, 100, {"func": "f"}),
            ("tq_get", 1.0, 99, {"func": "f"}),
            ("tq_get", 1.0, None, {}),
            ("tq_put", 2.0, 20, {}),
            ("tq_meta", 1.0, None, {}),
        ]
    )

    get, function, role, put, _ = tq_throughput(tables)

    assert (4, 1200 * MIB, 300.0, "fair") == picked(get, "calls size_bytes mib_per_s speed")
    assert [0.25, 0.5, 0.25] == [get[f"{key}_share"] for key in ("good", "fair", "poor")]
    assert [("f", 3), ("actor", 1)] == [(r["caller"], r["calls"]) for r in (function, role)]
    assert ("tq_put", 10.0, "poor") == (put["event"], put["mib_per_s"], put["speed"])


def test_steps_and_parts_of_time_add_up_to_the_whole():
    """No call is in two of them."""
    calls = [(n, {"get": 0.5, "compute": 0.5}, {"step": n % 3}) for n in range(9)]
    moves = [("tq_get", 0.5, 10, {"step": n % 3, "begin_us": n * 1_000_000}) for n in range(9)]
    tables = made(*calls, transfers=moves)

    steps, parts = tq_steps(tables), tq_over_time(tables, parts=4)

    for rows in (steps, parts):
        assert (9, 9.0, 9, 90 * MIB) == tuple(
            sum(row[key] for row in rows) for key in ("calls", "total_s", "transfers", "size_bytes")
        )
    assert {20.0} == {row["get_mib_per_s"] for row in [*steps, *parts]}
    assert [2, 2, 2, 3] == [row["calls"] for row in parts]


def test_findings_are_the_guides():
    """More than 30 %, uneven stages, below 100 MB/s; small transfers are another matter."""
    uneven = [
        (n * 10, {"get": 3.0 if n % 3 else 0.1, "compute": 9.0, "put": 0.3}, {}) for n in range(10)
    ]
    heavy = [(n, {"get": 0.2, "compute": 0.6, "put": 0.2}, {"func": "g"}) for n in range(10)]
    tables = made(
        *uneven,
        *heavy,
        transfers=[("tq_get", 1.0, 99, {}), ("tq_put", 0.01, 0.5, {})],
    )

    found = tq_findings(tables)

    assert [
        ("overhead", "g", None),
        ("unstable", "f", None),
        ("low_throughput", None, "tq_get"),
        ("small_transfers", None, "tq_put"),
    ] == [(row["finding"], row["func"], row["event"]) for row in found]
    assert pytest.approx(0.4) == found[0]["value"]
    causes = re.compile("may be|bottleneck")
    texts = [text for row in found for text in TEXTS[row["finding"], "tq"]]
    assert [] == [text for text in texts if causes.search(text)], "which were not measured"


def test_calls_that_handled_the_same_data_are_joined():
    """By each of a batch's ids; `+2` stands for ids that are not listed."""
    tables = made(
        (0, {"compute": 2.0}, {"func": "generate", "trace_id": "a"}),
        (0, {"compute": 3.0}, {"func": "generate", "trace_id": "b", "name": "w1"}),
        (5, {"get": 1.0, "compute": 2.0}, {"func": "update", "trace_id": "a,b,+2", "step": 2}),
        (9, {"get": 1.0}, {"func": "update", "trace_id": None}),
    )

    a, b = sorted(tq_traces(tables), key=lambda row: row["trace_id"])
    (path,) = tq_paths(tables)
    (count,) = tq_trace_counts(tables)

    assert (["generate", "update"], 2, 8.0, 5.0, 3.0) == picked(
        a, "functions calls spread_s total_s waiting_s"
    )
    assert (1, 2, 2.0) == (b["first_step"], b["last_step"], b["waiting_s"])
    assert (2, 4, 8.0) == (path["trace_ids"], path["calls"], path["max_s"])
    assert ["a"] == [row["trace_id"] for row in tq_traces(tables, trace_id="a")]
    assert 3 == count["trace_ids"]
