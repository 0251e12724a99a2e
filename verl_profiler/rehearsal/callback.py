"""Hydra's callback of the `rehearsal` options: prepares the driver before verl's `main` runs.

With it the plain command works, without environment variables:

    python -m verl.trainer.main_ppo +rehearsal=cpu +profiler=multiturn

The driver has imported verl by then.  That is early enough: the driver only checks the settings
and starts Ray, whose processes inherit the environment that is set here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_profiler.environ import REHEARSAL_POLL_INTERVAL
from verl_profiler.rehearsal import assets
from verl_profiler.rehearsal.environment import environment

# verl requests 3 CPUs per rank; the task runner, agent loops, storage and reward take one each.
_CPUS_PER_RANK = 3
_OTHER_CPUS = 6
# The actors of verl.experimental's trainers: one of 10 CPUs, or two and a queue of 2.
_EXPERIMENTAL_CPUS = 22

_SEPARATE = "separate_async"
_CHECKPOINT_ENGINE = "verl_profiler.rehearsal.gloo_checkpoint_engine"


class RehearsalCallback(Callback):
    """Sets the environment, registers the CPU platform, and fills in the generated paths."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepare the driver.  Hydra turns exceptions into warnings, so a failure exits the process."""
        try:
            prepare(config)
        except Exception as error:  # noqa: BLE001
            sys.exit(f"cannot prepare the rehearsal: {type(error).__name__}: {error}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Reject sweeps, for whose runs Hydra does not call `on_run_start`."""
        sys.exit("a rehearsal cannot be part of a sweep: omit -m / --multirun")


def prepare(config: DictConfig) -> None:
    """Make the driver and its config ready for a run on a CPU."""
    os.environ.update(environment(config.actor_rollout_ref.rollout.name, os.environ))
    if (seconds := config.rehearsal.poll_interval_s) is not None:
        # The processes that Ray starts inherit it.
        os.environ[REHEARSAL_POLL_INTERVAL] = str(float(seconds))

    # Its import registers the patches.
    importlib.import_module("verl_profiler.rehearsal.worker")
    if importlib.util.find_spec("verl.plugin") is not None:
        _select_platform()

    with open_dict(config):
        mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
        if mode == _SEPARATE and config.trainer.get("use_v1", True):
            _separate(config)
        if "rollout" in config:
            _experimental(config)
        _fill_in(config)


def _select_platform() -> None:
    """Make the CPU the platform of the driver, where verl has platforms (0.9 and newer)."""
    from verl_profiler.rehearsal.platform import CpuPlatform

    platform_manager: Any = importlib.import_module("verl.plugin.platform.platform_manager")
    if os.environ["VERL_PLATFORM"] != "cpu":
        # verl selects it by its name.
        platform_manager._current_platform = None
    elif platform_manager._current_platform is None:
        platform_manager.set_platform(CpuPlatform())
    elif not isinstance(platform_manager._current_platform, CpuPlatform):
        platform_manager._current_platform = CpuPlatform()


def _separate(config: DictConfig) -> None:
    """Give the separate trainer what it needs: replicas and a checkpoint engine of its own."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes == 0:
        rollout.nnodes = 1
    _use_gloo(config)
    # verl asserts this product.
    config.actor_rollout_ref.actor.ppo_mini_batch_size = (
        config.data.train_batch_size // config.trainer.v1.separate_async.parameter_sync_step
    )


def _experimental(config: DictConfig) -> None:
    """Set what verl asserts of the trainers in verl.experimental."""
    config.actor_rollout_ref.hybrid_engine = False
    _use_gloo(config)
    schedule = config.get("async_training")
    if schedule is None:
        return
    # The rollouter takes prompts one by one, as many as the steps need.
    config.data.train_batch_size = 0
    config.data.gen_batch_size = 1
    if config.rollout.total_rollout_steps is None:
        config.rollout.total_rollout_steps = (
            config.actor_rollout_ref.actor.ppo_mini_batch_size
            * schedule.require_batches
            * schedule.trigger_parameter_sync_step
            * config.trainer.total_training_steps
        )


def _use_gloo(config: DictConfig) -> None:
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend in ("naive", "nccl"):
        engine.backend = "gloo"
        engine.custom_backend_module = _CHECKPOINT_ENGINE


def _fill_in(config: DictConfig) -> None:
    settings = config.rehearsal
    cache = Path(settings.cache_dir or assets.default_cache()).expanduser().absolute()
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.function_tool_path == "rehearsal":
        multi_turn.function_tool_path = str(assets.FUNCTION_TOOLS)
    if multi_turn.tool_config_path == "rehearsal":
        multi_turn.tool_config_path = str(assets.TOOL_CONFIG)
    if config.actor_rollout_ref.model.path is None:
        config.actor_rollout_ref.model.path = str(
            assets.trained_model(
                cache, multi_turn.function_tool_path, multi_turn.tool_config_path, settings.seed
            )
        )
    for key, name in (("train_files", "train"), ("val_files", "validation")):
        if config.data[key] is None:
            config.data[key] = str(assets.prompts(cache, settings.seed) / f"{name}.parquet")
    ray_init = config.ray_kwargs.ray_init
    if ray_init.get("address", "local") != "local":
        # A running cluster has its resources; ray.init rejects others.
        return
    rollout = config.actor_rollout_ref.rollout
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    separate = config.get("rollout") or rollout
    ranks += (separate.get("nnodes") or 0) * separate.get("n_gpus_per_node", 1)
    if ray_init.num_gpus is None:
        ray_init.num_gpus = ranks
    if ray_init.num_cpus is None:
        ray_init.num_cpus = _CPUS_PER_RANK * ranks + rollout.agent.num_workers + _OTHER_CPUS
        if "rollout" in config:
            ray_init.num_cpus += _EXPERIMENTAL_CPUS
