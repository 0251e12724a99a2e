"""What run.json has about the training: verl's settings that explain where its time goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from verl_profiler.events.json_values import is_list
from verl_profiler.events.vocabulary import TRACKERS
from verl_profiler.launch import memory_saver


def selected(config: Any, path: str) -> Any:
    """Return the value at a dotted path of the config; None where it cannot be resolved yet."""
    try:
        value = OmegaConf.select(config, path)
    except Exception:  # noqa: BLE001  an interpolation that only a run can resolve
        return None
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def training_facts(config: Any) -> dict[str, Any]:
    """Return the part of run.json that describes the training."""
    pick = functools.partial(selected, config)
    return {
        "model": pick("actor_rollout_ref.model.path"),
        "rollout": pick("actor_rollout_ref.rollout.name"),
        "rollout_n": pick("actor_rollout_ref.rollout.n"),
        "tensor_model_parallel_size": pick("actor_rollout_ref.rollout.tensor_model_parallel_size"),
        "gpu_memory_utilization": pick("actor_rollout_ref.rollout.gpu_memory_utilization"),
        "agent_workers": pick("actor_rollout_ref.rollout.agent.num_workers"),
        "agent_loop": pick("actor_rollout_ref.rollout.agent.default_agent_loop"),
        "strategy": pick("actor_rollout_ref.actor.strategy"),
        "train_batch_size": pick("data.train_batch_size"),
        "max_prompt_length": pick("data.max_prompt_length"),
        "max_response_length": pick("data.max_response_length"),
        "nnodes": pick("trainer.nnodes"),
        "n_gpus_per_node": pick("trainer.n_gpus_per_node"),
        "use_v1": pick("trainer.use_v1"),
        "trainer_mode": pick("trainer.v1.trainer_mode"),
        "asynchronous": _asynchronous(pick),
        "settings": _settings(config),
        "project_name": pick("trainer.project_name"),
        "experiment_name": pick("trainer.experiment_name"),
        "logger": list(_trackers_of(pick("trainer.logger"))),
        "memory": memory_saver.facts(config),
    }


# What decides which fixes of findings can work in this run: numbers and flags.
_NUMBERS = (
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
    "data.train_batch_size",
    "reward.num_workers",
    "trainer.save_freq",
    "trainer.test_freq",
)
_FLAGS = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.rollout.disaggregation.enabled",
    "algorithm.filter_groups.enable",
    "trainer.v1.sampler.sync_refill_failed_groups",
    "trainer.v1.separate_async.hybrid_rollout.enable_switch",
)
# Of these only whether they are set.
_PATHS = {
    "actor_rollout_ref.rollout.router_config_path": (
        "actor_rollout_ref.rollout.router_config_path",
    ),
    "trainer.v1.sampler.custom_sampler": (
        "trainer.v1.sampler.custom_sampler.path",
        "trainer.v1.sampler.custom_sampler.name",
    ),
}


def _settings(config: Any) -> dict[str, Any]:
    """Return verl's settings that decide which fixes can work; one that cannot be resolved is left out."""
    found: dict[str, Any] = {}
    for key in (*_NUMBERS, *_FLAGS, *_PATHS):
        # Some interpolations can only be resolved by a run.
        with contextlib.suppress(Exception):
            values = [OmegaConf.select(config, path) for path in _PATHS.get(key, (key,))]
            if key in _PATHS:
                found[key] = all(values)
            elif values[0] is None or isinstance(
                values[0], bool if key in _FLAGS else (int, float)
            ):
                found[key] = values[0]
    return found


def _asynchronous(pick: Callable[[str], Any]) -> dict[str, Any]:
    """Return the settings of an asynchronous trainer that explain its waits; empty for others."""
    schedule = pick("async_training")
    if isinstance(schedule, dict):
        return {
            **schedule,
            "checkpoint_engine": pick("actor_rollout_ref.rollout.checkpoint_engine.backend"),
            "rollout_nnodes": pick("rollout.nnodes"),
            "rollout_n_gpus_per_node": pick("rollout.n_gpus_per_node"),
        }
    mode = pick("trainer.v1.trainer_mode")
    if mode is None or mode == "sync" or pick("trainer.use_v1") is False:
        return {}
    rollout, sampler = "actor_rollout_ref.rollout", "trainer.v1.sampler"
    found = {
        "num_warmup_batches": pick(f"trainer.v1.{mode}.num_warmup_batches"),
        "parameter_sync_step": pick(f"trainer.v1.{mode}.parameter_sync_step"),
        "enable_switch": pick(f"trainer.v1.{mode}.hybrid_rollout.enable_switch"),
        "max_off_policy_threshold": pick(f"{sampler}.max_off_policy_threshold"),
        "max_off_policy_strategy": pick(f"{sampler}.max_off_policy_strategy"),
        "hybrid_engine": pick("actor_rollout_ref.hybrid_engine"),
        "checkpoint_engine": pick(f"{rollout}.checkpoint_engine.backend"),
        "rollout_nnodes": pick(f"{rollout}.nnodes"),
        "rollout_n_gpus_per_node": pick(f"{rollout}.n_gpus_per_node"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _trackers_of(logger: Any) -> tuple[str, ...]:
    """Return the trackers among the values of `trainer.logger`, in their order."""
    named: list[Any] = [logger] if isinstance(logger, str) else logger if is_list(logger) else []
    # verl's older name of the logger.
    current = ("wandb" if name == "tracking" else name for name in named)
    return tuple(name for name in dict.fromkeys(current) if name in TRACKERS)
