"""No credential is written about a launch, whatever it looks like; what readers need is."""

import errno
import json
import tarfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_profiler.analysis.compare.differences import configuration
from verl_profiler.events.redaction import (
    OMITTED,
    problem_of,
    public,
    recorded_command,
    recorded_values,
    without_url_secrets,
)
from verl_profiler.launch.settings import parse
from verl_profiler.launch.training_facts import training_facts
from verl_profiler.recording import run_directory
from verl_profiler.recording.clock import take_anchor

DATA = Path(__file__).parents[1] / "data"
# What services issue, in short; words are written by an allow-list, so that their form does not matter.
CREDENTIALS = [
    "0123456789abcdef0123456789abcdef01234567",
    "p@ss:w0rd/x",
    "-pS3cr3tPW",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
    "https://hooks.slack.com/services/T0/B0/Zq9secretsecret",
    "https://oapi.dingtalk.com/robot/send?access_token=0a1b2c3d4e5f",
    "postgresql://trainer:hunter2hunter2@db.internal:5432/x",
    "s3://bucket/x?X-Amz-Credential=AKIAX&X-Amz-Signature=0a1b2c3d4e5f",
    "AccountName=x;AccountKey=c2VjcmV0c2VjcmV0==;EndpointSuffix=core",
]


def places(secret):
    """Return a command, settings and a config that hold it everywhere under names that say nothing."""
    command = [
        *("env", f"NOTE={secret}", "sshpass", "-p", secret, f"-p{secret}", "curl", "-u", secret),
        *("-H", f"X-Thing: {secret}", f"http://u:{secret}@proxy/", f"https://h/x?note={secret}"),
        *(
            "/usr/bin/python3.11",
            "-m",
            "verl.trainer.main_ppo",
            "--thing",
            secret,
            f"--thing={secret}",
        ),
        *(
            f"+note={secret}",
            f"+a.b.note={secret}",
            f"+trainer.note={secret}",
            f"trainer.note={secret}",
        ),
        f"+trainer.notes=[1,{secret}]",
        f"+trainer.notes={{a:{{b:[{secret}]}}}}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.NOTE={secret}",
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.note={secret}",
        f"reward.custom_reward_function.reward_kwargs.note={secret}",
        f"data.train_files=https://u:{secret}@h/x",
        f"data.val_files=[/a.parquet,https://h/x?note={secret}]",
        f"actor_rollout_ref.model.path=s3://k:{secret}@bucket/m",
        f"trainer.experiment_name=$(echo {secret})",
        f"{secret}=1",
        "sh -c 'curl -u bot:" + secret + "'",
        secret,
    ]
    settings = {
        "output_dir": "logs/x",
        "nsight": {"options": {"e": f"NOTE={secret}", "note": secret}},
    }
    config = {
        "actor_rollout_ref": {"model": {"path": f"https://u:{secret}@h/m?note={secret}"}},
        "async_training": {
            "note": secret,
            "deep": [{"note": [secret]}],
            "staleness_threshold": 0.5,
        },
        "trainer": {"note": secret, "logger": ["console", secret]},
        "note": secret,
    }
    return command, settings, config


def pieces(secret):
    """Return what must not be left of it: itself, as JSON has it, and its longest part."""
    longest = max(secret.replace("@", "/").replace("?", "/").replace("=", "/").split("/"), key=len)
    return {secret, json.dumps(secret)[1:-1], longest}


@pytest.fixture
def launch_of(monkeypatch):
    def launch(command, settings, config):
        monkeypatch.setattr(run_directory.sys, "orig_argv", command)
        facts = training_facts(OmegaConf.create(config))
        return run_directory._launch("x", take_anchor(), parse(settings), facts)

    return launch


@pytest.mark.parametrize("secret", CREDENTIALS)
def test_no_credential_is_written_or_shown(launch_of, secret):
    """By run.json, by a reader of a run.json that has everything, by an error's text."""
    command, settings, config = places(secret)
    raw = {"command": command, "settings": settings, "training": config}
    shown = [
        launch_of(command, settings, config),
        recorded_command(command),
        recorded_values({**settings, **config}, "settings"),
        recorded_values(config, "training"),
        configuration(raw, {}),
        problem_of(RuntimeError(f"no answer from {secret}")),
        problem_of(PermissionError(errno.EACCES, f"refused {secret}", secret)),
    ]
    for each in shown:
        written = json.dumps(each, ensure_ascii=False, default=str)
        assert [] == [piece for piece in pieces(secret) if piece in written]


@given(
    secret=st.text(st.characters(min_codepoint=33), min_size=2).map(lambda text: f"Zq9{text}9qZ"),
    before=st.lists(st.text()),
)
def test_no_text_of_an_unknown_key_is_written(secret, before):
    """Any text at all."""
    command, _, config = places(secret)
    words = recorded_command([*before, *command])

    assert len(words) == len(before) + len(command)
    assert "9qZ" not in json.dumps([words, recorded_values(config, "training")])


def test_a_number_of_a_users_own_key_is_not_written():
    """A PIN; but a number that an engine takes is."""
    words = [
        "+trainer.pin=483920",
        "pin=483920",
        "reward.custom_reward_function.reward_kwargs.pin=483920",
        "profiler.nsight.options.pin=483920",
    ]

    assert "483920" not in "".join(recorded_command(words))
    engine = "+actor_rollout_ref.rollout.engine_kwargs.sglang.max_running_requests=64"
    assert [engine] == recorded_command([engine])


KEPT = [
    *("/opt/venv/bin/python", "-m", "verl.trainer.main_ppo", "+profiler=multiturn"),
    *("data.train_batch_size=256", "actor_rollout_ref.actor.optim.lr=1e-6", "trainer.test_freq=-1"),
    *(
        "trainer.val_before_train=False",
        "trainer.profile_steps=[1,2]",
        "trainer.logger=['console','wandb']",
    ),
    *(
        "actor_rollout_ref.rollout.name=sglang",
        "algorithm.adv_estimator=grpo",
        "trainer.total_epochs=null",
    ),
    *(
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
        "data.train_files=~/data/train.parquet",
    ),
    "profiler.output_dir=s3://bucket/runs/a",
    *("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8", "trainer.v1.trainer_mode=sync"),
]


def test_what_explains_a_training_is_written(launch_of):
    """Numbers, flags, choices, models and files of verl's keys."""
    assert KEPT == recorded_command(KEPT)
    assert ["trainer.note=<omitted>"] == recorded_command(["trainer.note=x"])


@pytest.mark.parametrize("archive", sorted(DATA.glob("*.tar.gz")), ids=lambda path: path.name)
def test_nothing_is_left_out_of_what_recorded_runs_were_explained_by(archive):
    """Findings and fixes read the same values as before."""
    with tarfile.open(archive) as files:
        launches = [
            json.load(files.extractfile(member))
            for member in files
            if member.name.endswith("run.json")
        ]
    for launch in launches:
        for part in ("training", "versions", "settings"):
            assert launch.get(part, {}) == recorded_values(launch.get(part, {}), part)


def test_values_that_were_omitted_in_both_runs_may_differ():
    """`diff` lists them instead of calling them equal."""
    sides = [{"command": [f"trainer.note={each}", "trainer.nnodes=1"]} for each in "ab"]

    assert [{"name": "trainer.note", "a": OMITTED, "b": OMITTED}] == configuration(*sides)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("s3://bucket/runs/my-run", None),
        ("webhdfs://me@namenode:9870/runs/x", None),
        ("abfss://container@account.dfs.core.windows.net/x", None),
        ("https://name@host", "https://<omitted>@host"),
        ("sftp://u:p@ss/w@host/x", "sftp://<omitted>@host/x"),
        ("sftp://u:p?ss@host/x", OMITTED),
        ("https://host:8080/a/b?c=d#e", "https://host:8080/<omitted>"),
        ("s3://bucket/x?part=1", "s3://bucket/x"),
        ("/data/Qwen2.5-7B, fine", None),
        ("a b; rm -rf c", OMITTED),
    ],
)
def test_what_is_left_of_a_place(text, left):
    """None: all of it."""
    assert (text if left is None else left) == public(text)
    assert public(text) == public(public(text)) or OMITTED == left or "<omitted>" in left


def test_a_text_has_no_secret_of_a_url():
    """What a training process prints."""
    text = (
        "cannot reach 'https://me:hun@ter2@h/a', /proc/s3:/k:hunter2@b/x or s3://b/y?sig=hunter2#z."
    )

    assert (
        "cannot reach 'https://<omitted>@h/a', /proc/s3:/<omitted>@b/x or s3://b/y"
        == without_url_secrets(text)
    )


class AnswerError(Exception):
    response: ClassVar = {
        "Error": {"Code": "InvalidAccessKeyId", "Message": "AKIAX does not exist"}
    }


def test_an_error_is_named_with_the_reason_that_is_known():
    """What a user can act on, without the message."""
    refused = PermissionError("The AWS Access Key Id AKIAX does not exist")
    refused.__cause__ = AnswerError("AKIAX")
    assert "PermissionError: InvalidAccessKeyId" == problem_of(refused)
    full = OSError(errno.ENOSPC, "No space left on device", "/x")
    assert "OSError: No space left on device" == problem_of(full)
    assert "ModuleNotFoundError: s3fs" == problem_of(ModuleNotFoundError("no s3fs", name="s3fs"))
