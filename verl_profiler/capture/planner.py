"""Make the plan of a run's captures: which roles, which ranks, how many captures per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_profiler.capture import tools
from verl_profiler.capture.plan import (
    ROLES,
    NsightSettings,
    Plan,
    RoleCapture,
    raw_directory,
    umask,
)
from verl_profiler.capture.verl_keys import Capture, world_size
from verl_profiler.errors import ConfigError
from verl_profiler.events.json_values import mapping_or_empty


def make_plan(config: Any, capture: Capture, settings: NsightSettings, run: Path) -> Plan | None:
    """Return the plan, or None if verl captures with a tool that only verl supports.

    Args:
        config: verl's config, translated; gets what verl's own profiler needs for the tool.
        capture: What `verl_keys.translate` returned.
        settings: `profiler.nsight`.
        run: The run directory.

    Raises:
        ConfigError: For ranks that do not exist, or options that the tool cannot be given.
    """
    native = config.global_profiler
    tool = tools.find(native.tool)
    if tool is None:
        return None
    directory = raw_directory(run, settings.directory)
    roles: dict[str, RoleCapture] = {}
    for key, names in ROLES.items():
        for role in names:
            ranks = _ranks(key, role, config, capture, getattr(settings.roles, key))
            if ranks == ():
                continue
            captures = captures_per_process(config, capture, role)
            options = tool.options(config, settings, key, f"{directory}/{role}", captures)
            roles[role] = RoleCapture(ranks, options)
    tool.configure(native, directory)
    return Plan(
        tool.name,
        capture.steps,
        capture.discrete,
        str(directory),
        str(run / "nsight" / "journal"),
        roles,
        umask(),
    )


def remarks(config: Any, capture: Capture, plan: Plan) -> list[str]:
    """Return what was requested and will not be captured, or not in the way that one may expect.

    Args:
        config: verl's config, translated.
        capture: What `verl_keys.translate` returned.
        plan: What `make_plan` returned.
    """
    found: list[str] = []
    others = [role for role in plan.roles if role not in ROLES["workers"]]
    if others == list(plan.roles) and not set(others) - {"trainer"}:
        found.append(
            "no ranks are set, so only the controller is captured. Add for example "
            "actor_rollout_ref.actor.profile_ranks=[0]. (no-ranks)"
        )
    last = OmegaConf.select(config, "trainer.total_training_steps")
    never = [step for step in plan.steps if isinstance(last, int) and step > last]
    if never:
        found.append(
            f"steps {never} of trainer.profile_steps will not run: training ends at step {last}. "
            "(step-never-comes)"
        )
    if (
        "reward_model" in capture.ranks
        and OmegaConf.select(config, "reward_model.profiler") is None
    ):
        found.append(
            "reward_model.profile_ranks has no effect: this verl has no worker group for reward "
            "models. Its reward workers are captured with profiler.nsight.roles.reward=true. "
            "(no-worker-group)"
        )
    if "rollout" in capture.ranks and "engine" not in plan.roles:
        found.append(
            "actor_rollout_ref.rollout.profile_ranks captures the workers of those ranks, which "
            "hold the weights; the engine servers that generate are separate processes. Add "
            "profiler.nsight.roles.engine=true for them. (engine-apart)"
        )
    if plan.discrete and others:
        found.append(
            f"profile_discrete splits the captures of the workers by task. {', '.join(others)} get "
            "one capture per step: their tasks overlap, and a process has one capture at a time. "
            "(one-per-step)"
        )
    return found


def _ranks(
    key: str, role: str, config: Any, capture: Capture, chosen: bool | tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return a role's ranks: None for all of them, () for none."""
    if chosen is False or chosen == ():
        return ()
    if isinstance(chosen, tuple):
        if key in ("trainer", "transfer_queue"):
            raise ConfigError(
                f"profiler.nsight.roles.{key} is {list(chosen)}, but its processes have no ranks.\n"
                f"Set profiler.nsight.roles.{key} to true or false.",
                "capture-keys",
            )
        count = _processes(key, config)
        outside = [rank for rank in chosen if rank < 0 or (count is not None and rank >= count)]
        if outside:
            raise ConfigError(
                f"profiler.nsight.roles.{key} is {list(chosen)}, but there are "
                f"{'no negative ranks' if count is None else f'ranks 0 to {count - 1} only'}.",
                "capture-keys",
            )
        return tuple(sorted(set(chosen)))
    if key == "workers":
        return _worker_ranks(role, capture)
    rollout = capture.ranks.get("rollout")
    if key == "engine" and rollout is not None:
        return tuple(sorted({rank // _replica_size(config) for rank in rollout}))
    return None


def _processes(key: str, config: Any) -> int | None:
    """Return how many processes a role will have, or None if the config has no number."""
    world = world_size(config)
    return {
        "workers": world,
        "engine": None if world is None else max(1, world // _replica_size(config)),
        "agent_loop": OmegaConf.select(config, "actor_rollout_ref.rollout.agent.num_workers"),
    }.get(key)


def _worker_ranks(role: str, capture: Capture) -> tuple[int, ...] | None:
    """Return the ranks of a worker group; colocated groups share the actor's processes."""
    of = {"actor": ("actor", "rollout", "ref", "critic"), "critic": ("critic",), "ref": ("ref",)}
    requested = [capture.ranks[name] for name in of[role] if name in capture.ranks]
    if any(ranks is None for ranks in requested):
        return None
    return tuple(sorted({rank for ranks in requested for rank in ranks or ()}))


def _replica_size(config: Any) -> int:
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
    sizes = ("tensor", "data", "pipeline")
    given = mapping_or_empty(rollout)
    found: list[int] = [given.get(f"{size}_model_parallel_size") or 1 for size in sizes]
    return max(1, found[0] * found[1] * found[2])


def captures_per_process(config: Any, capture: Capture, role: str) -> int:
    """Return how many captures a process of this role will make.

    nsys writes its reports after this many captures (`repeat-shutdown:N`): one too few loses the
    last one, one too many delays all of them until the process ends.
    """
    last = OmegaConf.select(config, "trainer.total_training_steps")
    steps = [step for step in capture.steps if not isinstance(last, int) or step <= last]
    if OmegaConf.select(config, "global_profiler.profile_continuous_steps"):
        steps = [step for step in steps if step - 1 not in steps]
    tasks = 1
    if capture.discrete and role in ROLES["workers"]:
        tasks = max(1, sum(_tasks(config, capture, role)))
    return max(1, len(steps) * tasks)


def _tasks(config: Any, capture: Capture, role: str) -> list[int]:
    """Return how often each task that verl captures runs in one step (verl 0.9 engine_workers)."""
    actor = mapping_or_empty(OmegaConf.select(config, "actor_rollout_ref.actor"))
    with_ref = bool(
        actor.get("use_kl_loss")
        or OmegaConf.select(config, "algorithm.use_kl_in_reward")
        or role == "ref"
    )
    bypass = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
    critic = mapping_or_empty(OmegaConf.select(config, "critic"))
    with_critic = "critic" in capture.ranks and (
        bool(critic.get("enable")) or OmegaConf.select(config, "algorithm.adv_estimator") == "gae"
    )
    batch = OmegaConf.select(config, "data.train_batch_size") or 1
    mini_batch = critic.get("ppo_mini_batch_size") or batch
    updates = (critic.get("ppo_epochs") or 1) * max(1, batch // mini_batch)
    return {
        "actor": [0 if bypass else 1, int(with_ref), 1, updates if with_critic else 0],
        "ref": [1],
        "critic": [updates],
    }[role]
