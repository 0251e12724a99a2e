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


def test_a_running_cluster_keeps_its_resources(config):
    """Ray refuses numbers for a cluster that it only joins."""
    config.ray_kwargs.ray_init.address = "auto"

    callback._fill_in(config)

    assert config.ray_kwargs.ray_init.num_gpus is None
    assert config.ray_kwargs.ray_init.num_cpus is None
