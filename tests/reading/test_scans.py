"""A path is a path: no folder's name is a column, a pattern, a home or a scheme."""

import shutil

import pytest
from cached_runs import SMALL, copied

from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

# Hydra's override_dirname makes such folders: each names a column, with a value that no event has.
COLUMNS = "rank=9/name=x/status=y/duration_us=1/rest=1/step=77/event=z/run=other/role=engine,lr=0.1"
ODD = f"~/~root/file:/a*b/[a]/what?/it's/{{x,y}}/a b%20/{COLUMNS}"


def tables_of(run, *, cache=True):
    """Return tables of a run without its label, and its problems."""
    with load(run, cache=cache) as opened:
        tables = [
            opened.rows(f"SELECT * EXCLUDE run FROM {name} ORDER BY ALL")
            for name in ("event_fields", "requests", "event_counts")
        ]
        return tables, opened.problems


@pytest.fixture(scope="module")
def expected():
    return tables_of(SMALL, cache=False)


def test_an_odd_path_is_that_path(tmp_path, monkeypatch, expected):
    """Absolute or relative; when events are converted, come from the cache, or from Parquet files."""
    run = copied(SMALL, tmp_path / ODD / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    assert expected == tables_of(run)
    assert expected == tables_of(run.relative_to(tmp_path))
    (tmp_path / ODD / "converted" / "events").mkdir(parents=True)
    for part in (run / ".cache" / "events-1").glob("part-*.parquet"):
        shutil.copy(part, tmp_path / ODD / "converted" / "events")
    assert expected[0][0] == tables_of(tmp_path / ODD / "converted", cache=False)[0][0]


def test_temporary_files_may_lie_anywhere(run, tmp_path, monkeypatch, expected):
    """Tables that are put, files that are repaired and tables that are not kept."""
    (tmp_path / ODD).mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ODD))
    damaged = run / "step_1" / "worker_0.jsonl"
    damaged.write_text("bad\n" + damaged.read_text())

    tables, problems = tables_of(run, cache=False)

    assert expected[0] == tables
    assert any("worker_0.jsonl:1: not JSON" in problem for problem in problems)
    with Tables.of({"events": [{"step": 1, "status": "ok"}]}).connection as connection:
        assert [(1, "ok")] == connection.execute("SELECT step, status FROM events").fetchall()
