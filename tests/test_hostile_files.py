"""Files from anywhere: a plain message instead of a traceback, a hang or a full memory."""

import io
import json
import os
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hostile import HEADER, LINES, RUN, VALUES, paths_of, small_run, text_with

from verl_profiler.cli import main
from verl_profiler.following import Run
from verl_profiler.live import Live
from verl_profiler.reader import load
from verl_profiler.report.live_text import frame

# A command that takes longer than this hangs.
BOUND_S = 20


def call(*arguments):
    """Run a command; return its exit status and everything that it printed."""
    printed = io.StringIO()
    begin_s = time.monotonic()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main([str(argument) for argument in arguments])
    assert status in (0, 1, 2)
    assert time.monotonic() - begin_s < BOUND_S
    return status, printed.getvalue()


def a_pipe(path):
    os.mkfifo(path)


def a_device(path):
    path.symlink_to("/dev/zero")


def a_folder(path):
    path.mkdir()


def sparse(path):
    with path.open("wb") as file:
        file.truncate(10 << 30)


def deep(path):
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def its_own_target(path):
    path.symlink_to(path.name)


KINDS = [a_pipe, a_device, a_folder, sparse, deep, its_own_target]
COMMANDS = [("summary", "--no-cache"), ("watch", "--once")]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_ordinary_file_costs_its_own_content(tmp_path, kind):
    """Pipes, devices, folders, 10 GB of nothing, and 100,000 brackets in the place of a file."""
    names = ["run.json", "processes/worker_0.json", "step_1/more_0.jsonl"]
    run = small_run(tmp_path)
    for name in names:
        (run / name).unlink(missing_ok=True)
        kind(run / name)

    with load(run, cache=False) as opened:
        assert len(opened.rows("SELECT * FROM events")) == 10
        for name in names:
            assert any(problem.startswith(name) for problem in opened.problems), name
    status, printed = call("watch", run, "--once")
    assert status == 0
    assert "run.json cannot be read" in printed
    assert "worker_0.json cannot be read" in printed


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet", "run.tar", "run.tar.zst"])
def test_what_is_named_must_be_an_ordinary_file(tmp_path, name, kind):
    kind(tmp_path / name)

    status, printed = call("summary", tmp_path / name, "--no-cache")

    assert status in (1, 2)
    assert printed.count("\n") < 8


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [a_pipe, a_device, sparse, its_own_target])
def test_parquet_files_of_a_run_are_ordinary_ones(tmp_path, kind):
    kind(tmp_path / "events.parquet")

    status, printed = call("summary", tmp_path, "--no-cache")

    assert status == 2
    assert "holds no event files" in printed


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "d/" * 3000, "\udcff\udcfe", "~", "~root"])
def test_paths_that_cannot_be_are_named(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)

    for command, option in COMMANDS:
        assert call(command, name, option)[0] == 2


def test_a_step_that_cannot_be_is_left_out(tmp_path):
    """`step_2147483648` does not fit the column, and no training gets there."""
    run = small_run(tmp_path)
    (run / "step_1").rename(run / "step_2147483648")
    (run / "step_2").mkdir()

    status, printed = call("summary", run, "--no-cache")

    assert status in (0, 1)
    assert "step_2147483648/ is of no step" in printed


def test_files_whose_names_are_no_text(tmp_path):
    """Names of files are bytes."""
    run = small_run(tmp_path)
    odd = os.fsdecode(b"worker_\xff\xfe")
    (run / "step_1" / "worker_0.jsonl").rename(run / "step_1" / f"{odd}.jsonl")
    (run / "processes" / "worker_0.json").rename(run / "processes" / f"{odd}.json")
    run = run.rename(tmp_path / os.fsdecode(b"run\xff"))

    for command, option in COMMANDS:
        status, printed = call(command, run, option)
        assert status == 0
        printed.encode()


def hostile_texts(content):
    """Yield what to write: `content` with each value in each place of it."""
    for path in paths_of(content):
        for name, value in VALUES.items():
            yield f"{path} = {name}", text_with(content, path, value)


def frame_of(run):
    """Return the screen of `watch`."""
    live = Live()
    for name, step, line in run.poll():
        live.take(name, step, line)
    return frame(live, run.launch(), run.headers(), title="run", now_s=1.8e9)


def test_watch_takes_any_value_in_run_json(tmp_path):
    """With those of the other files, 152 of 5,550 ended in a traceback once."""
    run = small_run(tmp_path)

    for place, text in list(hostile_texts(RUN))[::5]:
        (run / "run.json").write_text(text)
        assert frame_of(Run(run)), place


def test_watch_takes_any_value_in_any_header(tmp_path):
    run = small_run(tmp_path)

    for number, (_, text) in enumerate(hostile_texts(HEADER)):
        (run / "processes" / f"worker_{number}.json").write_text(text)
    assert frame_of(Run(run))


def test_watch_takes_any_value_in_any_line(tmp_path):
    run = small_run(tmp_path)

    for name, lines in LINES.items():
        for number, line in enumerate(lines):
            others = [json.dumps(each) for each in lines[:number] + lines[number + 1 :]]
            texts = [text for _, text in hostile_texts(line)]
            (run / "step_1" / f"{name}.jsonl").write_text("\n".join([*texts, *others]) + "\n")
            assert call("watch", run, "--once")[0] in (0, 1)


def test_summary_takes_any_value_in_any_header(tmp_path):
    """One process per value: each of them loses one field, and the run nothing else."""
    run = small_run(tmp_path)
    texts = list(hostile_texts(HEADER))[::2]
    for number, (_, text) in enumerate(texts):
        (run / "processes" / f"other_{number}.json").write_text(text)

    status, printed = call("summary", run, "--no-cache")

    assert status == 0
    assert "other_" in printed


def test_summary_takes_any_value_in_run_json(tmp_path):
    """Read as the reader does; the commands see only what passed."""
    from verl_profiler.sources import find_sources

    run = small_run(tmp_path)
    for place, text in list(hostile_texts(RUN))[2::5]:
        (run / "run.json").write_text(text)
        problems = []
        (source,) = find_sources([run], tmp_path, problems)
        json.dumps(source.launch, allow_nan=False).encode()
        assert all(len(problem) < 2000 for problem in problems), place
