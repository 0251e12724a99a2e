"""The Hydra callback: what it fills into verl's config, and what it refuses."""

import pytest

from verl_profiler.rehearsal import assets

pytestmark = pytest.mark.verl

omegaconf = pytest.importorskip("omegaconf")
callback = pytest.importorskip("verl_profiler.rehearsal.callback")


@pytest.fixture
def config(monkeypatch):
    """What the option leaves open; nothing is really generated."""
    monkeypatch.setattr(assets, "prompts", lambda cache, seed: cache / f"prompts-{seed}")
    monkeypatch.setattr(
        assets,
        "trained_model",
        lambda cache, functions, tools, seed: cache / f"model-{seed} of {functions} and {tools}",
    )
    return omegaconf.OmegaConf.create(
        {
            "rehearsal": {"cache_dir": "/cache", "seed": 7},
            "data": {"train_files": None, "val_files": None},
            "actor_rollout_ref": {
                "model": {"path": None},
                "rollout": {
                    "name": "standin",
                    "agent": {"num_workers": 2},
                    "multi_turn": {
                        "function_tool_path": "rehearsal",
                        "tool_config_path": "rehearsal",
                    },
                },
            },
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
            "ray_kwargs": {"ray_init": {"num_gpus": None, "num_cpus": None}},
        }
    )


def test_what_is_left_open_is_generated(config):
    """Model, prompts, tools, and the resources that Ray is told of."""
    callback._fill_in(config)

    tools = f"{assets.FUNCTION_TOOLS} and {assets.TOOL_CONFIG}"
    assert f"/cache/model-7 of {tools}" == config.actor_rollout_ref.model.path
    assert "/cache/prompts-7/train.parquet" == config.data.train_files
    assert "/cache/prompts-7/validation.parquet" == config.data.val_files
    assert 2 == config.ray_kwargs.ray_init.num_gpus
    assert config.ray_kwargs.ray_init.num_cpus >= 3 * 2 + 2


def test_what_the_user_set_is_kept(config):
    """A recipe of one's own wins, each part for itself."""
    config.actor_rollout_ref.model.path = "/mine"
    config.actor_rollout_ref.rollout.multi_turn.function_tool_path = "/mine/tools.py"
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = None
    config.data.train_files = ["a.parquet"]
    config.ray_kwargs.ray_init.num_cpus = 40
    before = config.copy()

    callback._fill_in(config)

    assert before.actor_rollout_ref == config.actor_rollout_ref
    assert ["a.parquet"] == config.data.train_files
    assert 40 == config.ray_kwargs.ray_init.num_cpus


def test_a_failure_ends_the_command_with_its_reason(config, monkeypatch):
    """Hydra would turn an exception into a warning and train something else."""

    def fail(_config):
        raise OSError("disk full")

    monkeypatch.setattr(callback, "prepare", fail)

    with pytest.raises(SystemExit, match="disk full"):
        callback.RehearsalCallback().on_run_start(config)


def test_a_sweep_is_refused(config):
    """Hydra does not prepare the runs of a sweep."""
    with pytest.raises(SystemExit, match="sweep"):
        callback.RehearsalCallback().on_multirun_start(config)


def test_a_running_cluster_keeps_its_resources(config):
    """Ray refuses numbers for a cluster that it only joins."""
    config.ray_kwargs.ray_init.address = "auto"

    callback._fill_in(config)

    assert config.ray_kwargs.ray_init.num_gpus is None
    assert config.ray_kwargs.ray_init.num_cpus is None


@pytest.fixture
def experimental(config):
    """The nodes that the trainers of verl.experimental add."""
    config.rollout = {"nnodes": 1, "n_gpus_per_node": 1, "total_rollout_steps": None}
    config.actor_rollout_ref.hybrid_engine = True
    config.actor_rollout_ref.rollout.checkpoint_engine = {"backend": "nccl"}
    config.actor_rollout_ref.actor = {"ppo_mini_batch_size": 4}
    config.trainer.total_training_steps = 3
    config.data.train_batch_size = 8
    return config


def test_an_experimental_trainer_has_a_replica_of_its_own(experimental):
    """It is counted among Ray's devices, and gets its weights over gloo."""
    callback._experimental(experimental)
    callback._fill_in(experimental)

    rollout = experimental.actor_rollout_ref.rollout
    assert experimental.actor_rollout_ref.hybrid_engine is False
    assert "gloo" == rollout.checkpoint_engine.backend
    assert 8 == experimental.data.train_batch_size
    assert 3 == experimental.ray_kwargs.ray_init.num_gpus
    assert experimental.ray_kwargs.ray_init.num_cpus >= 3 * 3 + 2 + 22


def test_a_rollouter_makes_as_many_samples_as_the_steps_need(experimental):
    """A step is one version of the weights: here two batches of four prompts."""
    experimental.async_training = {"require_batches": 1, "trigger_parameter_sync_step": 2}

    callback._experimental(experimental)

    assert 24 == experimental.rollout.total_rollout_steps
    assert (0, 1) == (experimental.data.train_batch_size, experimental.data.gen_batch_size)
