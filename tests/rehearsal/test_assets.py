"""The cache of the generated model and prompts: made once, whole or not at all."""

import subprocess

import pytest

from verl_profiler.rehearsal import assets


@pytest.fixture
def commands(monkeypatch):
    """The commands that would teach a model; each leaves one file."""
    started = []

    def run(command, **_):
        started.append(command)
        folder = command[command.index("--out") + 1]
        with open(f"{folder}/config.json", "w") as file:
            file.write("{}")

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_a_model_is_taught_once_for_each_seed_and_what_its_tools_are(tmp_path, commands):
    """What the tools' file contains decides, not where it is."""
    cache, tools = tmp_path / "cache", tmp_path / "tools.py"
    first = assets.trained_model(cache, None, None, 0)

    assert first == assets.trained_model(cache, None, None, 0)
    assert 1 == len(commands)
    assert ["config.json"] == [file.name for file in first.iterdir()]
    made = {first, assets.trained_model(cache, None, None, 1)}
    for text in ("one", "two"):
        tools.write_text(text)
        made.add(assets.trained_model(cache, str(tools), None, 0))
    assert 4 == len(made) == len(commands)
    assert ["--function-tools", str(tools)] == commands[-1][-2:]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    """A half-made model would be found by the next rehearsal."""

    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        assets.trained_model(tmp_path, None, None, 0)

    assert [] == list(tmp_path.iterdir())


def test_whoever_is_second_takes_what_the_first_made(tmp_path, monkeypatch):
    """Two rehearsals may start at the same time."""

    def run(command, **_):
        scratch = command[command.index("--out") + 1]
        # The other rehearsal: the scratch folder is named `.<final name>.<random>`.
        name = scratch.rsplit("/", 1)[1].split(".")[1]
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").touch()

    monkeypatch.setattr(subprocess, "run", run)
    folder = assets.trained_model(tmp_path, None, None, 0)

    assert ["theirs"] == [file.name for file in folder.iterdir()]
    assert [folder] == list(tmp_path.iterdir())
