"""What is known exactly of a run with sampled details, and how good the estimates are.

The same run is recorded twice: in full, and with the details of one request in 20 and of the five slowest
of each step and worker.  The full run is the truth.
"""

import math
import shutil
from pathlib import Path

import pytest
from analyses import ANALYSES
from commands import command
from truth.sampled_runs import SHAPE, full_run, record_again

from verl_profiler.cli import diff, requests, summary
from verl_profiler.reading.reader import load

EVERY, SLOWEST = 20, 5
DATA = Path(__file__).parents[1] / "data"
# They need requests, and details of the last one only; all others' details are not used.
EXACT = (
    "step_times",
    "step_phases",
    "step_tail",
    "step_durations",
    "critical_segments",
    "critical_path",
    "bubble_ledger",
    "request_times",
    "request_totals",
    "request_parts",
    "request_duration_cdf",
    "request_percentiles",
    "slowest_requests",
    "rollout_tail",
    "rollout_balance",
    "turns_per_request",
    "request_token_rates",
    "reward_times",
    "worker_balance",
    "rank_balance",
    "transfer_totals",
    "validation_times",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sampled")


@pytest.fixture(scope="module")
def runs(folder):
    full = full_run(folder / "full")
    accounts = record_again(full, folder / "part", detail_share=1 / EVERY)
    with load(full) as everything, load(folder / "part") as part:
        yield everything, part, accounts


def without_run(rows):
    return [{key: value for key, value in row.items() if key != "run"} for row in rows]


def test_every_event_is_written_or_counted(runs):
    _, part, accounts = runs
    for account in accounts.values():
        assert 0 == account["dropped"] == account["waiting"]
        assert account["offered"] == (
            account["events"] - account["own_events"] + account["sampled_out"]
        )
    assert {
        row["name"]: row["sampled_out"]
        for row in part.rows(
            "SELECT name, (header->>'$.counters.sampled_out')::BIGINT AS sampled_out FROM processes "
            "WHERE role = 'agent_loop'"
        )
    } == {name: account["sampled_out"] for name, account in accounts.items()}


def test_the_requests_are_exact(runs):
    """All columns: times, counts, tokens and the components."""
    query = (
        "SELECT * EXCLUDE (run, detailed, sampled) FROM requests "
        "ORDER BY step, name, validate, request_id"
    )
    full, part = (run.rows(query) for run in runs[:2])

    assert SHAPE.steps * SHAPE.requests + SHAPE.validation_requests == len(full)
    assert full == part


@pytest.mark.parametrize("name", EXACT)
def test_exact(runs, name):
    full, part = (without_run(ANALYSES[name](run.tables)) for run in runs[:2])

    assert full
    assert full == part


def test_the_details_are_those_of_the_slowest_and_of_a_share(runs):
    _, part, _ = runs
    for row in part.rows(
        "SELECT step, name, count(*) AS requests, count_if(detailed) AS detailed, "
        "count_if(sampled > 1) AS chosen, max(sampled) AS most, "
        "bool_and(detailed) FILTER (place <= 5 OR last <= 5) AS slowest "
        "FROM (SELECT *, row_number() OVER (PARTITION BY step, name ORDER BY duration_us DESC) AS place, "
        "row_number() OVER (PARTITION BY step, name ORDER BY end_us DESC) AS last "
        "FROM requests WHERE NOT validate) GROUP BY step, name"
    ):
        assert row["slowest"]
        assert row["most"] == EVERY
        # Some of every n-th are among the slowest.
        assert -SLOWEST < row["chosen"] - row["requests"] / EVERY < 1
        assert row["detailed"] < 0.3 * row["requests"]


def bound(full, table, column, kept):
    """Return four standard errors of an estimated sum, from the full run.

    Of the requests that were not kept for certain, each has the chance 1/EVERY.  Chosen independently, the
    sum of y over the chosen ones, times EVERY, has the variance (EVERY - 1) * sum(y**2) (Horvitz and
    Thompson 1952).  Every n-th of an order that has to do with y varies less.
    """
    rows = full.rows(
        f"SELECT request_id, sum({column})::DOUBLE AS y FROM {table} WHERE NOT validate GROUP BY request_id"
    )
    squares = sum(row["y"] ** 2 for row in rows if row["request_id"] not in kept)
    return 4 * math.sqrt((EVERY - 1) * squares)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("turns", "1"),
        ("turns", "duration_us"),
        ("engine_calls", "1"),
        ("engine_calls", "duration_us"),
        ("engine_calls", "response_tokens"),
        ("tool_calls", "1"),
        ("tool_calls", "duration_us"),
    ],
)
def test_sums_are_estimated_within_the_error_of_the_sample(runs, table, column):
    full, part, _ = runs
    kept = {
        row["request_id"] for row in part.rows("SELECT request_id FROM requests WHERE sampled = 1")
    }
    query = f"SELECT sum({{}} * {column})::DOUBLE AS total FROM {table} WHERE NOT validate"
    truth = full.tables.row(query.format("sampled"))["total"]
    estimate = part.tables.row(query.format("sampled"))["total"]
    recorded = part.tables.row(query.format("1"))["total"]

    assert abs(estimate - truth) < bound(full, table, column, kept)
    # The recorded rows alone are further away.
    assert abs(estimate - truth) < truth - recorded


@pytest.mark.parametrize(
    ("analysis", "table"), [("tool_times", "tool_calls"), ("engine_times", "engine_calls")]
)
def test_the_analyses_use_the_estimates(runs, analysis, table):
    _, part, _ = runs
    calls = part.tables.row(
        f"SELECT sum(sampled) AS n, sum(sampled * duration_us) AS us FROM {table}"
    )
    rows = ANALYSES[analysis](part.tables)
    assert calls["n"] == sum(row["calls"] for row in rows)
    assert calls["us"] / 1e6 == pytest.approx(sum(row["total_s"] for row in rows))


def test_a_weighted_percentile_is_that_of_repeated_values(runs):
    """By hand, from the recorded rows: each value as often as it counts."""
    _, part, _ = runs
    values = sorted(
        value
        for row in part.rows(
            "SELECT duration_us / 1e6 AS s, sampled FROM tool_calls WHERE tool = 'calc' AND NOT validate"
        )
        for value in [row["s"]] * row["sampled"]
    )
    (row,) = (r for r in ANALYSES["tool_latencies"](part.tables) if r["tool"] == "calc")

    assert values[(len(values) - 1) // 2] <= row["p50_s"] <= values[len(values) // 2]


def test_without_the_calls_of_all_requests_nothing_is_replayed(runs):
    """What-if moves every call of a step; an answer from a few of them would be wrong."""
    full, part, _ = runs
    assert ANALYSES["what_if"](full.tables)
    assert [] == ANALYSES["what_if"](part.tables)


def test_the_note_counts_the_requests_with_details(runs):
    full, part, _ = runs
    (row,) = part.rows("SELECT count(*) AS requests, count_if(detailed) AS detailed FROM requests")

    (note,) = part.notes
    assert f"details of {row['detailed']:,} of {row['requests']:,} requests" in note
    assert "share 5.0 %" in note
    assert [] == full.notes


def test_summary_and_diff_mark_estimates(runs, folder, capsys):
    """And nothing else: a full run has no mark."""
    del runs
    command(summary)(folder / "part", "-v")
    printed = capsys.readouterr().out
    tools = [line for line in printed.splitlines() if " calc" in line]
    requests = [line for line in printed.splitlines() if line.strip().startswith("requests ")]
    assert tools
    assert all("≈" in line for line in tools)
    assert requests
    assert not any("≈" in line for line in requests)

    command(summary)(folder / "full", "-v")
    assert "≈" not in capsys.readouterr().out

    command(diff)(folder / "full", folder / "part", "--all")
    lines = capsys.readouterr().out.splitlines()
    marked = {line.split()[1].split(".")[0] for line in lines if line.strip().startswith("≈ ")}
    assert {"turn", "engine_call", "tool_call", "tool_call:calc"} <= marked
    assert not {"request", "step", "gen", "requests", "generated_tokens", "tq_put"} & marked
    assert any("≈ is estimated" in line for line in lines)


def test_a_request_without_details_says_so(runs, folder, capsys):
    _, part, _ = runs
    for detailed in (True, False):
        (row,) = part.rows(
            "SELECT request_id FROM requests WHERE NOT validate AND detailed = ? ORDER BY request_id LIMIT 1",
            [detailed],
        )
        command(requests)(folder / "part", "--request", row["request_id"])
        printed = capsys.readouterr().out
        assert detailed == ("details of this request" not in printed)
        assert "engine" in printed


@pytest.mark.parametrize(
    "name", ["rehearsal_run", pytest.param("separate_async_run", marks=pytest.mark.nightly)]
)
def test_requests_of_recorded_runs_are_exact_too(name, tmp_path):
    """Runs of the real trainer, synchronous and asynchronous: their events have shapes of their own."""
    shutil.unpack_archive(DATA / f"{name}.tar.gz", tmp_path)
    full = tmp_path / name
    accounts = record_again(full, tmp_path / "part", detail_share=0.25)
    query = (
        "SELECT * EXCLUDE (run, detailed, sampled) FROM requests "
        "ORDER BY step, name, validate, request_id, sample, session"
    )
    analyses = ("critical_path", "request_parts", "request_times", "step_times", "staleness")
    with load(full, cache=False) as everything, load(tmp_path / "part", cache=False) as part:
        assert everything.rows(query) == part.rows(query)
        for analysis in analyses:
            rows = (without_run(ANALYSES[analysis](run.tables)) for run in (everything, part))
            assert next(rows) == next(rows)
        left_out = part.rows("SELECT count_if(NOT detailed) AS n FROM requests")[0]["n"]
    assert left_out > 0
    assert all(account["sampled_out"] and not account["dropped"] for account in accounts.values())
