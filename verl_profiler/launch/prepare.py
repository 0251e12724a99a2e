"""The driver's part: check the settings, make the run directory, and see that every process gets it.

`prepare(config)` does it all; `hydra_callback` calls it for `+profiler=multiturn`, and who starts
verl from Python calls it himself.  Everything wrong with the settings ends here, before training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler import transfer_queue
from verl_profiler.capture import verl_keys
from verl_profiler.capture.actor_placement import hook_creation
from verl_profiler.capture.plan import Plan, carried_plan
from verl_profiler.capture.planner import make_plan, remarks
from verl_profiler.environ import CAPTURES_OFF, SETTINGS
from verl_profiler.errors import ConfigError
from verl_profiler.instrumentation import worker_setup_hook
from verl_profiler.launch import clock_exchange
from verl_profiler.launch.memory_saver import translate
from verl_profiler.launch.settings import parse
from verl_profiler.recording import recorder, run_directory
from verl_profiler.recording.carried import Carried
from verl_profiler.recording.clock import take_anchor

__all__ = ["end", "prepare"]

NODE = "profiler"

_ray_started = False


def prepare(config: Any) -> Any:
    """Make `config` ready for `run_ppo`, and this process and its cluster ready to record.

    Args:
        config: verl's config as an OmegaConf `DictConfig`, with a `profiler` node.  Changed in
            place: keys that verl's dataclasses would refuse are translated and removed.

    Returns:
        The same object.

    Raises:
        ConfigError: For settings that cannot be used.
    """
    from omegaconf import OmegaConf, open_dict

    if config.get(NODE) is None:
        raise ConfigError(
            f"the config has no {NODE!r} node.\nAdd +profiler=multiturn to the command, or take it "
            "from configs/profiler/multiturn.yaml.",
            "config-group-not-found",
        )
    node = config[NODE]
    settings = parse(
        OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    )
    settings = msgspec.structs.replace(
        settings, transfer_queue=settings.transfer_queue.under(os.environ)
    )
    nsight = settings.nsight
    with open_dict(config):
        capture = verl_keys.translate(config, nsight.tool, nsight.roles.workers)
        for warning in translate.apply(config, settings.memory_saver):
            recorder.say(f"WARNING {warning}")
        if settings.transfer_queue.any:
            v1 = OmegaConf.select(config, "trainer.use_v1")
            _put_into_runtime_env(config, transfer_queue.carry(settings.transfer_queue, v1=v1))
            transfer_queue.wrap_main()
    if not settings.events.enabled and capture is None:
        _forget()
        return config
    clock = take_anchor()
    directory = run_directory.make(settings.output_dir, clock, settings, _training(config))
    try:
        with open_dict(config):
            plan = None if capture is None else make_plan(config, capture, nsight, directory)
            carried = Carried(
                str(directory),
                settings.output_dir,
                settings.events,
                clock,
                settings.memory_saver.sample_interval_s,
                capture_tool=plan and plan.tool,
                capture_plan=plan and plan.encode(),
                nvtx=nsight.nvtx,
                record_command=settings.record_command,
            )
            text = carried.encode()
            _put_into_runtime_env(config, {SETTINGS: text})
            if settings.events.engine_timing:
                _ask_engine_for_times(config)
    except Exception:
        run_directory.discard(directory)
        raise
    _forget()
    from verl_profiler.plugin import activate

    os.environ[SETTINGS] = text
    _hook_ray_init()
    activate("driver")
    recorder.say(f"recording to {directory}")
    if capture is not None and plan is not None:
        _prepare_captures(config, capture, plan)
    return config


def _forget() -> None:
    """End what an earlier run left: in this process, or by inheritance from a recorded driver."""
    global _ray_started
    _ray_started = False
    hook_creation(None)
    for variable in (SETTINGS, CAPTURES_OFF):
        os.environ.pop(variable, None)
    recorder.stop("another run")


def _prepare_captures(config: Any, capture: verl_keys.Capture, plan: Plan) -> None:
    from verl_profiler.capture.node_check import check_nodes

    roles = ", ".join(
        role if chosen.ranks is None else f"{role} {list(chosen.ranks)}"
        for role, chosen in plan.roles.items()
    )
    recorder.say(f"capturing steps {list(plan.steps)} with {plan.tool}: {roles or 'nobody'}")
    for remark in remarks(config, capture, plan):
        recorder.say(f"WARNING {remark}")
    hook_creation(plan, lambda: check_nodes(plan, config))


def end(*, failed: bool) -> None:
    """End the driver's part: say where the events are, or take back a directory that has none.

    Args:
        failed: Whether the command ended with an error.
    """
    active = recorder.active()
    if active is None:
        return
    try:
        recorder.stop("exit")
        plan = carried_plan(active.carried.capture_plan)
        _end(active.directory, plan, failed=failed)
    except Exception as error:  # noqa: BLE001  the command's own result stands
        recorder.say(f"WARNING the end of the recording failed: {error!r}")


def _end(directory: Path, plan: Plan | None, *, failed: bool) -> None:
    if failed and not _ray_started:
        run_directory.discard(directory)
        recorder.say("the run failed before it started; nothing was recorded")
        return
    recorder.say(f"events are in {directory}")
    if plan is not None and _ray_started and not os.environ.get(CAPTURES_OFF):
        _collect(directory, plan)


def _collect(directory: Path, plan: Plan) -> None:
    """Gather what the tools wrote; never lets a failure of ours end the command."""
    from verl_profiler.capture import gather

    try:
        raw = Path(plan.directory)
        fetch = gather.Fetch(directory, raw)
        found = gather.collect(directory, patience_s=plan.collect_timeout_s, fetch=fetch, raw=raw)
        for line in [*gather.account(found), *fetch.account()]:
            recorder.say(line)
    except Exception as error:  # noqa: BLE001  training has ended well; the files are still there
        recorder.say(
            f"WARNING the captures could not be gathered: {error!r}. "
            f"Run: verl-profiler collect {directory} (not-collected)"
        )


def _training(config: Any) -> dict[str, Any]:
    """Return what a reader of run.json wants to know about the training."""
    from omegaconf import OmegaConf

    def pick(path: str) -> Any:
        try:
            value = OmegaConf.select(config, path)
        except Exception:  # noqa: BLE001  an interpolation of the user's may not resolve here
            return None
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    return {
        "model": pick("actor_rollout_ref.model.path"),
        "rollout": pick("actor_rollout_ref.rollout.name"),
        "rollout_n": pick("actor_rollout_ref.rollout.n"),
        "tensor_model_parallel_size": pick("actor_rollout_ref.rollout.tensor_model_parallel_size"),
        "agent_workers": pick("actor_rollout_ref.rollout.agent.num_workers"),
        "agent_loop": pick("actor_rollout_ref.rollout.agent.default_agent_loop"),
        "strategy": pick("actor_rollout_ref.actor.strategy"),
        "train_batch_size": pick("data.train_batch_size"),
        "max_prompt_length": pick("data.max_prompt_length"),
        "max_response_length": pick("data.max_response_length"),
        "nnodes": pick("trainer.nnodes"),
        "n_gpus_per_node": pick("trainer.n_gpus_per_node"),
        "use_v1": pick("trainer.use_v1"),
        "project_name": pick("trainer.project_name"),
        "experiment_name": pick("trainer.experiment_name"),
        "memory": translate.facts(config),
    }


def _put_into_runtime_env(config: Any, variables: Mapping[str, str]) -> None:
    """Add our variables to `ray_kwargs.ray_init.runtime_env.env_vars`.

    Ray passes a driver's own environment to workers only on a cluster that the driver starts.
    """
    from omegaconf import OmegaConf

    ray_init: Any = OmegaConf.select(config, "ray_kwargs.ray_init")
    ray_init = {} if ray_init is None else OmegaConf.to_container(ray_init)
    runtime_env = dict(ray_init.get("runtime_env") or {})
    runtime_env["env_vars"] = {**(runtime_env.get("env_vars") or {}), **variables}
    # Set whole: writes into a node that `setdefault` returned are lost (omegaconf 2.3).
    OmegaConf.update(config, "ray_kwargs.ray_init", {**ray_init, "runtime_env": runtime_env})
    # verl before 0.9 writes TRANSFER_QUEUE_ENABLE into it (0.8.0 main_ppo.py:74).
    OmegaConf.set_struct(config.ray_kwargs.ray_init.runtime_env, False)


def _ask_engine_for_times(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    name = rollout.get("name")
    if name == "vllm":
        rollout.disable_log_stats = False
        return
    if name != "sglang":
        recorder.say(
            f"WARNING profiler.events.engine_timing works with SGLang and vLLM, not {name!r}"
        )
        return
    from omegaconf import OmegaConf

    engine: Any = OmegaConf.to_container(rollout.get("engine_kwargs") or OmegaConf.create({}))
    sglang = {**(engine.get("sglang") or {}), "enable_metrics": True}
    rollout.engine_kwargs = {**engine, "sglang": sglang}


def _hook_ray_init() -> None:
    """Make `ray.init` also set a worker process set-up hook, for processes without verl."""
    global _ray_started
    import ray

    if ray.is_initialized():
        _ray_started = True
        recorder.say(
            "WARNING Ray was initialized before the profiler; processes that do not inherit "
            f"{SETTINGS} record nothing. Call verl_profiler.prepare before ray.init. "
            "(ray-initialized)"
        )
        return
    original = ray.init
    if getattr(original, "__verl_profiler__", False):
        return

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        global _ray_started
        try:
            worker_setup_hook.add(args, kwargs)
        except Exception as error:  # noqa: BLE001  the run starts all the same
            recorder.say(f"WARNING processes without verl are not recorded: {error!r}")
        result = original(*args, **kwargs)
        _ray_started = True
        if not worker_setup_hook.is_through_client(args, kwargs):
            _compare_clocks(ray)
        return result

    init.__verl_profiler__ = True  # type: ignore[attr-defined]
    ray.init = init


def _compare_clocks(ray: Any) -> None:
    active = recorder.active()
    if active is None or not active.carried.events.clock_exchange:
        return
    try:
        clock_exchange.start(ray)
    except Exception as error:  # noqa: BLE001  the run starts all the same
        recorder.say(f"WARNING the clocks of the nodes are not compared: {error!r}")
