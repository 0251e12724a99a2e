"""Make the plan of a run's captures: which roles, which ranks, which nsys options.

The options are verl's own (`global_profiler.global_tool_config.nsys`), then those of
`profiler.nsight.options`.  What verl leaves open is filled in: how a capture starts in processes
without CUDA, and after how many captures nsys is done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_profiler.capture.file_modes import umask
from verl_profiler.capture.plan import (
    CAPTURE_RANGE,
    ROLES,
    NsightSettings,
    Plan,
    RoleCapture,
    as_text,
)
from verl_profiler.capture.verl_keys import Capture, select, world_size
from verl_profiler.errors import ConfigError
from verl_profiler.events.vocabulary import NVTX_DOMAIN

__all__ = ["captures_per_process", "make_plan", "raw_directory", "remarks"]

_BY_RANGE = {
    "capture-range": "nvtx",
    "nvtx-capture": f"{CAPTURE_RANGE}@{NVTX_DOMAIN}",
    "kill": "none",
}
# Without a GPU nsys has nothing to ask CUDA, and sampling needs rights that containers lack.
_WITHOUT_CUDA = {"trace": "nvtx", "sample": "none", "cpuctxsw": "none"}


def make_plan(config: Any, capture: Capture, settings: NsightSettings, run: Path) -> Plan | None:
    """Return the plan, or None when another tool of verl's captures.

    Args:
        config: verl's config, translated.
        capture: What `verl_keys.translate` returned.
        settings: `profiler.nsight`.
        run: The run directory.

    Raises:
        ConfigError: For an option or a directory that nsys cannot be given through Ray.
    """
    native = config.global_profiler
    if native.tool not in ("nsys", "torch"):
        return None
    home = run / "nsight"
    directory = raw_directory(run, settings.directory)
    roles = {}
    for key, names in ROLES.items():
        for role in names:
            ranks = _ranks(key, role, config, capture, getattr(settings.roles, key))
            if ranks == ():
                continue
            options = {}
            if native.tool == "nsys":
                options = _options(config, capture, settings, key, role)
                options.setdefault("o", f"{directory}/{role}_%h_%p")
                _check(options, key)
            roles[role] = RoleCapture(ranks, options)
    if native.tool == "torch":
        native.save_path = str(directory)
    return Plan(
        native.tool,
        capture.steps,
        capture.discrete,
        str(directory),
        str(home / "journal"),
        settings.on_missing,
        roles,
        settings.collect_timeout_s,
        umask(),
    )


def remarks(config: Any, capture: Capture, plan: Plan) -> list[str]:
    """Return what was asked for and will not come, or not in the way that one may think.

    Args:
        config: verl's config, translated.
        capture: What `verl_keys.translate` returned.
        plan: What `make_plan` made of it.
    """
    found = []
    others = [role for role in plan.roles if role not in ROLES["workers"]]
    if others == list(plan.roles) and not set(others) - {"trainer"}:
        found.append(
            "no rank is named, so only the controller is captured. Add for example "
            "actor_rollout_ref.actor.profile_ranks=[0]. (no-ranks)"
        )
    last = select(config, "trainer.total_training_steps")
    never = [step for step in plan.steps if isinstance(last, int) and step > last]
    if never:
        found.append(
            f"steps {never} of trainer.profile_steps never come: training ends with step {last}. "
            "(step-never-comes)"
        )
    if "reward_model" in capture.ranks and select(config, "reward_model.profiler") is None:
        found.append(
            "reward_model.profile_ranks names nobody: this verl has no worker group for reward "
            "models. Its reward workers are captured with profiler.nsight.roles.reward=true. "
            "(no-worker-group)"
        )
    if "rollout" in capture.ranks and "engine" not in plan.roles:
        found.append(
            "actor_rollout_ref.rollout.profile_ranks captures the workers of those ranks, which "
            "hold the weights; the engine servers that generate are processes of their own. Add "
            "profiler.nsight.roles.engine=true for them. (engine-apart)"
        )
    if plan.discrete and others:
        found.append(
            f"profile_discrete cuts the captures of the workers by task. {', '.join(others)} have "
            "one capture per step: what they do overlaps, and a process has one capture at a time. "
            "(one-per-step)"
        )
    return found


def raw_directory(run: Path, directory: str | None, cwd: str = "") -> Path:
    """Return where the tools of a run write; each run has a folder of its own there.

    Args:
        run: The run directory.
        directory: `profiler.nsight.directory`.
        cwd: Where the run was launched; "" for here.
    """
    if directory is None:
        return run / "nsight" / "raw"
    return Path(os.path.abspath(os.path.join(cwd, os.path.expanduser(directory)))) / run.name


def _ranks(
    key: str, role: str, config: Any, capture: Capture, chosen: bool | tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return a role's ranks: None for all of them, () for none."""
    if chosen is False or chosen == ():
        return ()
    if isinstance(chosen, tuple):
        if key in ("trainer", "transfer_queue"):
            raise ConfigError(
                f"profiler.nsight.roles.{key} is {list(chosen)}; its processes have no ranks.\n"
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
    """Return how many processes a role will have, or None if the config does not say."""
    world = world_size(config)
    return {
        "workers": world,
        "engine": None if world is None else max(1, world // _replica_size(config)),
        "agent_loop": select(config, "actor_rollout_ref.rollout.agent.num_workers"),
    }.get(key)


def _worker_ranks(role: str, capture: Capture) -> tuple[int, ...] | None:
    """Return the ranks of a worker group; colocated groups share the actor's processes."""
    of = {"actor": ("actor", "rollout", "ref", "critic"), "critic": ("critic",), "ref": ("ref",)}
    asked = [capture.ranks[name] for name in of[role] if name in capture.ranks]
    if any(ranks is None for ranks in asked):
        return None
    return tuple(sorted({rank for ranks in asked for rank in ranks or ()}))


def _replica_size(config: Any) -> int:
    rollout = select(config, "actor_rollout_ref.rollout")
    sizes = ("tensor", "data", "pipeline")
    found = [(rollout or {}).get(f"{size}_model_parallel_size") or 1 for size in sizes]
    return max(1, found[0] * found[1] * found[2])


def _options(
    config: Any, capture: Capture, settings: NsightSettings, key: str, role: str
) -> dict[str, str]:
    native = select(config, "global_profiler.global_tool_config.nsys")
    name = "worker_nsight_options" if key == "workers" else "controller_nsight_options"
    options = as_text((native.get(name) if native is not None else None) or {})
    if not _on_cuda(config):
        options = {k: v for k, v in options.items() if not k.startswith("cuda-")} | _WITHOUT_CUDA
    if key != "workers" or not _on_cuda(config):
        options |= _BY_RANGE
    options |= as_text(settings.options.all) | as_text(getattr(settings.options, key))
    if "capture-range" in options:
        count = captures_per_process(config, capture, role)
        options.setdefault("capture-range-end", f"repeat-shutdown:{count}")
    return options


def captures_per_process(config: Any, capture: Capture, role: str) -> int:
    """Return how often a process of this role will start a capture.

    nsys writes its reports when this many captures have ended (`repeat-shutdown:N`): one too few
    loses the last of them, one too many delays all of them until the process ends.
    """
    last = select(config, "trainer.total_training_steps")
    steps = [step for step in capture.steps if not isinstance(last, int) or step <= last]
    if select(config, "global_profiler.profile_continuous_steps"):
        steps = [step for step in steps if step - 1 not in steps]
    tasks = 1
    if capture.discrete and role in ROLES["workers"]:
        tasks = max(1, sum(_tasks(config, capture, role)))
    return max(1, len(steps) * tasks)


def _tasks(config: Any, capture: Capture, role: str) -> list[int]:
    """Return how often each task that verl brackets runs in one step (verl 0.9 engine_workers)."""
    actor = select(config, "actor_rollout_ref.actor") or {}
    with_ref = bool(
        actor.get("use_kl_loss") or select(config, "algorithm.use_kl_in_reward") or role == "ref"
    )
    bypass = bool(select(config, "algorithm.rollout_correction.bypass_mode"))
    critic = select(config, "critic") or {}
    with_critic = "critic" in capture.ranks and (
        bool(critic.get("enable")) or select(config, "algorithm.adv_estimator") == "gae"
    )
    batch = select(config, "data.train_batch_size") or 1
    mini_batch = critic.get("ppo_mini_batch_size") or batch
    updates = (critic.get("ppo_epochs") or 1) * max(1, batch // mini_batch)
    return {
        "actor": [0 if bypass else 1, int(with_ref), 1, updates if with_critic else 0],
        "ref": [1],
        "critic": [updates],
    }[role]


def _on_cuda(config: Any) -> bool:
    if os.environ.get("VERL_PLATFORM", "cuda") != "cuda":
        return False
    return (select(config, "trainer.device") or "cuda") == "cuda"


def _check(options: Mapping[str, str], key: str) -> None:
    """Refuse what Ray would break: it joins the words unquoted, for a shell."""
    for name, value in options.items():
        if name == "output":
            raise ConfigError(
                f"profiler.nsight.options.{key}.output: Ray gives nsys a second -o, which nsys "
                "refuses.\nUse the key o instead, or profiler.nsight.directory for the folder.",
                "nsys-option",
            )
        if not re.fullmatch(r"[\w./:,=@%+{}-]*", value):
            where = (
                f"The folder of the reports, {value!r},"
                if name == "o"
                else f"profiler.nsight.options.{key}.{name} is {value!r}, which"
            )
            raise ConfigError(
                f"{where} has characters that do not survive the shell in which Ray starts nsys.\n"
                "Use letters, digits and ._/-:,=@% only; profiler.nsight.directory=DIR sets "
                "another folder.",
                "nsys-option",
            )
