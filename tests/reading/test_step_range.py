"""Opening a run for some of its steps: the same answers, from fewer files."""

import json
import shutil
from datetime import datetime, timedelta

import pytest
from analyses import ANALYSES
from cached_runs import SMALL, cached, copied

from verl_profiler.errors import ReadingError
from verl_profiler.reading import convert
from verl_profiler.reading.reader import load

STEPS = 8


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Step 1 of the small run, with one process of each kind, again and again, every five minutes."""
    run = tmp_path_factory.mktemp("runs") / "long"
    shutil.copytree(
        SMALL / "processes", run / "processes", ignore=shutil.ignore_patterns("*_1.json")
    )
    shutil.copy(SMALL / "run.json", run / "run.json")
    for step in range(1, STEPS + 1):
        (run / f"step_{step}").mkdir()
        for path in (SMALL / "step_1").glob("*_0.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                moment = datetime.fromisoformat(line["timestamp"]) + timedelta(minutes=5 * step)
                line |= {"timestamp": moment.isoformat(timespec="microseconds"), "step": step}
                for key in ("request_id", "engine_request_id", "uid"):
                    if key in line.get("extra", {}):
                        line["extra"][key] = f"{step:04d}{line['extra'][key][4:]}"
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (run / f"step_{step}" / path.name).write_text(text)
    return run


@pytest.fixture
def small_parts(monkeypatch):
    """A part for every file."""
    monkeypatch.setattr(convert, "PART_BYTES", 1)


def _plain(value):
    """Round what depends on the order in which duckdb adds up."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _answers(run, steps):
    return {name: _plain(ask(run.tables, steps)) for name, ask in ANALYSES.items()}


@pytest.mark.usefixtures("small_parts")
def test_every_analysis_gives_the_same_from_fewer_files(long_run):
    with load(long_run, cache=False) as whole, load(long_run, cache=False, steps=(4, 5)) as some:
        answers = _answers(whole, (4, 5))
        assert answers["step_times"]
        assert _answers(some, (4, 5)) == answers
        assert len(some.tables.table_cache.parts) < len(whole.tables.table_cache.parts) * 0.6
        assert some.all_steps == (1, STEPS)


@pytest.mark.usefixtures("small_parts")
def test_event_files_of_other_steps_are_not_converted(long_run, tmp_path):
    run = shutil.copytree(long_run, tmp_path / "run")
    (run / "step_8" / "worker_0.jsonl").write_text("no event\n")
    with load(run, cache=False, steps=(2, 3)) as opened:
        assert not [problem for problem in opened.problems if "step_8" in problem]
        # Events that were not read are not missing.
        assert not [problem for problem in opened.problems if "events" in problem]
    with load(run, cache=False, steps=(7, 8)) as opened:
        assert [problem for problem in opened.problems if "step_8" in problem]


@pytest.mark.parametrize("name", ["one_step_off", "colocate_async", "fully_async"])
def test_asynchronous_runs_are_read_whole(name):
    """Their steps consume requests of earlier steps."""
    with load(cached(f"{name}_run"), steps=(2, 2)) as run:
        assert run.steps is None


def test_tables_of_some_steps_and_of_all_are_kept_apart(long_run, tmp_path):
    """Although they are made from the same file; none replaces the others."""
    run = copied(long_run, tmp_path / "run")
    query = "SELECT count(*) AS phases, min(step) AS first, max(step) AS last FROM phases"
    with load(run, cache=False) as opened:
        expected = opened.rows(query)
    kept = set[str]()
    for steps in ((4, 4), None, (2, 2)):
        with load(run, steps=steps) as opened:
            assert (opened.rows(query) == expected) == (steps is None)
            opened.tables.make("requests", "steps")
        names = {path.name for path in run.glob(".cache/*/requests-*.parquet")}
        assert kept < names
        kept = names


@pytest.fixture
def shards(long_run, tmp_path, small_parts):
    """The long run as Parquet files of one step each, in folders that are named after it."""
    with load(long_run, cache=False) as run:
        for number, part in enumerate(run.tables.table_cache.parts):
            assert part.steps[0] == part.steps[1]
            folder = tmp_path / "long" / "events" / f"step_{part.steps[0]}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(part.path, folder / f"part-{number}.parquet")
    shutil.copytree(long_run / "processes", tmp_path / "long" / "processes")
    shutil.copy(long_run / "run.json", tmp_path / "long" / "run.json")
    return tmp_path / "long"


def test_files_in_folders_of_other_steps_are_not_opened(long_run, shards):
    """All of them are one run."""
    with load(long_run, cache=False) as whole, load(shards, cache=False) as run:
        for name in ("step_times", "request_times"):
            expected = _plain(ANALYSES[name](whole.tables, None))
            assert _plain(ANALYSES[name](run.tables, None)) == expected
    for step in (1, 2, 6, 7, 8):
        for path in (shards / "events" / f"step_{step}").iterdir():
            path.write_bytes(b"no parquet")
    with load(shards, steps=(4, 4)) as run:
        assert {part.steps for part in run.tables.table_cache.parts} == {(3, 3), (4, 4), (5, 5)}
        assert run.all_steps == (1, STEPS)
    with pytest.raises(ReadingError, match="cannot be read"):
        load(shards, steps=(7, 7))


def test_a_step_between_those_of_a_parquet_file_has_no_events(long_run, tmp_path):
    """Its statistics name the first and the last step only; a small run is then read whole."""
    folder = tmp_path / "long" / "events"
    folder.mkdir(parents=True)
    with load(long_run, cache=False) as run:
        run.tables.connection.execute(
            "COPY (SELECT 0 AS file_id, false AS flawed, * FROM event_fields WHERE step IN (1, 8)) TO '"
            f"{folder / 'part.parquet'}' (FORMAT parquet)"
        )

    with load(tmp_path / "long", steps=(4, 4), cache=False) as run:
        assert [{"step": 1}, {"step": 8}] == run.rows("SELECT step FROM steps ORDER BY step")
