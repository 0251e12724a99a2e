"""`profiler.events.steps_per_file`: several steps of a process share a file, and every reader takes it."""

import gzip
import shutil
import tarfile
from pathlib import Path

import msgspec
import pytest
from truth.sampled_runs import full_run, record_again

from verl_profiler.analysis import ANALYSES
from verl_profiler.events.vocabulary import step_folder, steps_of_folder
from verl_profiler.live.follow import Run
from verl_profiler.reading.reader import load
from verl_profiler.recording.clock import now
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder


@pytest.mark.parametrize(
    ("step", "many", "name"),
    [
        (0, 1, "step_0"),
        (12, 1, "step_12"),
        (0, 10, "step_0-9"),
        (9, 10, "step_0-9"),
        (10, 10, "step_10-19"),
        (1234, 250, "step_1000-1249"),
    ],
)
def test_the_folder_names_the_steps_in_it(step, many, name):
    assert name == step_folder(step, many)
    first, last = steps_of_folder(name)
    assert first <= step <= last
    assert many == last - first + 1


@pytest.mark.parametrize(
    "name", ["step_", "step_9-0", "step_1-", "step_a", "steps_1-2", "step_1-2-3"]
)
def test_other_names_are_no_folders_of_steps(name):
    assert steps_of_folder(name) is None


def recorder_with(worker_config, **changes):
    events = msgspec.structs.replace(worker_config.events, flush_interval_s=60, **changes)
    config = msgspec.structs.replace(worker_config, events=events)
    return Recorder(config, lambda: Identity("agent_loop", 0))


def test_a_process_writes_a_file_per_so_many_steps(worker_config):
    recorder = recorder_with(worker_config, steps_per_file=10)
    for step in range(25):
        recorder.append(("turn", now(), now(), {"n": step}, step))
    recorder.append(("turn", now(), now(), {"n": -1}, None))
    recorder.close("exit")
    directory = Path(worker_config.directory)

    assert ["step_0-9", "step_10-19", "step_20-29"] == sorted(
        path.parent.name for path in directory.glob("step_*/worker_0.jsonl")
    )
    with load(directory, cache=False) as opened:
        rows = opened.rows("SELECT step, rest FROM event_fields WHERE event = 'turn' ORDER BY step")
        assert ["run.json is missing, so the launch is unknown"] == opened.problems
    # One without a step is of step 0, as with a file per step.
    assert [0, *range(25)] == [row["step"] for row in rows]


def test_files_of_several_steps_are_compressed_when_they_are_over(worker_config):
    recorder = recorder_with(worker_config, steps_per_file=10, compress=True)
    directory = Path(worker_config.directory)
    for step in range(40):
        for number in range(40):
            recorder.append(("turn", now(), now(), {"request_id": "f" * 32, "n": number}, step))
        recorder._writer._write_out()
    recorder.close("exit")

    packed = sorted(path.parent.name for path in directory.glob("step_*/worker_0.jsonl.gz"))
    assert ["step_0-9", "step_10-19"] == packed
    lines = gzip.decompress((directory / "step_10-19" / "worker_0.jsonl.gz").read_bytes())
    assert 400 == lines.count(b'"event":"turn"')
    with load(directory, cache=False) as opened:
        (row,) = opened.rows("SELECT count(*) AS n FROM event_fields WHERE event = 'turn'")
        assert ["run.json is missing, so the launch is unknown"] == opened.problems
    assert 1600 == row["n"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from generate_events import Shape

    folder = tmp_path_factory.mktemp("shared")
    full = full_run(folder / "full", Shape(steps=3, workers=2, requests=12))
    record_again(full, folder / "apart")
    record_again(full, folder / "shared", steps_per_file=2)
    # The other processes' files, as their recorders would have written them.
    for path in sorted((folder / "shared").glob("step_[0-9]/*.jsonl")):
        step = steps_of_folder(path.parent.name)[0]
        target = folder / "shared" / step_folder(step, 2) / path.name
        target.parent.mkdir(exist_ok=True)
        with target.open("ab") as file:
            file.write(path.read_bytes())
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    return folder / "apart", folder / "shared"


def answers(
    path, names=("step_times", "request_times", "critical_path", "tool_times", "rank_balance")
):
    with load(path, cache=False) as opened:
        found = {name: ANALYSES[name](opened.tables) for name in names}
        problems = opened.problems
    return {
        name: [{key: value for key, value in row.items() if key != "run"} for row in rows]
        for name, rows in found.items()
    }, problems


def test_all_tables_are_the_same_in_both_layouts(runs):
    apart, shared = runs

    assert ["step_0-1", "step_2-3"] == sorted(path.name for path in shared.glob("step_*"))
    assert answers(apart) == answers(shared)


def test_an_archive_and_a_cache_of_it_too(runs, tmp_path):
    apart, shared = runs
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(shared, "run")
    copied = shutil.copytree(shared, tmp_path / "copied")

    assert answers(apart) == answers(tmp_path / "run.tar.gz")
    for _ in range(2):
        with load(copied) as opened:
            assert answers(apart)[0]["step_times"][1]["duration_s"] == pytest.approx(
                ANALYSES["step_times"](opened.tables, (1, 1))[0]["duration_s"]
            )


def test_one_folder_alone_is_read(runs):
    _, shared = runs
    with load(shared / "step_2-3", cache=False) as opened:
        steps = opened.rows("SELECT DISTINCT step FROM requests WHERE NOT validate ORDER BY step")

    assert [2, 3] == [row["step"] for row in steps]


def test_a_run_that_goes_on_is_followed(runs, tmp_path):
    """Line for line the same, also of files that grow."""
    apart, shared = runs

    def followed(run):
        return sorted(
            (name, step, line.timestamp, line.event)
            for name, step, line in run.poll()
            if line.event != "profiler_cost"
        )

    assert followed(Run(apart)) == followed(Run(shared))
    growing = shutil.copytree(shared, tmp_path / "growing")
    path = growing / "step_2-3" / "worker_0.jsonl"
    whole = path.read_bytes()
    half = whole.rfind(b"\n", 0, len(whole) // 2) + 1
    path.write_bytes(whole[:half])
    run = Run(growing)
    before = followed(run)
    path.write_bytes(whole)
    assert followed(Run(shared)) == sorted([*before, *followed(run)])
