"""Print what a main_ppo command line would capture, without running it: `verl-profiler check --config`.

Hydra composes the config as main_ppo would, but runs no callbacks.  So the keys are translated here,
on a copy, and the changes are printed.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_profiler.capture import tools
from verl_profiler.errors import ConfigError

__all__ = ["explain"]

_MODULE = "verl.trainer.main_ppo"


def explain(argv: Sequence[str]) -> list[str]:
    """Return what a command line would capture, as lines.

    Args:
        argv: The command, or only its overrides.

    Raises:
        ConfigError: If it cannot be composed or a setting cannot be used.
    """
    name, folder, overrides = _parse(argv)
    config = _compose(name, folder, overrides)
    from omegaconf import open_dict

    from verl_profiler.capture import verl_keys
    from verl_profiler.capture.planner import make_plan, remarks
    from verl_profiler.launch.prepare import settings_of

    settings = settings_of(config)
    before = dict(_leaves(config))
    with open_dict(config):
        capture = verl_keys.translate(config, settings.nsight.tool, settings.nsight.roles.workers)
        plan = None
        if capture is not None:
            plan = make_plan(config, capture, settings.nsight, Path(settings.local_dir).absolute())
    after = dict(_leaves(config))
    lines = [
        f"{key}={_text(value)} removed (translated)"
        for key, value in before.items()
        if value is not None and key not in after
    ]
    if capture is None:
        own = "global_profiler.* and *.profiler.* are verl's own keys"
        return [*lines, f"this profiler captures nothing: trainer.profile_steps has no step; {own}"]
    lines += [
        f"{key}: {_text(before.get(key))} becomes {_text(value)}"
        for key, value in after.items()
        if before.get(key) != value
    ]
    if plan is None:
        return [*lines, f"verl itself captures with {config.global_profiler.tool}"]
    lines.append(f"steps {list(plan.steps)} are captured with {plan.tool} in")
    tool = tools.find(plan.tool)
    for role, of in plan.roles.items():
        ranks = "all" if of.ranks is None else ", ".join(map(str, of.ranks))
        lines.append(f"  {role}, ranks: {ranks}")
        command = tool.command(of.options) if tool is not None else []
        if command:
            lines.append(f"    {shlex.join(command)}")
    return lines + remarks(config, capture, plan)


def _parse(argv: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Return config name, config folder and overrides of a command line."""
    rest = list(argv)
    if _MODULE in rest:
        rest = rest[rest.index(_MODULE) + 1 :]
    found = {"--config-name": "ppo_trainer", "--config-path": None}
    overrides: list[str] = []
    while rest:
        word = rest.pop(0)
        option, given, value = word.partition("=")
        if option in found:
            found[option] = value if given else (rest.pop(0) if rest else "")
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ConfigError(
                f"{word!r} is not a Hydra override.\nGive the arguments after `{_MODULE}`, for example "
                "--config trainer.profile_steps=[1,2] actor_rollout_ref.actor.profile_ranks=[0].",
                "config-value",
            )
    if not any(override.startswith("+profiler=") for override in overrides):
        overrides.insert(0, "+profiler=multiturn")
    return str(found["--config-name"]), found["--config-path"], overrides


def _compose(name: str, folder: str | None, overrides: list[str]) -> Any:
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise ConfigError(
            "Hydra is not installed here.\nRun this command with the Python that runs main_ppo.",
            "config-value",
        ) from None
    spec = importlib.util.find_spec("verl")
    if folder is None and (spec is None or not spec.submodule_search_locations):
        raise ConfigError(
            "verl is not installed here, so there is no config to compose.\n"
            "Run this command with the Python that runs main_ppo.",
            "config-value",
        )
    if folder is None and spec is not None:
        folder = str(Path(next(iter(spec.submodule_search_locations or []))) / "trainer" / "config")
    try:
        with initialize_config_dir(str(Path(str(folder)).absolute()), version_base=None):
            return compose(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"Hydra cannot compose this command:\n{error}", "config-value") from None


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a config that can be resolved, by dotted path."""
    for key in node:
        path = f"{prefix}{key}"
        try:
            value = node[key]
        except Exception:  # noqa: BLE001, S112  an interpolation that only a run can resolve
            continue
        if hasattr(value, "keys"):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, list(value) if hasattr(value, "_iter_ex") else value


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
