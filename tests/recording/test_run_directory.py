"""The run directory: one per launch."""

import json
import threading

import pytest

from verl_profiler.errors import ConfigError
from verl_profiler.recording import run_directory
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings

CLOCK = take_anchor()


def make(path):
    return run_directory.make(str(path), CLOCK, EventSettings(), {"model": "m"})


def test_a_second_launch_with_one_name_gets_its_own(tmp_path, monkeypatch):
    """Runs never mix, nor with the original logger's; a relative path is made absolute, workers run elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "step_1").mkdir(parents=True)

    assert [tmp_path / "logs" / name for name in ("x", "x-2", "x-3")] == [
        make("logs/x") for _ in range(3)
    ]
    assert "old-2" == make(tmp_path / "old").name


def test_a_run_is_not_written_into_rays_copy_of_a_working_directory(tmp_path, monkeypatch, capsys):
    """`ray job submit --working-dir`: Ray deletes its copy, a folder of its session."""
    session = tmp_path / "ray" / "session_1" / "runtime_resources"
    copy = session / "working_dir_files" / "_ray_pkg_0a1b" / "scripts"
    copy.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(copy)

    assert tmp_path / "home" / "logs" / "x" == make("logs/x")
    assert f"in {tmp_path / 'home'}" in capsys.readouterr().err
    assert tmp_path / "y" == make(tmp_path / "y")
    assert "" == capsys.readouterr().err


def test_launches_at_the_same_moment_get_their_own(tmp_path):
    """Whoever creates run.json has the name."""
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(make(tmp_path / "name"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 8 == len(set(made))


def test_run_json_says_what_was_launched(tmp_path):
    """Versions, command, settings, training, clock."""
    content = json.loads((make(tmp_path / "name") / "run.json").read_bytes())

    assert {"verl_profiler", "python"} <= content["versions"].keys()
    assert {"model": "m"} == content["training"]
    assert CLOCK.wall_ns == content["clock"]["wall_ns"]
    assert content["settings"]["enabled"]
    assert content["command"]


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_cannot_be_made_says_so(tmp_path, path):
    """Before training."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"profiler.output_dir=DIR.* \(output-dir\)"):
        make(tmp_path / path)
