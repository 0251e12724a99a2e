"""Translate the profiling keys of the Nsight guide into verl's own `global_profiler` settings.

`trainer.profile_steps` and each component's `profile_ranks`, `profile_ranks_all` and
`profile_discrete` are checked and removed: verl's dataclasses reject keys that they do not define.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, TypeGuard

from omegaconf import OmegaConf

from verl_profiler.capture import tools
from verl_profiler.errors import ConfigError
from verl_profiler.events.json_values import is_list, is_tuple

# Component → where the text and the examples of the guide put it.
_COMPONENTS = {
    "actor": ("actor_rollout_ref.actor",),
    "rollout": ("actor_rollout_ref.rollout",),
    "ref": ("actor_rollout_ref.ref",),
    "critic": ("critic", "actor_rollout_ref.critic"),
    "reward_model": ("reward_model", "actor_rollout_ref.rm"),
}
_TRUE_OR_FALSE = "it must be true or false"
# Key → what it must be.
_KEYS = {
    "profile_ranks": "it must be a list of ranks such as [0,1].\n"
    "null and [] mean no ranks; profile_ranks_all=true means all of them",
    "profile_ranks_all": _TRUE_OR_FALSE,
    "profile_discrete": _TRUE_OR_FALSE,
}


@dataclass(frozen=True)
class Capture:
    """Which steps and ranks to capture.

    Args:
        steps: Steps of verl's own count, from 1.
        ranks: Component → its ranks, or None for all of them; absent components are not captured.
        discrete: One capture per task instead of one per step.
    """

    steps: tuple[int, ...]
    ranks: dict[str, tuple[int, ...] | None]
    discrete: bool


def translate(
    config: Any, tool: str | None = None, workers: bool | tuple[int, ...] = True
) -> Capture | None:
    """Replace the guide's keys in `config` by verl's own.

    Args:
        config: verl's config, changed in place.
        tool: `profiler.nsight.tool`; None for verl's, or nsys if that is null too.
        workers: `profiler.nsight.roles.workers`: False excludes the worker groups, whatever ranks
            are set; ranks are those of the actor.

    Returns:
        What will be captured, or None if `trainer.profile_steps` has no step.

    Raises:
        ConfigError: For a value that cannot be used.
    """
    capture = read_keys(config)
    if capture is None:
        return None
    native = config.get("global_profiler")
    if native is None:
        raise ConfigError(
            "trainer.profile_steps is set, but this verl has no global_profiler settings "
            "(verl >= 0.6 has).\nSet trainer.profile_steps=null to record events without captures.",
            "no-global-profiler",
        )
    native.steps = list(capture.steps)
    configured = native.get("tool")
    if tool is not None and configured not in (None, tool):
        raise ConfigError(
            f"profiler.nsight.tool is {tool!r}, but global_profiler.tool is {configured!r}.\n"
            "Set only one of them.",
            "capture-keys",
        )
    native.tool = tool or configured or tools.DEFAULT
    places = {name: f"{where[0]}.profiler" for name, where in _COMPONENTS.items()}
    nodes: dict[str, Any] = {name: OmegaConf.select(config, at) for name, at in places.items()}
    backends = [
        f"global_profiler.global_tool_config.{native.tool}",
        *(f"{at}.tool_config.{native.tool}" for at in places.values()),
    ]
    for path in backends:
        backend: Any = OmegaConf.select(config, path)
        if backend is not None and "discrete" in backend:
            backend.discrete = capture.discrete
    if workers is not True:
        chosen: dict[str, tuple[int, ...] | None] = {}
        if workers:
            chosen["actor"] = tuple(sorted(set(workers)))
        capture = Capture(capture.steps, chosen, capture.discrete)
    hybrid: dict[str, Any] = {}
    for component, ranks in capture.ranks.items():
        profiler = nodes[component]
        if profiler is None:
            continue
        profiler.enable = True
        profiler.all_ranks = ranks is None
        profiler.ranks = [] if ranks is None else list(ranks)
        if component in ("actor", "rollout", "ref"):
            hybrid[component] = ranks
    actor = nodes["actor"]
    if hybrid and actor is not None:
        # The hybrid worker reads the actor's node only (verl 0.9.1 engine_workers.py:479).
        everything = any(ranks is None for ranks in hybrid.values())
        union = sorted({rank for ranks in hybrid.values() for rank in ranks or ()})
        actor.enable = True
        actor.all_ranks = everything
        actor.ranks = [] if everything else union
    return capture


def read_keys(config: Any) -> Capture | None:
    """Remove the guide's keys from `config` and check them; see `translate`."""
    given: dict[str, dict[str, Any]] = {}
    for component, places in _COMPONENTS.items():
        for place in places:
            node = OmegaConf.select(config, place)
            if node is None or not hasattr(node, "pop"):
                continue
            for key, expected in _KEYS.items():
                value = _plain(node.pop(key, None))
                if value is None:
                    continue
                if not (isinstance(value, bool) if key != "profile_ranks" else _is_ranks(value)):
                    raise ConfigError(f"{place}.{key} is {value!r}; {expected}.", "capture-keys")
                known = given.setdefault(component, {})
                if key in known and known[key][1] != value:
                    raise ConfigError(
                        f"{place}.{key} is {value!r}, but {known[key][0]}.{key} is {known[key][1]!r}: "
                        "both set the same component.\nKeep one of them.",
                        "capture-keys",
                    )
                known[key] = (place, value)
            if place.endswith((".critic", ".rm")) and not len(node):
                del config.actor_rollout_ref[place.rpartition(".")[2]]
    refuse_unknown(config)
    trainer = config.get("trainer")
    steps = _plain(trainer.pop("profile_steps", None)) if trainer is not None else None
    ranks = _ranks(config, given)
    discrete = _discrete(given)
    if steps is None or steps == []:
        return None
    if not _is_ranks(steps) or not all(step >= 1 for step in steps):
        raise ConfigError(
            f"trainer.profile_steps is {steps!r}; it must be a list of steps, counted from 1.\n"
            "For example trainer.profile_steps=[1,2,5], or null to capture nothing.",
            "capture-keys",
        )
    return Capture(tuple(sorted(set(steps))), ranks, discrete)


def refuse_unknown(config: Any) -> None:
    """Reject the guide's keys elsewhere, or mistyped: verl would ignore them, or fail much later."""
    own = {place: tuple(_KEYS) for known in _COMPONENTS.values() for place in known}
    for place, keys in {"trainer": ("profile_steps",), **own}.items():
        node: Any = OmegaConf.select(config, place)
        for key in node if hasattr(node, "keys") else ():
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.8)
            if near and key not in keys:
                raise ConfigError(
                    f"{place}.{key} is a key neither of verl nor of verl-profiler.\n"
                    f"Did you mean {place}.{near[0]}?",
                    "capture-keys",
                )
    inside = config.get("actor_rollout_ref")
    for parent, prefix in ((config, ""), (inside, "actor_rollout_ref.")):
        for name in parent if hasattr(parent, "keys") else ():
            try:
                node = parent.get(name)
            except Exception:  # noqa: BLE001, S112  an interpolation that only a run can resolve
                continue
            found = [key for key in _KEYS if hasattr(node, "pop") and key in node]
            if found:
                near = difflib.get_close_matches(f"{prefix}{name}", own, n=1, cutoff=0)
                raise ConfigError(
                    f"{prefix}{name}.{found[0]} is not a key of a component that can be captured.\n"
                    f"Did you mean {near[0]}.{found[0]}? The components are: {', '.join(own)}.",
                    "capture-keys",
                )


def _ranks(config: Any, given: dict[str, dict[str, Any]]) -> dict[str, tuple[int, ...] | None]:
    world = world_size(config)
    found: dict[str, tuple[int, ...] | None] = {}
    for component, keys in given.items():
        _, everything = keys.get("profile_ranks_all", (component, False))
        if everything:
            found[component] = None
            continue
        place, ranks = keys.get("profile_ranks", (component, []))
        outside = [rank for rank in ranks if rank < 0 or (world is not None and rank >= world)]
        if outside:
            raise ConfigError(
                f"{place}.profile_ranks is {ranks!r}, but ranks go from 0 to "
                f"{'?' if world is None else world - 1} (trainer.nnodes × trainer.n_gpus_per_node).",
                "capture-keys",
            )
        if ranks:
            found[component] = tuple(sorted(set(ranks)))
    return found


def _discrete(given: dict[str, dict[str, Any]]) -> bool:
    values = {
        f"{place}.profile_discrete": value
        for keys in given.values()
        for place, value in [keys.get("profile_discrete", (None, None))]
        if value is not None
    }
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}={str(value).lower()}" for name, value in sorted(values.items()))
        raise ConfigError(
            f"profile_discrete must be the same for all components, but is: {listed}.\n"
            "Set all of them to one value, or remove those that do not matter.",
            "capture-keys",
        )
    return any(values.values())


def world_size(config: Any) -> int | None:
    """Return the number of training ranks, or None if the config has no number."""
    trainer = config.get("trainer")
    if trainer is None:
        return None
    nodes, gpus = trainer.get("nnodes"), trainer.get("n_gpus_per_node")
    return nodes * gpus if _is_int(nodes) and _is_int(gpus) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ranks(value: Any) -> TypeGuard[list[int]]:
    return is_list(value) and all(map(_is_int, value))


def _plain(value: Any) -> Any:
    """Return lists of OmegaConf as lists."""
    return [*value] if OmegaConf.is_list(value) or is_tuple(value) else value
