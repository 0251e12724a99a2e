"""The driver's part: check the settings, create the run directory, pass both to every process.

`hydra_callback` calls `prepare(config)` for `+profiler=multiturn`; programs that start verl from
Python call it themselves.  Any invalid setting ends the command here, before training.
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf, open_dict

from verl_profiler import transfer_queue
from verl_profiler.capture import verl_keys
from verl_profiler.capture.actor_placement import hook_creation
from verl_profiler.capture.plan import Plan, decoded_plan
from verl_profiler.capture.planner import make_plan, remarks
from verl_profiler.environ import SETTINGS
from verl_profiler.errors import ConfigError
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.redaction import public
from verl_profiler.events.remote import is_url
from verl_profiler.instrumentation import ray_init
from verl_profiler.launch import conclusion, memory_saver, remote_output
from verl_profiler.launch.settings import Settings, parse
from verl_profiler.launch.training_facts import selected, training_facts
from verl_profiler.nodes import thread as nodes
from verl_profiler.recording import recorder, run_directory
from verl_profiler.recording.clock import Anchor, take_anchor
from verl_profiler.recording.complaints import announce
from verl_profiler.recording.worker_config import UNNAMED_RUN, WorkerConfig

__all__ = ["end", "of_sft", "prepare", "settings_of"]

NODE = "profiler"
_UPLOAD_EVERY_S = 60.0
# The end waits for reports as long as some are written or arrive within this time.
_COLLECT_S = 60.0

_ray_started = False


def prepare(config: Any) -> Any:
    """Make `config` ready for `run_ppo`, and this process and its cluster ready to record.

    Args:
        config: verl's config as an OmegaConf `DictConfig`, with a `profiler` node.  Changed in
            place: keys that verl's dataclasses would reject are translated and removed.

    Returns:
        The same object.

    Raises:
        ConfigError: For settings that cannot be used.
    """
    settings = settings_of(config)
    with open_dict(config):
        capture = verl_keys.translate(config, settings.nsight.tool, settings.nsight.roles.workers)
        for warning in memory_saver.apply(config, settings.memory_saver):
            announce(f"WARNING {warning}")
        switches = settings.transfer_queue.under(os.environ)
        if switches.any:
            v1 = OmegaConf.select(config, "trainer.use_v1")
            _put_into_runtime_env(config, transfer_queue.carry(switches, v1=v1))
            transfer_queue.wrap_main()
    if not settings.events.enabled and capture is None:
        _forget_earlier_run()
        return config
    clock = take_anchor()
    directory = run_directory.make(settings.local_dir, clock, settings, training_facts(config))
    try:
        with open_dict(config):
            plan = capture and make_plan(config, capture, settings.nsight, directory)
            encoded = _worker_config(settings, directory, clock, plan).encode()
            _put_into_runtime_env(config, {SETTINGS: encoded})
            if settings.events.engine_timing:
                _enable_engine_timing(config)
        uploader = None
        if is_url(settings.output_dir):
            # Last: what fails before leaves nothing there.
            every_s = settings.events.ship_every_s or _UPLOAD_EVERY_S
            uploader = remote_output.Uploader(settings.output_dir, directory, every_s)
    except Exception:
        run_directory.discard(directory)
        raise
    _forget_earlier_run()
    if uploader is not None:
        remote_output.start(uploader)
    _record_driver(encoded, directory, uploader and uploader.url)
    if capture is not None and plan is not None:
        _prepare_captures(config, capture, plan)
    return config


def settings_of(config: Any) -> Settings:
    """Check the `profiler` node; switches of TransferQueue in the environment override it.

    Raises:
        ConfigError: There is no such node, or a setting cannot be used.
    """
    node = config.get(NODE)
    if node is None:
        raise ConfigError(
            f"the config has no {NODE!r} node.\nAdd +profiler=multiturn to the command, or to the "
            "overrides that compose the config.",
            "config-group-not-found",
        )
    if "optim" in config and "actor_rollout_ref" not in config:
        raise of_sft()
    node = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    given = mapping_or_empty(node)
    if given.get("output_dir", "") is None:
        name = os.environ.get("EXPERIMENT_NAME") or selected(config, "trainer.experiment_name")
        node = {**given, "output_dir": f"logs/{name}" if name else UNNAMED_RUN}
    settings = parse(node)
    switches = settings.transfer_queue.under(os.environ)
    return msgspec.structs.replace(settings, transfer_queue=switches)


def of_sft() -> ConfigError:
    """Return the error for an SFT trainer, whose config has a `profiler` group of its own."""
    return ConfigError(
        "this is the config of an SFT trainer, which is not recorded.\nRemove profiler=…; "
        "profiler.enable=true captures with verl's own profiler.",
        "sft-trainer",
    )


def _worker_config(
    settings: Settings, directory: Path, clock: Anchor, plan: Plan | None
) -> WorkerConfig:
    """Return what the other processes of the run get."""
    return WorkerConfig(
        str(directory),
        settings.local_dir,
        settings.events,
        clock,
        capture_plan=plan and plan.encode(),
        captured_steps=plan.steps if plan else (),
        stuck=settings.stuck,
    )


def _record_driver(encoded: str, directory: Path, url: str | None) -> None:
    """Start recording in this process, and hook `ray.init` for the others."""
    from verl_profiler.plugin import activate

    os.environ[SETTINGS] = encoded
    _hook_ray_init()
    activate("driver")
    uploaded = f", uploaded to {public(url)}" if url is not None else ""
    announce(
        f"recording to {directory}{uploaded}; follow: verl-profiler summary --follow {shlex.quote(str(directory))}"
    )


def _forget_earlier_run() -> None:
    """Undo what an earlier run set in this process, or a recorded driver in its environment."""
    global _ray_started
    _ray_started = False
    nodes.finish()
    remote_output.finish()
    hook_creation(None)
    os.environ.pop(SETTINGS, None)
    recorder.stop("another run")


def _prepare_captures(config: Any, capture: verl_keys.Capture, plan: Plan) -> None:
    from verl_profiler.capture.node_check import check_nodes

    roles = ", ".join(
        role if chosen.ranks is None else f"{role} {list(chosen.ranks)}"
        for role, chosen in plan.roles.items()
    )
    announce(f"capturing steps {list(plan.steps)} with {plan.tool}: {roles or 'no process'}")
    for remark in remarks(config, capture, plan):
        announce(f"WARNING {remark}")
    hook_creation(plan, lambda: check_nodes(plan))


def end(*, failed: bool) -> None:
    """End the driver's part: print where the events are, or remove a directory without any.

    Args:
        failed: Whether the command ended with an error.
    """
    active = recorder.active()
    if active is None:
        return
    try:
        # While Ray still runs.
        nodes.finish()
        recorder.stop("exit")
        plan = decoded_plan(active.config.capture_plan)
        _end(active.directory, plan, failed=failed)
    except Exception as error:  # noqa: BLE001  the command keeps its own result
        announce(f"WARNING finishing the recording failed: {error!r}")


def _end(directory: Path, plan: Plan | None, *, failed: bool) -> None:
    if failed and not _ray_started:
        run_directory.discard(directory)
        remote_output.finish()
        announce("the run failed before it started; nothing was recorded")
        return
    named = shlex.quote(str(directory))
    announce(
        f"events are in {directory}; next: verl-profiler summary {named}, "
        f"verl-profiler report {named}"
    )
    if plan is not None and _ray_started:
        _collect(directory, plan)
    remote_output.finish()
    if not failed and _ray_started:
        conclusion.conclude(directory)


def _collect(directory: Path, plan: Plan) -> None:
    """Gather what the tool wrote; a failure is printed, never raised."""
    from verl_profiler.capture import gather

    try:
        raw = Path(plan.directory)
        fetch = gather.Fetch(directory, raw)
        found = gather.collect(directory, patience_s=_COLLECT_S, fetch=fetch, raw=raw)
        for line in [*gather.account(found), *fetch.account()]:
            announce(line)
    except Exception as error:  # noqa: BLE001  training has succeeded; the files are still there
        announce(
            f"WARNING the captures could not be gathered: {error!r}. "
            f"Run: verl-profiler collect {directory} (not-collected)"
        )


def _put_into_runtime_env(config: Any, variables: Mapping[str, str]) -> None:
    """Add our variables to `ray_kwargs.ray_init.runtime_env.env_vars`.

    Ray passes a driver's own environment to workers only on a cluster that the driver starts.
    """
    ray_init: Any = OmegaConf.select(config, "ray_kwargs.ray_init")
    ray_init = {} if ray_init is None else OmegaConf.to_container(ray_init)
    runtime_env = dict(ray_init.get("runtime_env") or {})
    runtime_env["env_vars"] = {**(runtime_env.get("env_vars") or {}), **variables}
    # Set as a whole: writes to a node that `setdefault` returned are lost (omegaconf 2.3).
    OmegaConf.update(config, "ray_kwargs.ray_init", {**ray_init, "runtime_env": runtime_env})
    # verl before 0.9 writes TRANSFER_QUEUE_ENABLE into it (0.8.0 main_ppo.py:74).
    OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)


def _enable_engine_timing(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    name = rollout.get("name")
    if name == "vllm":
        rollout.disable_log_stats = False
        return
    if name != "sglang":
        announce(f"WARNING profiler.events.engine_timing works with SGLang and vLLM, not {name!r}")
        return
    engine: Any = OmegaConf.to_container(rollout.get("engine_kwargs") or OmegaConf.create({}))
    sglang = {**mapping_or_empty(engine.get("sglang")), "enable_metrics": True}
    rollout.engine_kwargs = {**engine, "sglang": sglang}


def _hook_ray_init() -> None:
    """Make `ray.init` also set a worker process setup hook, for processes without verl."""
    global _ray_started
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        _ray_started = True
        announce(
            "WARNING Ray was initialized before the profiler; processes that do not inherit "
            f"{SETTINGS} record nothing. Call verl_profiler.prepare before ray.init. "
            "(ray-initialized)"
        )
        return
    ray_init.extend(started=_begin_with_ray)


def _begin_with_ray(ray: Any, through_client: bool) -> None:
    """Compare the clocks of the other nodes, and bring their event files, during the run."""
    global _ray_started
    _ray_started = True
    active = recorder.active()
    if active is None or through_client:
        return
    try:
        nodes.start(ray, Path(active.config.directory), active.config.events.ship_every_s)
    except Exception as error:  # noqa: BLE001  the run starts in any case
        announce(
            "WARNING the clocks of other nodes are not compared, and event files stay there: "
            f"{error!r} (not-shipped)"
        )
