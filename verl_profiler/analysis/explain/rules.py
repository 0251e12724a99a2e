"""The rules of findings, as a table: what each one measures, when it triggers, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """One thing that steps may lose time to.

    Args:
        says: The sentence; may name {lost_s} and {lost_share} (per step), {who} (the culprit, or
            "one of them") and {reason} (why most stragglers are late).
        cause: The usual cause.
        advice: What to try, with the setting's name.
        shows: Plots or tables with the evidence, the best first.
        change: The replay whose gain is recoverable.
        owners: Categories of the critical path; without a change, all of their time is recoverable.
        measured: The culprit's own lost time is recoverable; without a culprit, the rule is silent
            unless `change` is set too.
        bounded: The owners' time is an estimate, and the culprits' own lost time an upper bound: what
            the last request waits for may be more than the path shows.
        least: The share of a step from which on the rule triggers.
        varies: What a healthy step has by chance, too: a small gain needs an interval above 0.
        unseen: The replay has bounds only, so the owners' time decides whether the rule triggers.
        dominates: Nothing is out of the ordinary; this is what bounds the step.
        always: Triggers whatever the time.
        between: The time lies between steps, not in them.
        named_cause: The cause where the culprit is a single one.
        named_advice: What to try then.
        overrides: Hydra overrides to paste; {name} stands for a value of `VALUES`.
        named_overrides: Those where the culprit is a single one.
        without: Rules that make this one superfluous if they recover at least half as much; of what
            dominates, rules whose gains do not count.
    """

    says: str
    cause: str
    advice: str
    shows: tuple[str, ...]
    change: str | None = None
    owners: tuple[str, ...] = ()
    measured: bool = False
    bounded: bool = False
    least: float = 0.03
    varies: bool = False
    unseen: bool = False
    dominates: bool = False
    always: bool = False
    between: bool = False
    named_cause: str | None = None
    named_advice: str | None = None
    overrides: tuple[str, ...] = ()
    named_overrides: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()


_MORE_WORKERS = ("actor_rollout_ref.rollout.agent.num_workers={twice_the_workers}",)

RULES: dict[str, Rule] = {
    "polling": Rule(
        "The trainer noticed rollout completion {lost_s} late.",
        "verl's replay buffer polls for finished samples every 2 s (poll_interval, which has no "
        "setting in verl 0.9.1), so gen is a multiple of that.",
        "Subclass ReplayBuffer and pass poll_interval=0.2; the file and the overrides are below.",
        ("critical_path", "requests_in_flight"),
        change="no_polling",
        owners=("polling",),
        overrides=(
            "trainer.v1.sampler.custom_sampler.path=fast_poll.py",
            "trainer.v1.sampler.custom_sampler.name=FastPoll",
        ),
    ),
    "tail": Rule(
        "The slowest 5 % of the requests delay the step, mostly because {reason}.",
        "A few prompts take many turns or long responses, while the engines are nearly idle.",
        "Limit turns or response length; sample more prompts than needed and drop or postpone the "
        "last ones.",
        ("rollout_tail", "stragglers", "slowest_requests"),
        change="slowest_5_percent",
        varies=True,
        named_cause="Stragglers are mostly those of {who}.",
        named_advice="Look at the requests of {who} first: `verl-profiler requests RUN`.",
        overrides=("actor_rollout_ref.rollout.multi_turn.max_assistant_turns={p95_turns}",),
        without=("slow_tools", "slow_replica", "slow_worker", "event_loop", "host_stall", "reward"),
    ),
    "slow_tools": Rule(
        "Slow tool calls delay the step, mostly those of {who}.",
        "A tool with a long tail: a sandbox that starts cold, a search without a time limit, "
        "retries.",
        "A time limit near the tool's 95th percentile; more workers behind the tool; a cache.",
        ("tool_latencies", "stragglers"),
        change="tools_at_median",
        varies=True,
    ),
    "failing_tools": Rule(
        "Tool calls fail: {who}.",
        "The tool's backend rejects or drops calls; the model sees an error and tries again.",
        "Look at the tool's own log for the requests below; fix or retry inside the tool.",
        ("tool_latencies", "stragglers"),
        measured=True,
        always=True,
    ),
    "slow_replica": Rule(
        "One replica is slower than the others: {who}.",
        "A slow or shared device, a throttled host, or other work beside the engine.",
        "Check clocks, temperature and other processes of that replica's devices; move it.",
        ("token_rates", "stragglers"),
        change="replicas_equally_fast",
        measured=True,
    ),
    "uneven_replicas": Rule(
        "Generate calls are spread unevenly over the replicas ({who}).",
        "Requests stay with the replica of their first turn, wherever the long ones are.",
        "Balance by load and not by request where prefix caching does not matter; more, smaller "
        "replicas.",
        ("token_rates", "stragglers"),
        change="even_replicas",
        varies=True,
        without=("slow_replica",),
    ),
    "slow_worker": Rule(
        "All other agent-loop workers are done {lost_s} per step before {who}.",
        "Its requests are longer, or its process or host is slower.",
        "Compare its requests with those of the others (`verl-profiler requests RUN`); check its "
        "host; more agent-loop workers even the work out.",
        ("worker_phases", "loop_suspects"),
        measured=True,
        overrides=_MORE_WORKERS,
        without=("slow_replica", "slow_tools", "event_loop", "host_stall"),
    ),
    "uneven_workers": Rule(
        "The event loops of the agent-loop workers have unequal work ({who}).",
        "Requests with large prompts or tool results in one worker; a tool that computes inside "
        "the event loop.",
        "More agent-loop workers; tools in processes of their own.",
        ("worker_phases", "loop_suspects"),
        change="even_workers",
        varies=True,
        overrides=_MORE_WORKERS,
        without=("slow_worker", "event_loop", "host_stall"),
    ),
    "slow_ranks": Rule(
        "In the trainer's phases, ranks wait for the slowest one ({who}).",
        "Sequences of unequal length in the ranks' batches.",
        "Balance the batches over the ranks.",
        ("worker_phases", "stragglers"),
        change="even_ranks",
        measured=True,
        named_cause="It is always the same one: its device or host is slow, whatever its batch.",
        named_advice="Check {who}: clocks and temperature of its device, other processes, its host's "
        "network and memory; leave it out and compare.",
        overrides=(
            "trainer.balance_batch=true",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
        ),
        named_overrides=(),
    ),
    "engine_queue": Rule(
        "The request that ends last waits {lost_s} per step in the engine's queue.",
        "More requests than a replica runs at once, or too little room for their key-value cache.",
        "Raise the limit of concurrent requests or the memory for the cache; more replicas.",
        ("engine_parts", "what_if"),
        change="no_queue",
        owners=("queue",),
        unseen=True,
        overrides=("actor_rollout_ref.rollout.max_num_seqs={twice_the_limit}",),
    ),
    "way_to_engine": Rule(
        "The request that ends last spends {lost_s} per step between its worker and the engine.",
        "The load balancer is one process; large prompts are serialized; the worker's event loop is "
        "busy.",
        "More agent-loop workers; look at the event-loop stalls.",
        ("engine_parts", "loop_suspects"),
        owners=("server_acquire", "transport"),
        overrides=_MORE_WORKERS,
        without=("event_loop", "host_stall"),
    ),
    "event_loop": Rule(
        "A worker's event loop is blocked for {lost_s} per step while the last request waits for it "
        "({who}).",
        "Code that computes or blocks inside a coroutine: a tool, a reward function, tokenizing.",
        "asyncio.to_thread or a process for what computes; more agent-loop workers.",
        ("loop_suspects",),
        owners=("event_loop",),
        bounded=True,
        overrides=_MORE_WORKERS,
    ),
    "host_stall": Rule(
        "For {lost_s} per step all processes of a host stalled at once ({who}).",
        "The machine or its container was paused, throttled or swapping: a virtual machine that was "
        "moved, a CPU limit, memory that ran out, more busy processes than cores.",
        "Look at steal time, nr_throttled in cpu.stat and swap in those seconds; leave these steps "
        "out of comparisons.",
        ("critical_path", "loop_suspects"),
        owners=("host_stall",),
    ),
    "late_start": Rule(
        "{lost_s} per step pass before the request that ends last starts.",
        "The trainer reads the batch and sends prompts out one after the other; a worker is busy, "
        "or, in the first step, still starting.",
        "More agent-loop workers; more dataloader workers; smaller prompts in the batch.",
        ("critical_path", "requests_in_flight"),
        owners=("dispatch", "prepare_step"),
        overrides=_MORE_WORKERS,
    ),
    "reward": Rule(
        "Scoring delays the step by {lost_s} ({who}).",
        "A reward function that runs after the rollout, or for a long time for the last request.",
        "Score inside the agent loop; more reward workers; a time limit in the reward function.",
        ("reward_times", "critical_path"),
        owners=("reward",),
        overrides=("reward.num_workers={twice_the_reward_workers}",),
    ),
    "validation": Rule(
        "Validation takes {lost_s} per step, {lost_share} of a step's length.",
        "Validation runs between steps, and the trainer waits for it.",
        "A larger trainer.test_freq; fewer validation prompts.",
        ("step_durations",),
        measured=True,
        between=True,
        least=0.1,
        overrides=("trainer.test_freq={rarer_tests}",),
    ),
    "between_steps": Rule(
        "{lost_s} per step pass between steps, outside all timers.",
        "Loading the next batch, logging, or dumping samples in the trainer's process.",
        "More dataloader workers; a faster disk for the data; fewer or smaller dumps.",
        ("step_durations",),
        measured=True,
        between=True,
        overrides=("data.dataloader_num_workers={more_loaders}",),
    ),
    "transfer": Rule(
        "TransferQueue calls delay the step by {lost_s} (most: {who}).",
        "Large fields that every phase fetches again, or one storage unit for all.",
        "Fewer or smaller fields; more storage units.",
        ("transfer_rates", "critical_path"),
        owners=("transfer",),
        least=0.05,
        overrides=(
            "transfer_queue.backend.SimpleStorage.num_data_storage_units={twice_the_storage}",
        ),
    ),
    "weight_sync": Rule(
        "The weight sync takes {lost_s} per step, {lost_share} of it.",
        "Weights go through host memory or in many small pieces.",
        "A faster rollout.checkpoint_engine; larger buckets; check that it does not run over the "
        "slow network.",
        ("weight_sync",),
        owners=("update_weights",),
        least=0.1,
        named_cause="{who} is the last one, whatever it sends.",
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
        owners=("save_checkpoint",),
        overrides=("trainer.save_freq={rarer_saves}",),
    ),
    "engine_sleep": Rule(
        "Putting the engines to sleep takes {lost_s} per step.",
        "The engines free their weights and cache before the trainer computes.",
        "Keep the engines awake where memory allows (rollout.free_cache_engine=False).",
        ("critical_path", "memory_phases"),
        owners=("sleep_replicas",),
    ),
    "handover": Rule(
        "For {lost_s} per step the trainer's phases run with no rank at work (most: {who}).",
        "Batches are serialized and sent to the ranks and back by the trainer's one process.",
        "Fewer fields in the batch; TransferQueue, where it is off.",
        ("critical_path", "worker_phases"),
        owners=("handover",),
    ),
    "unexplained": Rule(
        "{lost_s} per step ({lost_share}) are unattributed: no event covers them (most: {who}).",
        "Code of your own between verl's timers, or probes that are off.",
        "span(…) around your own code; switch all families of profiler.events on.",
        ("critical_path",),
        owners=("unexplained",),
        least=0.05,
    ),
    "tool_time": Rule(
        "Stragglers wait {lost_s} per step for tools ({who}); its calls are all about as slow.",
        "The tool itself is slow; no call is out of the ordinary.",
        "Make the tool faster: more workers behind it, a cache, fewer calls per turn.",
        ("tool_latencies", "critical_path"),
        owners=("tool",),
        least=0.1,
        dominates=True,
        without=("slow_tools",),
    ),
    "decode_bound": Rule(
        "Decoding bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "The responses are long; no replica, worker or request is out of the ordinary.",
        "More replicas or tensor parallelism, speculative decoding, shorter responses.",
        ("critical_path", "token_rates"),
        owners=("decode", "engine"),
        least=0.5,
        dominates=True,
        without=("tail", "slow_replica", "slow_worker"),
    ),
    "trainer_bound": Rule(
        "{who} bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "The trainer computes; no rank is out of the ordinary.",
        "Larger micro-batches (dynamic batch sizes), sequence packing, more ranks.",
        ("critical_path", "worker_phases"),
        owners=("update_actor", "update_critic", "old_log_prob", "ref", "values"),
        least=0.5,
        dominates=True,
        without=("slow_ranks",),
        overrides=("actor_rollout_ref.actor.use_dynamic_bsz=true",),
    ),
}
