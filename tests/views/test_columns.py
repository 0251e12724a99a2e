"""Each column of each table has one sentence."""

import re
from pathlib import Path

import pytest
from analyses import ANALYSES
from cached_runs import REHEARSED, SMALL, cached
from event_files import line, write_run

from verl_profiler.analysis.overview import phase_totals
from verl_profiler.analysis.requests import request_timeline
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.views import columns
from verl_profiler.views.columns import (
    COMMON,
    column_texts,
    format_of,
    heading,
    sections,
)
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.reference import PROSE

DATA = Path(__file__).parent.parent / "data"
RUNS = SMALL, REHEARSED, DATA / "tq/run.tar.gz", cached("colocate_async_run")
# One query each; no recorded run has rows there.
ONE_QUERY = {
    *("engine_load", "engine_load_over_time"),
    *("phase_efficiency", "device_use", "device_times"),
    *("captures", "range_times", "top_kernels", "gpu_idle"),
}
# No recorded run has such a row.
NOT_RECORDED = {("tq_findings", "failed")}
FUNCTIONS = {**ANALYSES, "phase_totals": phase_totals, "request_timeline": request_timeline}


def returned(tables):
    """Return the columns that each analysis returns on a run, by table."""
    rows = {name: analysis(tables) for name, analysis in ANALYSES.items()}
    rows["phase_totals"] = phase_totals(rows["step_phases"])
    slowest = [row["request_id"] for row in rows["slowest_requests"][:1]]
    rows["request_timeline"] = [row for each in slowest for row in request_timeline(tables, each)]
    return {name: {column for row in each for column in row} for name, each in rows.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    columns = {name: set() for name in FUNCTIONS}
    of_users = tmp_path_factory.mktemp("runs") / "spans"
    write_run(of_users, [line(event="lookup")])
    for run in (*RUNS, of_users):
        with load(run) as read:
            for name, more in returned(read.tables).items():
                columns[name] |= more
    empty = Tables.of({})
    for name in ONE_QUERY:
        assert not columns[name], name
        assert [] == ANALYSES[name](empty)
        columns[name] = {column[0] for column in empty.connection.description}
    return columns


def test_every_table_and_every_view_is_described_once():
    assert {*FUNCTIONS, COMMON} == set(column_texts())
    assert [*VIEWS] == list(sections(PROSE))
    assert {"slowest_requests": "request_breakdown"} == {
        name: view.table for name, view in VIEWS.items() if view.table
    }


def covers(key, column):
    """Whether a key of the columns, or its prefix before `*`, is of this column."""
    return column.startswith(key[:-1]) if key.endswith("*") else column == key


def test_every_column_that_an_analysis_returns_has_a_sentence(found):
    """Users of JSON and CSV need what a column holds, and its unit; a renamed one leaves none behind."""
    missing = [
        (name, column)
        for name in FUNCTIONS
        for column in sorted(found[name])
        if not any(covers(key, column) for key in column_texts()[name])
    ]
    stale = {
        (name, key)
        for name in FUNCTIONS
        for key in column_texts()[name]
        if not any(covers(key, column) for column in found[name])
    }

    assert [] == missing
    assert NOT_RECORDED == stale


def test_a_sentence_has_the_unit():
    """In the form of the name."""
    units = {"_per_s": "per second", "_s": "in s", "_bytes": "bytes", "_us": "µs"}
    by_name = {"slope_s_per_step": "in s per step", "generated_tokens_per_s": "by the length"}
    wrong = []
    for name in FUNCTIONS:
        for column, text in column_texts()[name].items():
            ending = next((unit for end, unit in units.items() if column.endswith(end)), "")
            if by_name.get(column, ending) not in text or text.strip(" .") != text:
                wrong.append((name, column, text))

    assert [] == wrong


def test_a_line_that_nothing_reads_is_an_error():
    """Each line of a table's section is a column, its caption, or the list of those of several tables."""
    path = Path(columns.__file__).with_name("columns.md")
    lines = [line for text in sections(path).values() for line in text.splitlines() if line]
    read = re.compile(
        r"- `[\w*]+`( \([^)]+\))?: .+|As in several tables: (`\w+`, )*`\w+`\."
        r"|In the report: .+"
    )

    assert [] == [line for line in lines if not read.fullmatch(line)]


@pytest.mark.parametrize(
    ("column", "table", "title", "form"),
    [
        ("duration_s", "", "duration", "s"),
        ("p95_s", "", "P95", "q"),
        ("used_bytes", "", "used", "bytes"),
        ("begin_us", "", "begin", ""),
        ("engine_tokens_per_s", "", "engine tokens/s", "n"),
        ("get_mib_per_s", "", "get MiB/s", "n"),
        ("overhead_share", "", "overhead share", "share"),
        ("mfu", "phase_efficiency", "MFU", "share"),
        ("waited", "staleness", "behind in queue", ""),
        ("waited", "", "waited", ""),
    ],
)
def test_a_title_has_words_and_the_format_has_the_unit(column, table, title, form):
    """No reader meets the name of a column; where words do not suffice, `columns.md` has a title."""
    assert (title, form) == (heading(column, table), format_of(column))


def test_no_title_is_the_name_of_a_column():
    titles = [heading(name, table) for table, own in column_texts().items() for name in own]

    assert [] == [each for each in titles if "_" in each]
