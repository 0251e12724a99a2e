"""The rules of findings from inside the engines: KV cache, retractions, prefix caches and batches."""

from __future__ import annotations

from verl_profiler.analysis.explain.rule import Rule

__all__ = ["ENGINE_RULES"]

ENGINE_RULES: dict[str, Rule] = {
    "kv_bound": Rule(
        "The last request to finish queues {lost_s} per step for space in the KV cache.",
        "More memory for the engine (gpu_memory_utilization), a quantized KV cache, or more replicas.",
        ("engine_load", "request_engine_time"),
        cause="Its replica's KV cache is at least 90 % full meanwhile, and no other replica has room.",
        measured=True,
        fixes=("engine_memory",),
        without=("unbalanced_replicas",),
    ),
    "unbalanced_replicas": Rule(
        "The last request to finish queues {lost_s} per step while another replica has free capacity.",
        "Move a conversation when its replica has many more calls than another one; its prefix is "
        "recomputed there.",
        ("engine_load", "routes"),
        measured=True,
        fixes=("spread_calls",),
    ),
    "retractions": Rule(
        "The last request to finish loses up to {lost_s} per step to retractions.",
        "More memory for the engine (gpu_memory_utilization), fewer concurrent requests "
        "(max_num_seqs), or a more conservative admission (SGLang: schedule_conservativeness).",
        ("request_engine_time", "engine_load"),
        measured=True,
        fixes=("engine_memory",),
    ),
    "cold_prefix_cache": Rule(
        "The last request to finish spends {lost_s} per step on prefill of tokens that were cached "
        "before.",
        "Send all turns of a conversation with one request id, so that the load balancer keeps its "
        "replica; keep prefix caching on; more memory for the KV cache if the replica did not change.",
        ("request_engine_time", "routes"),
        measured=True,
        fixes=("prefix_caching",),
    ),
    "small_batches": Rule(
        "Decoding bounds the step at small batches: {lost_s} per step ({lost_share}) of the last "
        "request, on replicas that could run eight times as many requests.",
        "Fewer, larger replicas (tensor parallelism); an asynchronous trainer, which overlaps steps and "
        "trains on older samples.",
        ("engine_load", "request_engine_time"),
        measured=True,
        least=0.3,
        dominates=True,
        without=("tail", "slow_replica", "slow_worker", "uneven_replicas"),
    ),
}
