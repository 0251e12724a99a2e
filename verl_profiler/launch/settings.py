"""Settings of one run, checked in the driver; for other processes see `recording.worker_config`.

Users see the YAML of `configs/profiler/`, whose comments describe each key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from verl_profiler.capture.plan import NsightSettings
from verl_profiler.errors import ConfigError
from verl_profiler.events.json_values import is_mapping
from verl_profiler.events.remote import RemoteError, is_url, name_of
from verl_profiler.recording.worker_config import EventSettings, StuckSettings
from verl_profiler.transfer_queue.switches import TracingSettings


class MemorySaverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.memory_saver`, which `launch.memory_saver` turns into the host's settings.

    None leaves the host's setting as it is.

    Args:
        enable_memory_saver: Start the engine so that its memory can be released.
        free_cache_engine: Release it between rollouts.
        gpu_memory_utilization: Share of the device for the engine, 0.01 to 1.
        param_offload: Keep the training models in host memory while they are not in use.
        optimizer_offload: Keep the optimizers there.
    """

    enable_memory_saver: bool | None = None
    free_cache_engine: bool | None = None
    gpu_memory_utilization: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    param_offload: bool | None = None
    optimizer_offload: bool | None = None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top-level `profiler:` node.

    Args:
        output_dir: Where the run directory is created; a URL such as `s3://bucket/my-run` has a copy of
            it, which is uploaded during the run.
        spool_dir: With a URL, where the run directory is created on each node; None for logs/NAME.
    """

    output_dir: str
    spool_dir: str | None = None
    events: EventSettings = EventSettings()
    nsight: NsightSettings = NsightSettings()
    memory_saver: MemorySaverSettings = MemorySaverSettings()
    stuck: StuckSettings = StuckSettings()
    transfer_queue: TracingSettings = TracingSettings()

    @property
    def local_dir(self) -> str:
        """Where the run directory is created.

        Raises:
            ConfigError: `output_dir` is a URL without a folder for the run.
        """
        if not is_url(self.output_dir):
            return self.output_dir
        try:
            return self.spool_dir or f"logs/{name_of(self.output_dir)}"
        except RemoteError as error:
            raise ConfigError(f"profiler.output_dir: {error}.", "output-url") from None


def parse(node: Any, where: str = "profiler") -> Settings:
    """Check the resolved `profiler:` node.

    Args:
        node: The node as plain Python containers.
        where: Its place in the config, for messages.

    Raises:
        ConfigError: For an unknown key, a wrong type or a value out of range.
    """
    if not is_mapping(node):
        raise ConfigError(
            f"{where} is {node!r}, not a group of settings: Hydra did not find verl-profiler's "
            "configs.\nInstall verl-profiler into the environment that runs main_ppo, or add "
            f"hydra.searchpath=[pkg://verl_profiler.configs] next to +{where}=multiturn.",
            "config-group-not-found",
        )
    _reject_unknown(node, Settings, where)
    try:
        settings = msgspec.convert(dict(node), Settings)
    except msgspec.ValidationError as error:
        # Not there where the package alone was copied, whose commands read settings too.
        from verl_profiler import configs

        problem, _, place = str(error).partition(" - at `$")
        path = where + place.rstrip("`")
        raise ConfigError(
            f"{path}: {problem}.\nValid values are in the comments of {configs.__path__[0]}/profiler/"
            "multiturn.yaml",
            "config-value",
        ) from None
    _reject_credentials(settings, where)
    return settings


# Settings are printed by verl, written by Hydra and Ray, and sent to trackers.
_PASSWORD_OR_QUERY = re.compile(r"[^/?#]*:[^/?#]*@|.*\?", re.DOTALL)


def _reject_credentials(settings: Settings, where: str) -> None:
    """Refuse values that may hold a credential; the messages do not repeat them."""
    _, is_remote, rest = settings.output_dir.partition("://")
    if is_remote and _PASSWORD_OR_QUERY.match(rest) is not None:
        raise ConfigError(
            f"{where}.output_dir has a password or parameters in its URL, and settings are printed and "
            "logged.\nLeave them out: storage clients read credentials from the environment or from files "
            "of their own.",
            "clear-credential",
        )


def _reject_unknown(node: Mapping[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in node.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = (
                f"Did you mean {where}.{near[0]}?"
                if near
                else f"{where} has: {', '.join(sorted(fields))}."
            )
            raise ConfigError(
                f"{where}.{key} is not a setting of verl-profiler.\n{hint}", "unknown-key"
            )
        kind = fields[key]
        if is_mapping(value) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            _reject_unknown(value, kind, f"{where}.{key}")
