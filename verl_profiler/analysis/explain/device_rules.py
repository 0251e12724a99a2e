"""The rule of the finding from samples of devices."""

from __future__ import annotations

from verl_profiler.analysis.explain.rule import Rule

__all__ = ["DEVICE_RULES"]

DEVICE_RULES: dict[str, Rule] = {
    "gpu_idle": Rule(
        "Devices are idle for {lost_s} per step ({lost_share}) in log-probabilities and updates "
        "(most: {who}).",
        "Larger micro-batches (use_dynamic_bsz with a higher ppo_max_token_len_per_gpu); no offload if "
        "memory allows (param_offload, optimizer_offload); an nsys capture shows the gaps.",
        ("device_use", "phase_efficiency", "worker_phases"),
        measured=True,
        least=0.05,
        without=("slow_ranks", "handover", "transfer"),
    ),
}
