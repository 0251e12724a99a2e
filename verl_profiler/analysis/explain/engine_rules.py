"""The rules of findings from inside the engines: KV cache, retractions, prefix caches and batches."""

from __future__ import annotations

from verl_profiler.analysis.explain.rule import Rule

__all__ = ["ENGINE_RULES"]

# Left out where `run.json` has a higher one.
_MORE_MEMORY = ("actor_rollout_ref.rollout.gpu_memory_utilization=0.8",)

ENGINE_RULES: dict[str, Rule] = {
    "kv_bound": Rule(
        "The last request to finish queues {lost_s} per step for space in the KV cache.",
        "The KV cache is over 90 % full while requests wait: memory limits the batch, not a setting.",
        "More memory for the engine (gpu_memory_utilization), a quantized KV cache, shorter contexts, "
        "or more replicas. A higher max_num_seqs gains nothing.",
        ("engine_load", "request_engine_time"),
        measured=True,
        overrides=_MORE_MEMORY,
        without=("unbalanced_replicas",),
    ),
    "unbalanced_replicas": Rule(
        "The last request to finish queues {lost_s} per step while another replica has free capacity.",
        "Sticky routing: conversations stay on the replica of their first turn, regardless of its queue.",
        "Move a conversation when its replica has many more calls than another one; its prefix is "
        "recomputed there. The files and the override are below.",
        ("engine_load", "routes"),
        measured=True,
        overrides=("actor_rollout_ref.rollout.router_config_path=spread_calls.yaml",),
    ),
    "retractions": Rule(
        "The last request to finish loses {lost_s} per step to retractions.",
        "The engine admits more requests than its KV cache can hold until they finish, removes "
        "some from the batch, and recomputes their tokens.",
        "More memory for the engine (gpu_memory_utilization), fewer concurrent requests "
        "(max_num_seqs), or a more conservative admission (SGLang: schedule_conservativeness).",
        ("request_engine_time", "engine_load"),
        measured=True,
        overrides=_MORE_MEMORY,
    ),
    "cold_prefix_cache": Rule(
        "The last request to finish spends {lost_s} per step on prefill of tokens that were cached "
        "before.",
        "Its later turns reach another replica, or their prefix was evicted in the meantime.",
        "Send all turns of a conversation with one request id, so that the load balancer keeps its "
        "replica; keep prefix caching on; more memory for the KV cache if the replica did not change.",
        ("request_engine_time", "routes"),
        measured=True,
        overrides=("actor_rollout_ref.rollout.enable_prefix_caching=true",),
    ),
    "small_batches": Rule(
        "Decoding bounds the step at small batches: {lost_s} per step ({lost_share}) of the last "
        "request, on replicas that could run eight times as many requests.",
        "Too few requests at once for so many replicas: each pass reads all weights for a few tokens.",
        "Fewer, larger replicas (tensor parallelism); more samples per step; an asynchronous trainer, "
        "which overlaps steps.",
        ("engine_load", "request_engine_time"),
        measured=True,
        least=0.3,
        dominates=True,
        without=("tail", "slow_replica", "slow_worker", "uneven_replicas"),
    ),
}
