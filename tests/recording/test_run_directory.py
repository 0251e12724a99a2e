"""The run directory: one per launch."""

import json
import os
import stat
import threading

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_profiler.errors import ConfigError
from verl_profiler.launch.settings import parse
from verl_profiler.recording import run_directory
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings

CLOCK = take_anchor()


def make(path):
    return run_directory.make(str(path), CLOCK, EventSettings(), {"model": "m"})


def test_a_second_launch_with_one_name_gets_its_own(tmp_path):
    """Runs never mix."""
    made = [make(tmp_path / "logs" / "name") for _ in range(3)]

    assert ["name", "name-2", "name-3"] == [directory.name for directory in made]


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


def test_an_older_loggers_files_are_left_alone(tmp_path):
    """Step folders without a run.json are the original logger's."""
    (tmp_path / "name" / "step_1").mkdir(parents=True)

    assert "name-2" == make(tmp_path / "name").name


def test_run_json_says_what_was_launched(tmp_path):
    """Versions, command, settings, training, clock."""
    content = json.loads((make(tmp_path / "name") / "run.json").read_bytes())

    assert {"verl_profiler", "python"} <= content["versions"].keys()
    assert {"model": "m"} == content["training"]
    assert CLOCK.wall_ns == content["clock"]["wall_ns"]
    assert content["settings"]["families"]["rollout"]
    assert content["command"]


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    """Workers run elsewhere."""
    monkeypatch.chdir(tmp_path)

    assert tmp_path / "logs" / "x" == make("logs/x")


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_cannot_be_made_says_so(tmp_path, path):
    """Before training."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"profiler.output_dir=DIR.* \(output-dir\)"):
        make(tmp_path / path)


LAUNCH = {
    "command": [
        *("env", "HF_TOKEN=sECRet1", "python", "-m", "verl.trainer.main_ppo"),
        *("+custom.api_key=sECRet2", "--token", "sECRet3", "data.prompt_key=prompt"),
        *("hydra.run.dir=s3://u:sECRet4@host/x", "trainer.run=abcsECRet7"),
    ],
    "settings": {
        "memory_saver": {"environment": {"MY_PASSWORD": "sECRet5"}},
        "nsight": {"options": {"all": {"env-var": "API_KEY=sECRet6"}}},
    },
    "training": {"model": "https://host/m?X-Amz-Signature=sECRet8&v=1"},
}


def launched(path, monkeypatch, node=LAUNCH["settings"]):
    monkeypatch.setattr(run_directory.sys, "orig_argv", LAUNCH["command"])
    monkeypatch.setenv("WANDB_API_KEY", "abcsECRet7")
    directory = run_directory.make(str(path), CLOCK, node, LAUNCH["training"])
    return json.loads((directory / "run.json").read_bytes())


def test_credentials_are_masked_before_run_json_is_written(tmp_path, monkeypatch):
    """By key, by place, and by the value of a variable; everything else stays."""
    content = launched(tmp_path / "name", monkeypatch)

    assert "sECRet" not in json.dumps(content)
    assert "data.prompt_key=prompt" in content["command"]
    assert "hydra.run.dir=s3://***@host/x" in content["command"]
    assert {"MY_PASSWORD": "***"} == content["settings"]["memory_saver"]["environment"]


def test_the_command_is_left_out_on_request(tmp_path, monkeypatch):
    """`profiler.record_command: false`: no command, no path, no host, no variable."""
    monkeypatch.chdir(tmp_path)
    node = {
        "output_dir": str(tmp_path / "name"),
        "record_command": False,
        "memory_saver": {"environment": {"TMS_X": "on"}},
        "nsight": {"directory": str(tmp_path / "raw"), "options": {"all": {"trace": "cuda"}}},
    }
    directory = run_directory.make(
        node["output_dir"], CLOCK, parse(node), {"model": str(tmp_path / "model"), "nnodes": 1}
    )
    content = json.loads((directory / "run.json").read_bytes())

    assert {"command", "cwd", "host"}.isdisjoint(content)
    assert {"model": "model", "nnodes": 1} == content["training"]
    assert content["settings"]["events"]["families"]["rollout"]
    text = json.dumps(content)
    assert [] == [word for word in (str(tmp_path), "TMS_X", "cuda", "pytest") if word in text]


def test_run_json_follows_the_umask(tmp_path):
    """A group that shares a disk reads it where the user says so, and nobody does where not."""
    modes = []
    for umask in (0o077, 0o002):
        before = os.umask(umask)
        try:
            directory = make(tmp_path / f"name{umask}" / "run")
        finally:
            os.umask(before)
        modes += [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "run.json")]

    assert [0o700, 0o600, 0o775, 0o664] == modes


@given(
    key=st.sampled_from(["api_key", "token", "HF_TOKEN", "password", "a.client_secret", "cookie"]),
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=2),
    before=st.lists(st.sampled_from(["python", "-m", "x", "a=1", "--lr", "b={c:d}"])),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_byte_of_a_secret_is_written(tmp_path, monkeypatch, key, secret, before):
    """As an override, as the word after a flag, as a setting, as a variable's value."""
    secret = f"Zq9{secret}9qZ"
    flag = f"--{key.replace('.', '-')}"
    words = [*before, f"+{key}={secret}", *before, "x", flag, secret, f"name={secret}"]
    node = {"environment": {key: secret, "URL": f"https://u:{secret}".split("/x")[0] + "@h"}}
    monkeypatch.setattr(run_directory.sys, "orig_argv", words)
    monkeypatch.setattr(run_directory.os, "environ", {"MY_API_KEY": secret})
    monkeypatch.setattr(run_directory, "versions", dict)
    launch = run_directory._launch("x", CLOCK, node, {"model": f"m?{key}={secret}"})
    written = msgspec.json.encode(launch)

    assert msgspec.json.encode(secret)[1:-1] not in written
    assert b"9qZ" not in written
