"""The rules of findings, as a table: what each one measures, when it triggers, and what to do."""

from __future__ import annotations

from verl_profiler.analysis.explain.device_rules import DEVICE_RULES
from verl_profiler.analysis.explain.engine_rules import ENGINE_RULES
from verl_profiler.analysis.explain.rule import Rule

__all__ = ["RULES", "Rule"]

_MORE_WORKERS = ("actor_rollout_ref.rollout.agent.num_workers={twice_the_workers}",)

RULES: dict[str, Rule] = {
    "polling": Rule(
        "The trainer noticed rollout completion {lost_s} late.",
        "verl's replay buffer polls for finished samples every 2 s (poll_interval, which has no "
        "setting in verl 0.9.1), so gen is a multiple of that.",
        "Subclass ReplayBuffer and pass poll_interval=0.2; the file and the overrides are below.",
        ("critical_path", "rollout_tail"),
        change="no_polling",
        categories=("polling",),
        overrides=(
            "trainer.v1.sampler.custom_sampler.path=fast_poll.py",
            "trainer.v1.sampler.custom_sampler.name=FastPoll",
        ),
    ),
    "tail": Rule(
        "The slowest 5 % of the requests delay the step, mostly because {reason}.",
        "A few prompts take many turns or long responses, while the engines are nearly idle.",
        "Limit turns or response length; sample more prompts than needed and drop or defer the "
        "last ones.",
        ("rollout_tail", "stragglers", "slowest_requests"),
        change="slowest_5_percent",
        varies=True,
        named_cause="Most stragglers are requests of {who}.",
        named_advice="Look at the requests of {who} first: `verl-profiler requests RUN`.",
        overrides=("actor_rollout_ref.rollout.multi_turn.max_assistant_turns={p95_turns}",),
        without=(
            *("slow_tools", "slow_replica", "slow_worker", "event_loop", "host_stall", "reward"),
            *("kv_bound", "unbalanced_replicas", "retractions", "cold_prefix_cache"),
        ),
    ),
    "slow_tools": Rule(
        "Slow tool calls delay the step ({who}).",
        "A tool with a long latency tail: cold sandbox starts, a search without a timeout, "
        "retries.",
        "A timeout near the tool's 95th percentile; more workers behind the tool; a cache.",
        ("tool_latencies", "stragglers"),
        change="tools_at_median",
        varies=True,
    ),
    "failing_tools": Rule(
        "Tool calls fail: {who}.",
        "The tool's backend rejects or drops calls; the model sees an error and tries again.",
        "Check the tool's own log for the requests below; fix or retry inside the tool.",
        ("tool_latencies", "stragglers"),
        measured=True,
        always=True,
    ),
    "slow_replica": Rule(
        "Replicas differ in speed ({who}).",
        "A slow or shared device, a throttled host, or other load on the engine's host.",
        "Check clocks, temperature and other processes on the slower replica's devices; move it.",
        ("token_rates", "stragglers"),
        change="replicas_equally_fast",
        measured=True,
    ),
    "uneven_replicas": Rule(
        "Generate calls are spread unevenly over the replicas ({who}).",
        "Sticky routing: requests stay on the replica of their first turn, regardless of load.",
        "Route by load instead of by request if prefix caching does not matter; more, smaller "
        "replicas.",
        ("token_rates", "stragglers"),
        change="even_replicas",
        varies=True,
        without=("slow_replica", "unbalanced_replicas"),
    ),
    "slow_worker": Rule(
        "All other agent-loop workers finish {lost_s} per step before {who}.",
        "Its requests are longer, or its process or host is slower.",
        "Compare its requests with those of the others (`verl-profiler requests RUN`); check its "
        "host; use more agent-loop workers to balance the work.",
        ("worker_phases", "loop_suspects"),
        measured=True,
        overrides=_MORE_WORKERS,
        without=("slow_replica", "slow_tools", "event_loop", "host_stall"),
    ),
    "uneven_workers": Rule(
        "Work is unbalanced over the agent-loop workers' event loops ({who}).",
        "Requests with large prompts or tool results in one worker; CPU-bound tool code in "
        "the event loop.",
        "More agent-loop workers; tools in separate processes.",
        ("worker_phases", "loop_suspects"),
        change="even_workers",
        varies=True,
        overrides=_MORE_WORKERS,
        without=("slow_worker", "event_loop", "host_stall"),
    ),
    "slow_ranks": Rule(
        "In the trainer's phases, ranks wait for the slowest one ({who}).",
        "Different sequence lengths in the ranks' batches.",
        "Balance the batches over the ranks.",
        ("worker_phases", "stragglers"),
        change="even_ranks",
        measured=True,
        named_cause="It is always the same rank: its device or host is slow, regardless of the batch.",
        named_advice="Check {who}: clocks and temperature of its device, other processes, its host's "
        "network and memory; exclude it and compare.",
        overrides=(
            "trainer.balance_batch=true",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
        ),
        named_overrides=(),
    ),
    "engine_queue": Rule(
        "The last request to finish waits {lost_s} per step in the engine's queue.",
        "More requests than a replica's concurrency limit, or too little KV-cache memory.",
        "Raise the concurrency limit or the KV-cache memory; more replicas.",
        ("engine_parts", "what_if"),
        change="no_queue",
        categories=("queue",),
        unseen=True,
        overrides=("actor_rollout_ref.rollout.max_num_seqs={twice_the_limit}",),
        without=("kv_bound", "unbalanced_replicas"),
    ),
    **ENGINE_RULES,
    **DEVICE_RULES,
    "way_to_engine": Rule(
        "The last request to finish spends {lost_s} per step between its worker and the engine.",
        "The load balancer is a single process; large prompts are serialized; the worker's event loop is "
        "busy.",
        "More agent-loop workers; check the event-loop stalls.",
        ("engine_parts", "loop_suspects"),
        categories=("server_acquire", "transport"),
        overrides=_MORE_WORKERS,
        without=("event_loop", "host_stall", "uneven_workers"),
    ),
    "event_loop": Rule(
        "A worker's event loop is blocked for {lost_s} per step while the last request waits for it "
        "({who}).",
        "CPU-bound or blocking code in a coroutine: a tool, a reward function, tokenization.",
        "asyncio.to_thread or a process for CPU-bound code; more agent-loop workers.",
        ("loop_suspects",),
        categories=("event_loop",),
        bounded=True,
        overrides=_MORE_WORKERS,
    ),
    "host_stall": Rule(
        "All processes of a host stalled at once for {lost_s} per step ({who}).",
        "The machine or its container was paused, throttled or swapping: a VM migration, a "
        "CPU limit, memory pressure, more busy processes than cores.",
        "Check steal time, nr_throttled in cpu.stat and swap at those times; exclude these steps "
        "from comparisons.",
        ("critical_path", "loop_suspects"),
        categories=("host_stall",),
    ),
    "late_start": Rule(
        "The last request to finish starts late: {lost_s} per step in preparation and dispatch.",
        "The trainer loads the batch and dispatches prompts one by one; a worker is busy, "
        "or, in the first step, still starting.",
        "More agent-loop workers; more dataloader workers; smaller prompts in the batch.",
        ("critical_path", "rollout_tail"),
        categories=("dispatch", "prepare_step"),
        overrides=_MORE_WORKERS,
        without=("uneven_workers",),
    ),
    "reward": Rule(
        "Scoring delays the step by {lost_s} ({who}).",
        "A reward function that runs after the rollout, or slowly for the last request.",
        "Score inside the agent loop; more reward workers; a timeout in the reward function.",
        ("reward_times", "critical_path"),
        categories=("reward",),
        overrides=("reward.num_workers={twice_the_reward_workers}",),
    ),
    "validation": Rule(
        "Validation takes {lost_s} per step, equal to {lost_share} of the step time.",
        "Validation runs between steps, and the trainer waits for it.",
        "A larger trainer.test_freq; fewer validation prompts.",
        ("step_durations",),
        measured=True,
        between=True,
        least=0.1,
        overrides=("trainer.test_freq={rarer_tests}",),
    ),
    "between_steps": Rule(
        "The trainer spends {lost_s} per step between steps, outside all timers.",
        "Loading the next batch, logging, or dumping samples in the trainer process.",
        "More dataloader workers; a faster disk for the data; fewer or smaller dumps.",
        ("step_durations",),
        measured=True,
        between=True,
        overrides=("data.dataloader_num_workers={more_loaders}",),
    ),
    "transfer": Rule(
        "TransferQueue calls delay the step by {lost_s} (most: {who}).",
        "Large fields that are fetched again in every phase, or a single storage unit.",
        "Fewer or smaller fields; more storage units.",
        ("transfer_rates", "critical_path"),
        categories=("transfer",),
        least=0.05,
        overrides=(
            "transfer_queue.backend.SimpleStorage.num_data_storage_units={twice_the_storage}",
        ),
    ),
    "weight_sync": Rule(
        "The weight sync takes {lost_s} per step, {lost_share} of it.",
        "Weights are copied through host memory or in many small buckets.",
        "A faster rollout.checkpoint_engine; larger buckets; check that it does not use the "
        "slow network.",
        ("weight_sync",),
        categories=("update_weights",),
        least=0.1,
        named_cause="{who} is consistently the last rank.",
        named_advice="Check the device, host and network of {who}.",
        overrides=(
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={buckets}",
        ),
        named_overrides=(),
    ),
    "checkpoint": Rule(
        "Saving checkpoints takes {lost_s} per step on average.",
        "Checkpoints are written to a slow file system, or too often.",
        "A larger trainer.save_freq; asynchronous saving; a local disk.",
        ("step_durations", "critical_path"),
        categories=("save_checkpoint",),
        overrides=("trainer.save_freq={rarer_saves}",),
    ),
    "engine_sleep": Rule(
        "Putting the engines to sleep takes {lost_s} per step.",
        "The engines free their weights and cache before the trainer computes.",
        "Keep the engines awake where memory allows (rollout.free_cache_engine=False).",
        ("critical_path", "memory_phases"),
        categories=("sleep_replicas",),
    ),
    "handover": Rule(
        "All ranks are idle for {lost_s} per step during the trainer's phases (most: {who}).",
        "Dispatch/collect gap: the single trainer process serializes batches to and from the ranks.",
        "Fewer fields in the batch; enable TransferQueue.",
        ("critical_path", "worker_phases"),
        categories=("handover",),
    ),
    "unexplained": Rule(
        "{lost_s} per step ({lost_share}) are unattributed: not covered by any event (most: {who}).",
        "User code between verl's timers, or disabled probes.",
        "Put span(…) around your own code; enable all profiler.events.families.",
        ("critical_path",),
        categories=("unexplained",),
        least=0.05,
    ),
    "tool_time": Rule(
        "Stragglers wait {lost_s} per step for tools ({who}); all calls are about equally slow.",
        "The tool itself is slow; there are no outliers.",
        "Make the tool faster: more workers behind it, a cache, fewer calls per turn.",
        ("tool_latencies", "critical_path"),
        categories=("tool",),
        least=0.1,
        dominates=True,
        without=("slow_tools",),
    ),
    "decode_bound": Rule(
        "Decoding bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "The responses are long; no replica, worker or request is an outlier.",
        "More replicas or tensor parallelism, speculative decoding, shorter responses.",
        ("critical_path", "token_rates"),
        categories=("decode", "engine"),
        least=0.5,
        dominates=True,
        without=("tail", "slow_replica", "slow_worker", "small_batches"),
    ),
    "trainer_bound": Rule(
        "{who} bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "The trainer is compute-bound; no rank is an outlier.",
        "Larger micro-batches (dynamic batch sizes), sequence packing, more ranks.",
        ("critical_path", "worker_phases"),
        categories=("update_actor", "update_critic", "old_log_prob", "ref", "values"),
        least=0.5,
        dominates=True,
        without=("slow_ranks",),
        overrides=("actor_rollout_ref.actor.use_dynamic_bsz=true",),
    ),
    "split_off": Rule(
        "The device split is unbalanced: {who}.",
        "One pool waits for the other, which is busy almost all the time.",
        "{reason} trainer.n_gpus_per_node, trainer.nnodes and the rollout's settings of these names determine the split.",
        ("bubble_ledger",),
        least=0.05,
        pooled=True,
    ),
    "queue_full": Rule(
        "The {who} is full for {lost_s} per step, {lost_share} of the time.",
        "The rollout is ahead: samples age in the queue until dispatching stops or samples are dropped.",
        "More devices for the trainer. Otherwise fewer samples in flight (staleness_threshold): "
        "they are less stale, and steps take as long as before.",
        ("bubble_ledger", "staleness"),
        least=0.5,
        pooled=True,
    ),
    "queue_empty": Rule(
        "The {who} is empty for {lost_s} per step, {lost_share} of the time, and the trainer waits.",
        "Samples are consumed as soon as they are ready; none is generated ahead of time.",
        "A faster rollout: more devices or replicas, more concurrent samples, shorter requests.",
        ("bubble_ledger", "requests_in_flight"),
        least=0.5,
        pooled=True,
    ),
    "too_stale": Rule(
        "{lost_share} of the trained tokens are more than 2 weight versions behind, mostly because "
        "of {who}.",
        "Samples wait in the queue: the rollout is several steps ahead of the trainer.",
        "Fewer samples in flight: fewer num_warmup_batches, a smaller staleness_threshold.",
        ("staleness",),
        least=0.1,
        pooled=True,
    ),
    "waits_for_rollout": Rule(
        "The trainer waits {lost_s} per step for samples, {lost_share} of its time.",
        "The rollout bounds the run: it generates samples more slowly than the trainer consumes them.",
        "More devices for the rollout{who}; {reason}.",
        ("bubble_ledger",),
        least=0.05,
        overrides=("trainer.v1.separate_async.hybrid_rollout.enable_switch=true",),
        pooled=True,
    ),
    "waits_for_trainer": Rule(
        "The rollout's devices are idle for {lost_s} per step, {lost_share} of their time, because "
        "no more samples are dispatched.",
        "The trainer bounds the run: samples are ready before it needs them.",
        "More devices for the trainer{who}; larger micro-batches. A faster rollout gains nothing.",
        ("bubble_ledger",),
        least=0.1,
        dominates=True,
        overrides=("actor_rollout_ref.actor.use_dynamic_bsz=true",),
        pooled=True,
    ),
    "waits_in_turn": Rule(
        "Trainer and rollout alternately wait for each other, the trainer {lost_s} per step.",
        "Too few samples are in flight: the rollout runs out of them before the trainer dispatches more.",
        "A larger num_warmup_batches; samples become staler by as many versions.",
        ("bubble_ledger", "staleness"),
        least=0.05,
        overrides=("trainer.v1.separate_async.num_warmup_batches={more_warm_up}",),
        pooled=True,
    ),
    "sync_bound": Rule(
        "The weight sync stops the trainer for {lost_s} per step, {lost_share} of its time.",
        "Weights are copied through host memory or in many small buckets, or synced too often.",
        "A larger parameter_sync_step; a faster rollout.checkpoint_engine; larger buckets.",
        ("bubble_ledger", "weight_sync"),
        least=0.1,
        overrides=(
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={buckets}",
        ),
        pooled=True,
    ),
    "stale_samples": Rule(
        "{lost_share} of the generating devices' time, {lost_s} per step, is spent on samples that "
        "are dropped, while the trainer waits.",
        "Samples are too stale when they are ready, or are filtered out.",
        "A larger max_off_policy_threshold, or wait instead of dropping; fewer warm-up batches.",
        ("bubble_ledger", "staleness"),
        least=0.05,
        overrides=("trainer.v1.sampler.max_off_policy_strategy=wait",),
        pooled=True,
    ),
    "wasted_aborts": Rule(
        "{lost_share} of the generating devices' time, {lost_s} per step, is lost to aborted calls, "
        "while the trainer waits.",
        "Weight syncs abort calls, whose tokens are discarded or whose prefill is repeated.",
        "A larger parameter_sync_step; engines that keep the tokens of an aborted call.",
        ("bubble_ledger", "staleness"),
        least=0.05,
        pooled=True,
    ),
}
