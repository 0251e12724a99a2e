"""What holds for every analysis of the summary: one request, chunks, only the steps asked for."""

import json
from pathlib import Path

import pytest
from cached_runs import SMALL, copied
from picked import picked

from verl_profiler.analysis.registry import summarized
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.schemas import SCHEMAS
from verl_profiler.reading.tables.tables import Tables


@pytest.fixture(scope="module")
def events():
    """All events of the small run, and its processes, as rows."""
    with load(SMALL) as run:
        return {name: run.rows(f"SELECT * FROM {name}") for name in ("events", "processes")}


def results(tables, steps=None):
    made = summarized(tables, steps)
    return json.loads(json.dumps(made, default=str), parse_float=lambda text: round(float(text), 9))


def test_one_unfinished_request_gives_no_durations(span):
    """A request that never ended counts as one, and is in no percentile."""
    started = {**span("request_start", 5, 5, request_id="a"), "duration_us": None}

    made = results(Tables.of({"events": [started]}))

    assert (1, 1, None) == picked(made["request_times"][0], "requests unfinished p50_s")
    assert [] == [*made["slowest_requests"], *made["step_tail"], *made["request_parts"]]
    assert [False] == [row["finished"] for row in made["step_times"]]


def test_a_large_run_is_derived_in_chunks_with_the_same_answers(tmp_path, monkeypatch):
    """Memory does not grow with the run; a chunk of one step holds all that its rows need."""
    with load(copied(SMALL, tmp_path / "whole" / SMALL.name)) as run:
        assert 1 == len(run.tables.chunks)
        whole = results(run.tables)
    monkeypatch.setattr("verl_profiler.reading.tables.tables.CHUNK_EVENTS", 10)

    with load(copied(SMALL, tmp_path / "chunks" / SMALL.name)) as run:
        assert 1 < len(run.tables.chunks)
        assert whole == results(run.tables)


def test_every_derived_table_has_the_columns_that_are_documented(events):
    """`SCHEMAS` and the tables that are made agree in names, order and types."""
    tables = Tables.of(events)

    for name, columns in SCHEMAS.items():
        relation = tables.relation(name)
        found = dict(zip(relation.columns, map(str, relation.types), strict=True))
        assert columns == found, name


def test_every_table_is_in_the_documentation():
    """docs/sql.md names each table."""
    text = (Path(__file__).parents[2] / "docs" / "sql.md").read_text(encoding="utf-8")

    assert [] == [name for name in SCHEMAS if f"`{name}`" not in text]
