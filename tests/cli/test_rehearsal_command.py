"""The command of a rehearsal: overrides, environment, and how both are printed."""

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path

import pytest

from verl_profiler.cli import main
from verl_profiler.cli import rehearse as command_module
from verl_profiler.launch.command_line import parse
from verl_profiler.launch.dry_run import _compose, _declared, leaves
from verl_profiler.rehearsal.environment import FOR_SGLANG, FOR_TORCHVISION, environment


def _build(output=Path("/runs/one"), **changes):
    settings = {
        "engine": "sglang",
        "profiler": "multiturn",
        "trainer": "sync",
        "steps": 3,
        "ranks": 2,
        "workers": 2,
        "overrides": [],
    }
    return command_module.build(argparse.Namespace(**{**settings, **changes}), output, {})


def test_it_runs_verls_own_entry_point_with_this_interpreter():
    """`python` on PATH may be another one; the profiler records into the run directory."""
    overrides = ["trainer.total_training_steps=9", "data.train_files=a.parquet"]
    arguments = _build(overrides=overrides).arguments

    assert (sys.executable, "-m", "verl.trainer.main_ppo") == arguments[:3]
    assert {"+profiler=multiturn", "profiler.output_dir=/runs/one"} <= {*arguments}
    assert overrides == list(arguments[-2:]), "Hydra lets the last one win"
    # Without the option, Hydra would refuse `profiler.output_dir`.
    assert not [part for part in _build(profiler="none").arguments if "profiler" in part]
    for engine, option in (("sglang", "cpu"), ("vllm", "vllm"), ("standin", "standin")):
        assert f"+rehearsal={option}" in _build(engine=engine).arguments


@pytest.mark.parametrize(
    ("trainer", "main"),
    [
        ("one_step_off", "verl.experimental.one_step_off_policy.main_ppo"),
        ("fully_async", "verl.experimental.fully_async_policy.fully_async_main"),
    ],
)
def test_trainers_of_verl_experimental_have_their_own_entry_points(trainer, main):
    """Their overrides come before the user's, which win."""
    arguments = _build(trainer=trainer, overrides=["rollout.n_gpus_per_node=2"]).arguments

    assert main == arguments[2]
    assert ["rollout.n_gpus_per_node=1", "rollout.n_gpus_per_node=2"] == [
        each for each in arguments if each.startswith("rollout.n_gpus")
    ]
    assert not any("trainer_mode" in each for each in arguments)


@pytest.mark.parametrize(
    "name", ["a b", "a=b", "a,b", "it's", "a\\b", "{a}", "[a]", "a'b\\'c", "a b\\"]
)
def test_hydra_reads_any_path_back(name):
    """A path is one value, whatever its characters mean to Hydra's grammar."""
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser")
    arguments = _build(output=Path("/runs") / name).arguments
    (override,) = [part for part in arguments if part.startswith("profiler.output_dir=")]

    assert f"/runs/{name}" == parser.OverridesParser.create().parse_override(override).value()


def test_the_printed_command_is_what_would_run():
    """A shell splits it into the same words."""
    built = _build(output=Path("/runs/a b"), overrides=["a='b c'"])
    words = shlex.split(built.shell().replace("\\\n", ""))

    assert words[0] == "env"
    assert [f"{name}={value}" for name, value in built.variables.items()] == words[
        1 : 1 + len(built.variables)
    ]
    assert list(built.arguments) == words[1 + len(built.variables) :]


def test_the_environment_asks_for_a_cpu_and_keeps_what_is_the_users():
    """The command sets it, and so does the Hydra callback in the process that it starts."""
    standin = environment("standin", {})
    current = {"VERL_USE_EXTERNAL_MODULES": "mine", "PYTHONPATH": "/mine"}
    once = environment("sglang", current)

    worker = "verl_profiler.rehearsal.worker"
    assert ("cpu", worker) == (standin["VERL_PLATFORM"], standin["VERL_USE_EXTERNAL_MODULES"])
    on_gpu = {"VERL_PLATFORM": "nvidia"}
    assert "nvidia" == environment("standin", on_gpu)["VERL_PLATFORM"]
    assert "cpu" == environment("sglang", on_gpu)["VERL_PLATFORM"]
    assert "SGLANG_USE_CPU_ENGINE" not in standin
    assert "nobind" == environment("vllm", {})["VLLM_CPU_OMP_THREADS_BIND"]
    assert f"mine,{worker}" == once["VERL_USE_EXTERNAL_MODULES"]
    assert once["PYTHONPATH"].startswith(str(FOR_SGLANG))
    assert once["PYTHONPATH"].endswith(os.pathsep + "/mine")
    assert once == environment("sglang", once)


def test_a_package_that_is_not_installed_is_not_stood_in_for(monkeypatch):
    """Transformers would take torchvision for installed, and fail to import it."""
    assert (FOR_SGLANG / "sgl_kernel" / "__init__.py").is_file()
    assert (FOR_TORCHVISION / "torchvision" / "__init__.py").is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert "PYTHONPATH" not in environment("standin", {})
    assert str(FOR_TORCHVISION) not in environment("sglang", {})["PYTHONPATH"]


REWARDS = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
)
# As in verl's examples, and what people put around it.
TRAINING = [
    "algorithm.adv_estimator=rloo", "data.train_files=/data/gsm8k/train.parquet",
    "data.train_batch_size=1024", "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4", "actor_rollout_ref.rollout.temperature=0.7",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
    "+ray_kwargs.ray_init.runtime_env.py_executable=uv run", "trainer.logger=['console','wandb']",
    "trainer.n_gpus_per_node=8", "trainer.nnodes=4", "+profiler=multiturn",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=/data/tools.yaml",
    "actor_rollout_ref.actor.use_kl_loss=False", "actor_rollout_ref.rollout.multi_turn.enable=True",
    "actor_rollout_ref.rollout.agent.default_agent_loop=mine", "model_engine=megatron", "data.image_key=images",
    "actor_rollout_ref.model.lora_rank=64", "actor_rollout_ref.actor.profiler.enable=true",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
    "reward.reward_model.enable=True", "reward.reward_model.rollout.tensor_model_parallel_size=2",
]  # fmt: skip
KEPT = {
    "algorithm.adv_estimator=rloo",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.rollout.temperature=0.7",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.rollout.multi_turn.enable=True",
    "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
    "actor_rollout_ref.model.lora_rank=64",
    "data.image_key=images",
}


@pytest.mark.parametrize("around", ["python", "launcher", "script"])
def test_a_whole_command_is_rehearsed_with_its_rewards_and_small_sizes(tmp_path, capsys, around):
    """A script runs but for what it would do to the machine; its Python command is taken."""
    rewards, marker = tmp_path / "rewards.py", tmp_path / "installed"
    rewards.write_text(REWARDS)
    own = f"reward.custom_reward_function.path={rewards}"
    command = ["-m", "verl.trainer.main_ppo", *TRAINING, own]
    given = {
        "python": ["python3", *command],
        "launcher": ["ray", "job", "submit", "--", "uv", "run", "--exact", "python", *command],
        "script": ["bash", str(tmp_path / "train.sh"), "1e-6"],
    }[around]
    shell = shlex.join(["python3", *command]).replace("lr=1e-6", "lr=$1")
    (tmp_path / "train.sh").write_text(
        f"set -e\nray stop --force\npip install -t {marker} x\npython3 -c 'print(1)'\n{shell}\n"
    )
    out = tmp_path / "run"
    words = [
        "rehearse",
        "--engine",
        "standin",
        "--output",
        str(out),
        "--print-command",
        "--",
        *given,
    ]

    assert 0 == main(words)

    replaced, *apart, rest = capsys.readouterr().out.split("\n", 4)
    parts = ("the reward model", "the trainer's engine", "images")
    assert all(map(str.startswith, apart, (f"not rehearsed: {part}" for part in parts)))
    printed = shlex.split(rest.replace("\\\n", " "))
    assert {*KEPT, own, "+rehearsal=standin", "trainer.n_gpus_per_node=2"} <= {*printed}
    assert "actor_rollout_ref.rollout.multi_turn.tool_config_path=rehearsal" in printed
    assert not {*printed} & ({*TRAINING} - KEPT - {"+profiler=multiturn"})
    assert all(each in replaced for each in {*TRAINING} - KEPT)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["torchrun", "-m", "verl.trainer.sft_trainer", "a=1"], "cannot be rehearsed"),
        (["bash", "/nowhere/train.sh"], "starts no training"),
        (["python", "-m", "verl.trainer.main_ppo", "trainer"], "'trainer' is not a Hydra override"),
    ],
)
def test_a_command_that_cannot_be_rehearsed_is_an_error_with_what_to_do(capsys, given, message):
    assert 2 == main(["rehearse", "--print-command", "--", *given])
    assert message in capsys.readouterr().err


def test_a_word_that_is_no_override_is_an_error_before_ray_starts(capsys):
    assert 2 == main(["rehearse", "--engine", "standin", "--print-command", "--", "ls"])
    assert "'ls' is not a Hydra override.\nGive overrides, or `-- COMMAND`" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", [(), ("--config-name", "mine")])
def test_a_config_folder_that_is_here_is_rehearsed(tmp_path, capsys, name):
    words = ["python", "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", *name]
    assert 0 == main(["rehearse", "--print-command", "--", *words])
    printed = capsys.readouterr().out
    assert f"--config-path={tmp_path}" in printed
    assert bool(name) == ("--config-name=mine" in printed)


def test_a_script_s_python_is_caught_by_whatever_path_it_is_called(tmp_path):
    """Otherwise the training would run."""
    ran, main_file = tmp_path / "ran", tmp_path / "main_mine.py"
    main_file.write_text(f"open({str(ran)!r}, 'w')\n")
    script = tmp_path / "train.sh"
    script.write_text(f"{sys.executable} -c 1\n{sys.executable} -u {main_file} trainer.nnodes=$1\n")

    command = parse(["bash", str(script), "2"])

    assert (str(main_file), ["trainer.nnodes=2"]) == (command.entry, command.overrides)
    assert not ran.exists()


# Not imported: that takes seconds.
with_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl")


@with_verl
@pytest.mark.parametrize("engine", ["cpu", "standin", "vllm"])
def test_each_model_of_a_rehearsal_is_the_generated_one(engine):
    """The critic's as well, which verl's default algorithm trains."""
    name, folder, _ = _declared("verl.trainer.main_ppo")
    overrides = [f"+rehearsal={engine}", "actor_rollout_ref.model.path=/toy"]
    config = dict(leaves(_compose(name, str(folder), overrides)))

    for of in ("actor_rollout_ref.model", "critic.model"):
        assert ("/toy", "sdpa", False) == (
            config[f"{of}.path"],
            config[f"{of}.override_config.attn_implementation"],
            config[f"{of}.use_remove_padding"],
        )
    assert [] == [key for key, value in config.items() if str(value).startswith("~/models")]


def test_data_that_is_here_is_rehearsed(tmp_path, capsys):
    """Also several files; their prompts are longer than the generated ones."""
    files = [tmp_path / f"{name}.parquet" for name in ("gsm8k", "math")]
    for file in files:
        file.touch()
    given = ["data.max_prompt_length=8192", f"data.train_files=['{files[0]}', '{files[1]}']"]
    lost = f"data.val_files=['{files[0]}', '/nowhere/math.parquet']"
    words = ["python", "-m", "verl.trainer.main_ppo", *given, lost]
    assert 0 == main(["rehearse", "--print-command", "--", *words])
    replaced, printed = capsys.readouterr().out.split("\n", 1)
    printed = shlex.split(printed.replace("\\\n", " "))

    assert lost in replaced
    assert given[1] in printed
    assert "data.max_prompt_length=2048" in printed


@with_verl
def test_a_command_keeps_verls_defaults_of_what_is_rehearsed(capsys):
    """Algorithm and agent loop of a rehearsal without a command are an example."""
    assert 0 == main(["rehearse", "--print-command", "--", "python", "-m", "verl.trainer.main_ppo"])
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    name, folder, _ = _declared("verl.trainer.main_ppo")
    own, toy = (
        dict(leaves(_compose(name, str(folder), overrides)))
        for overrides in ([], words[words.index("+rehearsal=cpu") :])
    )

    assert own["actor_rollout_ref.model.path"] != toy["actor_rollout_ref.model.path"]
    for key in (
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
    ):
        assert own[key] == toy[key]
