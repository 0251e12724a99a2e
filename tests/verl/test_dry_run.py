"""`check --config`: what a command line would capture, on the real config of verl."""

import pytest

from verl_profiler.cli import main

pytestmark = pytest.mark.verl


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    pytest.importorskip("verl")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()


def check(*words):
    return main(["check", "--config", *words])


def test_the_translation_of_a_command_line_is_printed(capsys):
    """A whole command line may be pasted."""
    status = check(
        *("python", "-m", "verl.trainer.main_ppo", "trainer.profile_steps=[1,2]"),
        "actor_rollout_ref.actor.profile_ranks=[0]",
        "profiler.nsight.roles.engine=true",
    )
    printed = capsys.readouterr().out

    assert 0 == status
    for line in (
        "trainer.profile_steps=[1, 2] removed (translated)",
        "global_profiler.steps: null becomes [1, 2]",
        "global_profiler.tool: null becomes nsys",
        "actor_rollout_ref.actor.profiler.ranks: [] becomes [0]",
        "steps [1, 2] are captured with nsys in",
        "  actor, ranks: 0",
        "  engine, ranks: all",
    ):
        assert line in printed.splitlines()
    assert "--capture-range=cudaProfilerApi" in printed
    assert "--capture-range-end=repeat-shutdown:2" in printed


@pytest.mark.parametrize(
    "words",
    [
        ["critic.profile_ranks=[1]", "critic.profile_discrete=true"],
        [
            "+actor_rollout_ref.critic.profile_ranks=[1]",
            "+actor_rollout_ref.critic.profile_discrete=true",
        ],
    ],
)
def test_the_guides_two_places_of_a_key_become_one_setting(words, capsys):
    """Its text puts the critic under actor_rollout_ref, its examples at the top."""
    assert 0 == check("trainer.profile_steps=[1]", *words)
    printed = capsys.readouterr().out.splitlines()

    for line in (
        "critic.profiler.enable: false becomes true",
        "critic.profiler.ranks: [] becomes [1]",
        "global_profiler.global_tool_config.nsys.discrete: false becomes true",
        "  critic, ranks: 1",
    ):
        assert line in printed
    assert not [line for line in printed if "critic.profile_" in line and "becomes" in line]


def test_what_will_not_come_as_asked_is_printed(capsys):
    """The run says the same when it starts."""
    status = check(
        *("trainer.profile_steps=[1,9]", "trainer.total_training_steps=5"),
        *("actor_rollout_ref.rollout.profile_ranks=[0]", "+actor_rollout_ref.rm.profile_ranks=[0]"),
        "actor_rollout_ref.rollout.profile_discrete=true",
    )
    printed = capsys.readouterr().out

    assert 0 == status
    for slug in ("step-never-comes", "no-worker-group", "engine-apart", "one-per-step"):
        assert f"({slug})" in printed


def test_null_and_empty_mean_no_ranks(capsys):
    """The guide's prose wins over the comment in its example."""
    keys = ("actor.profile_ranks=null", "ref.profile_ranks=[]")
    assert 0 == check("trainer.profile_steps=[1]", *(f"actor_rollout_ref.{each}" for each in keys))
    printed = capsys.readouterr().out

    assert "(no-ranks)" in printed
    assert "actor_rollout_ref.actor.profiler.enable" not in printed


def test_no_steps_capture_nothing(capsys):
    """And the command says so."""
    assert 0 == check("trainer.total_epochs=1")
    assert "captures nothing" in capsys.readouterr().out


def test_verls_own_keys_are_not_called_nothing(capsys):
    """verl reads them without this profiler."""
    assert 0 == check(
        "global_profiler.tool=nsys", "global_profiler.steps=[1,2]",
        "actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[0]",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "this profiler captures nothing" in printed
    assert "verl itself captures steps [1, 2] with nsys in\n  actor, ranks: 0\n" in printed
    assert "report appears when its process ends" in printed


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("torch", "captures nothing: trainer.profile_steps has no step, and none of verl's own"),
        ("nsys", "in\n  trainer, which is the controller\n"),
    ],
)
def test_verls_own_keys_without_a_role_capture_nobody_or_the_controller(capsys, tool, says):
    """verl runs its controller under nsys as soon as there are steps."""
    assert 0 == main(
        ["check", "--config", f"global_profiler.tool={tool}", "global_profiler.steps=[1]"]
    )

    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trainer.profile_steps=[0]", "counted from 1"),
        ("profiler.nsight.tool=rocprof", "config-value"),
        ("actor_rollout_ref.actor.profile_ranks=[8]", "ranks go from 0 to 7"),
        ("+actor_rollout_ref.acter.profile_ranks=[0]", "Did you mean actor_rollout_ref.actor"),
        ("actor_rollout_ref.ref.profile_ranks=all", "profile_ranks_all=true"),
        ("critic.profile_ranks_all=yes", "must be true or false"),
        ("nonsense", "not a Hydra override"),
        ("trainer.nope=1", "Hydra cannot compose"),
        # What Hydra would advise: the same key with a plus.
        ("profiler.events.detail_shre=0.3", "Did you mean profiler.events.detail_share?"),
        ("+trainer.profile_stpes=[1]", "Did you mean trainer.profile_steps?"),
        ("trainer.profile_step=[1]", "Did you mean trainer.profile_steps?"),
        (
            "actor_rollout_ref.actor.profile_rank=[0]",
            "Did you mean actor_rollout_ref.actor.profile_ranks?",
        ),
        (
            "+actor_rollout_ref.ref.profile_rank=[0]",
            "Did you mean actor_rollout_ref.ref.profile_ranks?",
        ),
    ],
)
def test_what_cannot_be_used_is_said(word, says, capsys):
    """In the words of the run itself."""
    assert 2 == check(word)
    assert says in capsys.readouterr().err


def test_commands_are_taken_as_they_are(tmp_path, monkeypatch, capsys):
    """Any program and entry point; Hydra's own options, relative to the file that declares the config."""
    package = tmp_path / "recipe" / "mine"
    (package / "config").mkdir(parents=True)
    (package / "other").mkdir()
    for folder, gpus in (("config", 3), ("other", 4)):
        (package / folder / "my_trainer.yaml").write_text(
            "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
            "defaults: [ppo_trainer, _self_]\n"
            f"trainer: {{n_gpus_per_node: {gpus}}}\n"
        )
    (package / "main_mine.py").write_text(
        "raise RuntimeError('must not be run')\nimport hydra\n"
        "@hydra.main(config_path='config', config_name='my_trainer', version_base=None)\n"
        "def main(config): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    module, rank = "recipe.mine.main_mine", "actor_rollout_ref.actor.profile_ranks=[99]"
    uv = ("uv", "run", "--isolated")
    (tmp_path / "train.sh").write_text(
        f"ray stop\nGPUS=$1\npython3 -m {module} \\\n --config-path=other $GPUS\n"
    )
    for words, gpus in (
        (("bash", "train.sh", rank), 4),
        (("python3", "-m", module, rank), 3),
        ((*uv, "python3", "-u", "-m", module, "--config-path=other", rank), 4),
        (("HYDRA_FULL_ERROR=1", "python3", "recipe/mine/main_mine.py", "-cp", "other", rank), 4),
        (("python3", "-m", "verl.trainer.main_ppo", rank), 8),
    ):
        # The message has the number of GPUs of the config that was composed.
        assert 2 == check(*words)
        assert f"ranks go from 0 to {gpus - 1} " in capsys.readouterr().err
    (tmp_path / "data.sh").write_text("set -xeu\nulimit -n 1 -n 2\npython3 -m json.tool $DATA\n")
    for words, says in (
        (("bash", "run.sh", rank), "starts no training"),
        (("--", "bash", "data.sh"), "data.sh: line 3: DATA: unbound variable.\n"),
        (
            ("torchrun", "-m", "verl.trainer.sft_trainer", "data.train_batch_size=4"),
            "(sft-trainer)",
        ),
        (("python3", "-m", "no.such.module", rank), "no.such.module is not here"),
        (("python3", "-m", "json.tool", rank), "declares no config"),
    ):
        assert 2 == check(*words)
        assert says in capsys.readouterr().err
