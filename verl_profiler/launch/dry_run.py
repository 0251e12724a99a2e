"""Print what a main_ppo command line would capture, without running it: `verl-profiler check --config`.

Hydra composes the config as main_ppo would, but runs no callbacks.  So the keys are translated here,
on a copy, and the changes are printed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_profiler.capture import tools
from verl_profiler.errors import ConfigError
from verl_profiler.launch.command_line import is_command, parse
from verl_profiler.launch.settings import parse as parse_settings
from verl_profiler.launch.targets import installed, source_file

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
    before = dict(leaves(config))
    with open_dict(config):
        capture = verl_keys.translate(config, settings.nsight.tool, settings.nsight.roles.workers)
        plan = None
        if capture is not None:
            plan = make_plan(config, capture, settings.nsight, Path(settings.local_dir).absolute())
    after = dict(leaves(config))
    lines = [
        f"{key}={_text(value)} removed (translated)"
        for key, value in before.items()
        if value is not None and key not in after
    ]
    if capture is None:
        return [*lines, *_of_verl(config)]
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


def _of_verl(config: Any) -> list[str]:
    """Return what verl's own profiling keys capture, where this profiler's have no step."""
    own = config.global_profiler
    nothing = "this profiler captures nothing: trainer.profile_steps has no step"
    if not own.tool or not own.steps:
        return [f"{nothing}; global_profiler.* and *.profiler.* are verl's own keys"]
    lines: list[str] = []
    nodes = {"critic": config.get("critic"), **config.actor_rollout_ref}
    for name, node in nodes.items():
        settings = node.get("profiler") if hasattr(node, "get") else None
        if settings and settings.get("enable"):
            ranks = "all" if settings.all_ranks else ", ".join(map(str, settings.ranks)) or "none"
            lines.append(f"  {name}, ranks: {ranks}")
    if not lines and own.tool == "nsys":
        # verl 0.9.1 trainer/main_ppo.py:80.
        lines.append("  trainer, which is the controller")
    if not lines:
        return [f"{nothing}, and none of verl's own *.profiler.enable is true"]
    lines.insert(
        0, f"{nothing}, so verl itself captures steps {list(own.steps)} with {own.tool} in"
    )
    tool = tools.find(own.tool)
    if tool is not None and tool.command({}):
        # verl 0.9.1 single_controller/ray/base.py: capture-range-end=repeat-shutdown:N.
        lines.append("A worker's report appears when its process ends.")
    return lines


def _parse(argv: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return config name, config folder and overrides of a command line, with or without its program."""
    command = parse(argv if is_command(argv) else ["-m", _MODULE, *argv])
    name, folder, base = _declared(command.entry)
    overrides = list(command.overrides)
    if "name" in command.config:
        name = command.config["name"].removesuffix(".yaml")
    if "path" in command.config:
        # Hydra takes a relative one from the file that declares the config.
        folder = base / command.config["path"]
    if "dir" in command.config:
        place = Path(command.config["dir"]).absolute()
        overrides.insert(0, f"hydra.searchpath=[file://{place}]")
    if not any(override.startswith("+profiler=") for override in overrides):
        overrides.insert(0, "+profiler=multiturn")
    return name, str(folder), overrides


def _declared(entry: str) -> tuple[str, Path, Path]:
    """Return the config's name and folder that a module or script declares, and its own folder.

    Read from its source: importing it would take what it imports, and seconds.
    """
    file: Path | None = Path(entry)
    if not entry.endswith(".py"):
        top = entry.partition(".")[0]
        # `python -m` looks in the working directory first.
        file = source_file(entry, [Path.cwd() / top, *installed(top)], "__main__.py")
    if file is None or not file.is_file():
        raise ConfigError(
            f"{entry} is not here, so there is no config to compose.\nRun this command with the Python "
            "and in the folder that run it.",
            "config-value",
        )
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hydra.main", "main"):
            given = {
                each.arg: each.value.value
                for each in node.keywords
                if isinstance(each.value, ast.Constant)
            }
            if given.get("config_name") is not None:
                return (
                    str(given["config_name"]).removesuffix(".yaml"),
                    file.parent / str(given.get("config_path") or ""),
                    file.parent,
                )
    raise ConfigError(
        f"{entry} declares no config by @hydra.main.\nGive the command of an entry point such as "
        f"{_MODULE}.",
        "config-value",
    )


def _compose(name: str, folder: str, overrides: list[str]) -> Any:
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise ConfigError(
            "Hydra is not installed here.\nRun this command with the Python that runs main_ppo.",
            "config-value",
        ) from None
    try:
        with initialize_config_dir(str(Path(folder).absolute()), version_base=None):
            return compose(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        if "Multiple values for profiler" in str(error):
            from verl_profiler.launch.prepare import of_sft

            raise of_sft() from None
        mistyped = re.search(r"Could not override '([\w.]+)'", str(error))
        if mistyped:
            from verl_profiler.capture.verl_keys import refuse_unknown

            # Hydra's advice is to append the key, which verl-profiler refuses with the right one.
            made = OmegaConf.from_dotlist([f"{mistyped[1]}=0"])
            refuse_unknown(made)
            if mistyped[1].startswith("profiler."):
                parse_settings(made["profiler"])
        text = str(error).expandtabs(4)
        raise ConfigError(f"Hydra cannot compose this command:\n{text}", "config-value") from None


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a config that can be resolved, by dotted path."""
    for key in node:
        path = f"{prefix}{key}"
        try:
            value = node[key]
        except Exception:  # noqa: BLE001, S112  an interpolation that only a run can resolve
            continue
        if hasattr(value, "keys"):
            yield from leaves(value, f"{path}.")
        else:
            yield path, list(value) if hasattr(value, "_iter_ex") else value


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
