"""The rules of findings, as a table: what each one measures, when it triggers, and what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BETWEEN", "CATEGORIES", "LATE_START", "ONLY_IN_REPORT", "RULES", "UNEXPLAINED", "Rule"]

# The phase of segments after the end of a step, and the category of what no timer covers there.
BETWEEN = "between_steps"
# The rule whose categories precede the requests.
LATE_START = "late_start"
UNEXPLAINED = "unexplained"
# Names in `shows` that are tables of the report; the others are plots.
ONLY_IN_REPORT = frozenset(
    {
        *("rollout_tail", "reward_times", "routes", "token_rates", "request_timeline"),
        *("device_use", "phase_efficiency", "transfer_totals", "weight_transfers"),
    }
)
# Categories of the critical path other than verl's phases, and their meaning.
CATEGORIES: dict[str, str] = {
    "dispatch": "from the start of gen to the start of the request that ended last",
    "prompt_build": "tokenizing the first prompt",
    "server_acquire": "waiting for the load balancer to choose a replica",
    "transport": "transport to and from the engine, and other waiting outside it",
    "parked": "waiting in a paused engine",
    "queue": "waiting in the engine's queue",
    "prefill": "from the first forward pass to the first token",
    "decode": "from the first token to the last",
    "engine": "in the engine, without reported components",
    "tool": "a tool call",
    "tool_parsing": "parsing tool calls in the response",
    "token_merge": "merging new tokens into the conversation",
    "postprocess": "converting the result to tensors and storing it",
    "reward": "waiting for the request's reward, or the trainer's timer of that name",
    "transfer": "TransferQueue calls",
    "event_loop": "the worker's event loop was blocked while the request waited for it or a reply",
    "host_stall": "the same, while most other processes on the host stalled too",
    "engine_memory": "releasing and allocating the memory of an engine in the trainer's phases",
    "sleep_replicas": "putting the engines to sleep at the end of gen",
    "polling": "all requests had finished, but the trainer had not polled yet",
    "handover": "dispatch/collect gap: a trainer phase while its last rank was idle",
    "offload": "loading and offloading parameters, gradients or optimizer state of the last rank",
    UNEXPLAINED: "unattributed: no event covers the time",
}


@dataclass(frozen=True)
class Rule:
    """A rule for one kind of finding.

    Every sentence but the advice is of what was measured.

    Args:
        sentence: The finding; may contain {lost_s} and {lost_share} (per step), {who} (the culprit, or
            "no single one"), {work} (whose time it is) and {reason} (the main reason for straggling).
        advice: What to try, with the setting's name; what changes the training is named as such.
        shows: Plots or tables with the evidence, the best first.
        cause: What is measured besides; empty if only the culprit has that.
        change: The replay whose gain is recoverable.
        categories: Of the critical path; without a change, all of their time is recoverable.
        measured: The culprit's own lost time counts alone, not that of the categories.
        least: The minimum share of a step for the rule to trigger.
        varies: Healthy steps show this by chance too: a small gain needs an interval above 0.
        unseen: The replay has only bounds, so the categories' time determines whether the rule triggers.
        dominates: No anomaly; this bounds the step.
        always: Triggers regardless of the time.
        named_advice: What to try if there is a single culprit, other than a phase.
        fixes: What to paste: names of `fixes.FIXES`.
        pooled: Of an asynchronous run: judged by its device time, `asynchronous_findings`; the
            fixes are for pools with devices of their own.
        without: Rules that make this one superfluous if they recover at least half as much; with
            `dominates`, rules whose gains are subtracted.
    """

    sentence: str
    advice: str
    shows: tuple[str, ...]
    cause: str = ""
    change: str | None = None
    categories: tuple[str, ...] = ()
    measured: bool = False
    least: float = 0.03
    varies: bool = False
    unseen: bool = False
    dominates: bool = False
    always: bool = False
    named_advice: str | None = None
    fixes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    pooled: bool = False


# What makes requests late, by its cause: where one of these explains it, the wait for them does not.
_CAUSES = (
    *("slow_tools", "failing_tools", "slow_replica", "slow_host", "skewed_routing", "long_prompts"),
    *("slow_calls", "slow_prefill", "slow_transfers", "few_at_once", "reward"),
    *("event_loop", "host_stall"),
)
_OF_ROLLOUT = (
    *_CAUSES,
    "tail",
    "grows",
    "changed",
    "tool_time",
    "prefill",
    "prompt_build",
    "engine_queue",
    "late_start",
    "polling",
)

RULES: dict[str, Rule] = {
    "polling": Rule(
        "The trainer noticed rollout completion {lost_s} late.",
        "Subclass ReplayBuffer and pass poll_interval=0.2: in verl 0.9 it polls every 2 s by default "
        "(verl 0.8 polls each second, and has no setting). "
        "verl passes its group filter and refills only to its own sampler: pass them on if you use them.",
        ("critical_path", "rollout_tail"),
        change="no_polling",
        categories=("polling",),
        fixes=("fast_poll",),
    ),
    "tail": Rule(
        "The slowest requests delay the step{reason}.",
        "Compare them with typical requests (`verl-profiler requests RUN`). A limit of what makes them longer, "
        "partial rollouts that go on in the next step, or more prompts than are trained, of which the last "
        "are dropped: each changes what is trained.",
        ("rollout_tail", "stragglers", "slowest_requests"),
        change="slowest_5_percent",
        varies=True,
        named_advice="Look at the requests of {who} first: `verl-profiler requests RUN`.",
        without=(
            *(*_CAUSES, "slow_worker", "kv_bound", "unbalanced_replicas", "retractions"),
            "cold_prefix_cache",
        ),
    ),
    "slow_tools": Rule(
        "Slow tool calls delay the step ({who}).",
        "More workers behind the tool; a cache. A timeout cuts off the slowest calls, and changes what "
        "the model sees.",
        ("tool_latencies", "stragglers"),
        change="tools_at_median",
        varies=True,
        without=("failing_tools", "slow_host"),
    ),
    "failing_tools": Rule(
        "Tool calls fail: {who}.",
        "Check the tool's own log for the requests below; fix or retry inside the tool.",
        ("tool_latencies", "stragglers"),
        always=True,
    ),
    "slow_replica": Rule(
        "Replicas differ in speed ({who}).",
        "Check how many calls each replica had; clocks, temperature and other processes on the slower "
        "replica's devices.",
        ("token_rates", "stragglers"),
        without=("slow_host",),
    ),
    "slow_calls": Rule(
        "Generate calls of one worker take longer per token than those of others on the same replicas ({who}).",
        "Compare its requests with those of the others (`verl-profiler requests RUN`): sampling parameters, "
        "constrained decoding, adapters, lengths of prompts.",
        ("slowest_requests", "token_rates"),
        without=("slow_host",),
    ),
    "slow_host": Rule(
        "The same work takes longer on one host than on the others ({who}).",
        "Check the CPU load, other processes, memory, power limits and network of this host; exclude it and compare.",
        ("worker_phases", "tool_latencies", "token_rates"),
    ),
    "uneven_replicas": Rule(
        "Routing each generate call to the least loaded replica would save {lost_s} per step ({who}).",
        "Route by load instead of by request if prefix caching does not matter; more, smaller "
        "replicas.",
        ("token_rates", "stragglers"),
        change="even_replicas",
        varies=True,
        without=(
            "slow_replica",
            "slow_calls",
            "slow_host",
            "unbalanced_replicas",
            "skewed_routing",
        ),
    ),
    "slow_worker": Rule(
        "All other agent-loop workers finish {lost_s} per step before {who}.",
        "Compare its requests with those of the others (`verl-profiler requests RUN`).",
        ("worker_phases", "loop_suspects"),
        without=(*_CAUSES, "engine_queue"),
    ),
    "uneven_workers": Rule(
        "Balancing work over the agent-loop workers' event loops would save {lost_s} per step ({who}).",
        "More agent-loop workers; tools in separate processes.",
        ("worker_phases", "loop_suspects"),
        change="even_workers",
        varies=True,
        fixes=("agent_workers",),
        without=("slow_worker", "slow_calls", "slow_transfers", "event_loop", "host_stall"),
    ),
    "slow_ranks": Rule(
        "In the trainer's phases, ranks wait for the slowest one ({who}).",
        "Compare the tokens of the ranks' batches. trainer.balance_batch of the legacy trainer "
        "balances them, and changes the mini-batches; the V1 trainers always do.",
        ("worker_phases", "stragglers"),
        change="even_ranks",
        named_advice="Check {who}: the tokens of its batches; clocks and temperature of its device, other "
        "processes, its host's network and memory; exclude it and compare.",
    ),
    "long_prompts": Rule(
        "The responses to the same prompts are long in each step ({who}).",
        "Look at these prompts: a limit of the response length or of the turns, or leaving them out, changes "
        "what is trained. The workers that run them are not slow.",
        ("slowest_requests", "stragglers"),
    ),
    "skewed_routing": Rule(
        "Requests are routed unevenly over the replicas ({who}).",
        "Check how the load balancer chooses: equal shares would save this time. Replicas differ in speed here "
        "because of their load.",
        ("token_rates", "routes"),
        without=("slow_replica",),
    ),
    "slow_prefill": Rule(
        "Prefill of the requests' first calls, or the queue behind it, takes longer per token than that of later "
        "turns ({who}).",
        "Check what the engines do at the start of a rollout: compilation, CUDA graphs, loading of weights or "
        "caches, or all prompts at once.",
        ("request_engine_time",),
        without=("stalled_step",),
    ),
    "few_at_once": Rule(
        "The step's requests start as others end: {who}.",
        "Look for a lock, a semaphore or a pool of this size in the agent loop, its tools or the dispatch; "
        "more agent-loop workers.",
        ("rollout_tail", "stragglers"),
    ),
    "uneven_tokens": Rule(
        "Ranks wait for the one whose batch has the most tokens: {who}.",
        "The V1 trainers always balance tokens over the ranks, the legacy trainer with trainer.balance_batch. A "
        "sequence longer than a rank's share needs sequence parallelism.",
        ("worker_phases", "critical_path"),
    ),
    "stalled_step": Rule(
        "One step stalled: {who}.",
        "Check the logs of the trainer and of the nodes at that time, and the report's timeline. The other steps "
        "ran with the same settings.",
        ("step_durations", "worker_phases"),
        categories=("stalled_step",),
        measured=True,
    ),
    "grows": Rule(
        "{work} takes longer from step to step: {who}.",
        "Compare an early and a late step: memory, clocks and other processes of the devices, caches, and "
        "what grows with the data or the model's state.",
        ("step_durations", "token_rates"),
    ),
    "changed": Rule(
        "{work} takes longer than before: {who}.",
        "Look at what happened before this step: a checkpoint, a restart, another job on a node, other data. "
        "`verl-profiler diff RUN@FIRST:LAST RUN@FIRST:LAST` compares the two parts.",
        ("step_durations", "token_rates"),
    ),
    "more_tokens": Rule(
        "Steps have more tokens as the run goes on: {who}.",
        "Responses get longer, which the training itself may do, or prompts do; a limit of the length changes what "
        "is trained.",
        ("step_durations", "token_rates"),
    ),
    "uneven_steps": Rule(
        "Some steps have many times the tokens of the others: {who}.",
        "Look at what these steps train on: the order of the data (data.shuffle), or long prompts; a limit of "
        "the prompt or response length changes what is trained.",
        ("step_durations", "token_rates"),
    ),
    "uneven_times": Rule(
        "{work} takes longer in some steps than in the others: {who}.",
        "Look at what happens in these steps only: garbage collection, saving or logging at intervals, other jobs.",
        ("step_durations", "worker_phases"),
    ),
    "engine_queue": Rule(
        "The last request to finish waits {lost_s} per step in the engine's queue.",
        "Raise the limit that holds them, of running requests or KV-cache memory; where it is prefill of what was "
        "cached before, keep prefix caching on (enable_prefix_caching). More replicas.",
        ("slowest_requests", "what_if"),
        change="no_queue",
        categories=("queue",),
        unseen=True,
        fixes=("running_limit",),
        without=("kv_bound", "unbalanced_replicas", "slow_prefill"),
    ),
    "kv_bound": Rule(
        "The last request to finish queues {lost_s} per step for space in the KV cache.",
        "More memory for the engine (gpu_memory_utilization), a quantized KV cache, or more replicas.",
        ("engine_lanes", "request_engine_time"),
        cause="Its replica's KV cache is at least 90 % full meanwhile, and no other replica has room.",
        fixes=("engine_memory",),
        without=("unbalanced_replicas",),
    ),
    "unbalanced_replicas": Rule(
        "The last request to finish queues {lost_s} per step while another replica has free capacity.",
        "Move a conversation when its replica has many more calls than another one; its prefix is "
        "recomputed there.",
        ("engine_lanes", "routes"),
        fixes=("spread_calls",),
    ),
    "retractions": Rule(
        "The last request to finish loses up to {lost_s} per step to retractions.",
        "More memory for the engine (gpu_memory_utilization), fewer concurrent requests "
        "(max_num_seqs), or more conservative admission (SGLang: schedule_conservativeness).",
        ("request_engine_time", "engine_lanes"),
        fixes=("engine_memory",),
    ),
    "cold_prefix_cache": Rule(
        "Prefill of tokens that were cached before delays the last request to finish by {lost_s} per step.",
        "Send all turns of a conversation with one request id, so that the load balancer keeps its "
        "replica; keep prefix caching on (enable_prefix_caching); more memory for the KV cache if the "
        "replica did not change.",
        ("request_engine_time", "routes"),
    ),
    "small_batches": Rule(
        "Decoding bounds the step at small batches: {lost_s} per step ({lost_share}) of the last "
        "request, on replicas that could run eight times as many requests.",
        "Fewer, larger replicas (tensor parallelism); an asynchronous trainer, which overlaps steps and "
        "trains on older samples.",
        ("engine_lanes", "request_engine_time"),
        least=0.3,
        dominates=True,
        without=("tail", "slow_replica", "slow_calls", "slow_worker", "uneven_replicas"),
    ),
    "gpu_idle": Rule(
        "Devices are idle for {lost_s} per step ({lost_share}) in log-probabilities and updates "
        "(most: {who}).",
        "Larger micro-batches (use_dynamic_bsz with a higher ppo_max_token_len_per_gpu); no offload if "
        "memory allows (param_offload, optimizer_offload); an nsys capture shows the gaps.",
        ("device_use", "phase_efficiency", "worker_phases"),
        least=0.05,
        without=("slow_ranks", "handover", "transfer", "offload", "stalled_step"),
    ),
    "way_to_engine": Rule(
        "The last request to finish spends {lost_s} per step between its worker and the engine "
        "(most: {who}).",
        "Check the event-loop stalls, the size of the prompts, and the load balancer, which is a single "
        "process.",
        ("slowest_requests", "loop_suspects"),
        categories=("server_acquire", "transport"),
        without=("event_loop", "host_stall", "uneven_workers"),
    ),
    "event_loop": Rule(
        "A worker's event loop is blocked for {lost_s} per step while the last request waits for it "
        "({who}).",
        "asyncio.to_thread or a process for CPU-bound code; more agent-loop workers.",
        ("loop_suspects",),
        categories=("event_loop",),
        fixes=("agent_workers",),
    ),
    "host_stall": Rule(
        "Processes of several roles on a host stalled at once for {lost_s} per step ({who}).",
        "Check steal time, nr_throttled in cpu.stat and swap at those times; exclude these steps "
        "from comparisons.",
        ("critical_path", "loop_suspects"),
        categories=("host_stall",),
    ),
    "prompt_build": Rule(
        "prompt_build takes {lost_s} per step ({lost_share}) of the last request to finish: tokenizing the first "
        "prompt.",
        "A faster chat template or tokenizer, in threads or more agent-loop workers; requests of one "
        "prompt build the same tokens.",
        ("critical_path", "request_timeline"),
        change="no_prompt_build",
        categories=("prompt_build",),
        without=("event_loop", "host_stall"),
    ),
    "late_start": Rule(
        "The last request to finish starts late: {lost_s} per step in preparation and dispatch "
        "(most: {who}).",
        "Of dispatch: more agent-loop workers. Of prepare_step, in which verl's V1 trainer loads the "
        "batch: a faster dataset; more data.dataloader_num_workers (a checkpoint resumes only with the number "
        "that it was saved with).",
        ("critical_path", "rollout_tail"),
        categories=("dispatch", "prepare_step"),
        named_advice="Check what {who} does before its requests start, and the load of its host.",
        fixes=("agent_workers",),
        without=("uneven_workers", "few_at_once"),
    ),
    "reward": Rule(
        "Scoring delays the step by {lost_s} ({who}).",
        "Of the reward function: a faster one; a timeout changes what is trained. Of waiting for a "
        "reward worker: more of them.",
        ("reward_times", "critical_path"),
        categories=("reward",),
        measured=True,
        fixes=("reward_workers",),
    ),
    "validation": Rule(
        "Validation takes {lost_s} per step, {lost_share} of the time from step to step.",
        "A larger trainer.test_freq (verl validates in the last step in any case); fewer validation "
        "prompts.",
        ("step_durations",),
        categories=("testing", "validation"),
        least=0.05,
        fixes=("rarer_validation",),
    ),
    "between_steps": Rule(
        "The trainer spends {lost_s} per step ({lost_share}) between steps, outside all timers.",
        "Put span(…) around logging and dumps of samples; fewer or smaller dumps. The legacy trainer "
        "loads the next batch here.",
        ("step_durations",),
        categories=("between_steps",),
    ),
    "slow_transfers": Rule(
        "TransferQueue calls of one worker delay the step by {lost_s} ({who}).",
        "Check the network, memory and load of its host; the other workers' calls are as usual.",
        ("transfer_totals", "worker_phases"),
        categories=("slow_transfers",),
        measured=True,
        without=("slow_host",),
    ),
    "transfer": Rule(
        "TransferQueue calls delay the step by {lost_s} (most: {who}).",
        "Fewer or smaller fields; more storage units.",
        ("transfer_totals", "critical_path"),
        categories=("transfer",),
        without=("slow_host", "slow_transfers"),
    ),
    "weight_sync": Rule(
        "The weight sync takes {lost_s} per step, {lost_share} of it.",
        "A faster rollout.checkpoint_engine; larger buckets (update_weights_bucket_megabytes); check that it "
        "does not use the slow network.",
        ("weight_transfers", "worker_phases"),
        categories=("update_weights",),
        least=0.1,
        named_advice="Check the device, host and network of {who}.",
    ),
    "checkpoint": Rule(
        "Saving checkpoints takes {lost_s} per step on average.",
        "A larger trainer.save_freq (verl saves in the last step in any case); asynchronous saving; a "
        "local disk.",
        ("step_durations", "critical_path"),
        categories=("save_checkpoint",),
        fixes=("rarer_checkpoints",),
    ),
    "engine_sleep": Rule(
        "Sleep or wake-up of the engines takes {lost_s} per step (most: {who}).",
        "Keep the engines awake where memory allows (rollout.free_cache_engine=False); a deep sleep of vLLM (level "
        "2) also loads the weights again.",
        ("critical_path", "memory_over_time"),
        categories=("sleep_replicas", "engine_memory"),
    ),
    "handover": Rule(
        "The last rank to finish is idle for {lost_s} per step during the trainer's phases (most: {who}).",
        "Fewer fields in the batch, which the trainer sends to the ranks and collects from them.",
        ("critical_path", "worker_phases"),
        categories=("handover",),
    ),
    "unexplained": Rule(
        "{lost_s} per step ({lost_share}) are unattributed: not covered by any event (most: {who}).",
        "Put span(…) around your own code; leave profiler.events.exclude empty.",
        ("critical_path",),
        categories=("unexplained",),
    ),
    "offload": Rule(
        "Ranks load and offload model or optimizer for {lost_s} per step ({lost_share}).",
        "Keep them on the devices where memory allows: param_offload and optimizer_offload of actor, ref and "
        "critic.",
        ("critical_path", "memory_over_time", "worker_phases"),
        categories=("offload",),
    ),
    "forward_only": Rule(
        "Phases without a backward pass take {lost_s} per step more than a third of the update, which has "
        "one ({who}).",
        "Compare their batches and settings with the update's: log_prob_use_dynamic_bsz, "
        "log_prob_max_token_len_per_gpu, log_prob_micro_batch_size_per_gpu.",
        ("worker_phases", "phase_efficiency"),
        without=("offload", "slow_ranks"),
    ),
    "prefill": Rule(
        "Prefill takes {lost_s} per step ({lost_share}) of the last request to finish (most: {who}).",
        "Compare it with the prompt's tokens: of a first call, look for warm-up or compilation in the "
        "engine's log; of later ones, for a prefix cache that is off or full.",
        ("request_engine_time",),
        categories=("prefill",),
        least=0.1,
        without=("cold_prefix_cache", "slow_prefill"),
    ),
    "host_memory": Rule(
        "Host memory grows in each step: {who}.",
        "Look for what keeps references to batches, samples or logs. A process that runs out of memory ends the "
        "run.",
        ("memory_over_time",),
        always=True,
    ),
    "tool_time": Rule(
        "The last request to finish spends {lost_s} per step in tools ({who}).",
        "Make the tool faster: more workers behind it, a cache. Fewer calls per turn change what is "
        "trained.",
        ("tool_latencies", "critical_path"),
        categories=("tool",),
        least=0.1,
        dominates=True,
        without=("slow_tools", "failing_tools", "slow_host"),
    ),
    "decode_bound": Rule(
        "Decoding bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "More replicas or tensor parallelism, speculative decoding. Shorter responses change what is "
        "trained.",
        ("critical_path", "token_rates"),
        categories=("decode",),
        least=0.5,
        dominates=True,
        without=(
            *("tail", "slow_replica", "slow_worker", "small_batches", "long_prompts"),
            *("skewed_routing", "few_at_once", "retractions"),
        ),
    ),
    "engine_bound": Rule(
        "Generate calls bound the step: {lost_s} per step ({lost_share}) of the critical path. Whether they "
        "queue, prefill or decode was not recorded (profiler.events.engine_timing).",
        "Record them: profiler.events.engine_timing=true (SGLang, vLLM), unless events.exclude has engine.",
        ("critical_path", "slowest_requests"),
        categories=("engine",),
        least=0.5,
        dominates=True,
        without=("tail", "slow_worker"),
        fixes=("engine_timing",),
    ),
    "trainer_bound": Rule(
        "{who} bounds the step: {lost_s} per step ({lost_share}) of the critical path.",
        "Larger micro-batches (dynamic batch sizes: actor.use_dynamic_bsz), sequence packing, more ranks.",
        ("critical_path", "worker_phases"),
        categories=("update_actor", "update_critic", "old_log_prob", "ref", "values"),
        least=0.5,
        dominates=True,
        without=("slow_ranks", "stalled_step", "uneven_tokens", "uneven_times"),
    ),
    "work": Rule(
        "The rest is work: {reason}.",
        "",
        ("critical_path", "what_if"),
        least=math.inf,
        dominates=True,
    ),
    "pool_work": Rule(
        "The rest of the trainer's time is work: {reason}.",
        "",
        ("bubble_ledger",),
        least=math.inf,
        dominates=True,
        pooled=True,
    ),
    "split_off": Rule(
        "The device split is unbalanced: {who}.",
        "{reason} trainer.n_gpus_per_node, trainer.nnodes and the rollout's settings of these names determine the split.",
        ("bubble_ledger",),
        categories=("waiting_for_samples",),
        least=0.05,
        pooled=True,
        without=_OF_ROLLOUT,
    ),
    "too_stale": Rule(
        "{lost_share} of the trained tokens are more than 2 weight versions behind; largest cause: {who}.",
        "Fewer samples in flight: fewer num_warmup_batches, a smaller staleness_threshold.",
        ("staleness",),
        least=0.1,
        pooled=True,
    ),
    "waits_for_rollout": Rule(
        "The trainer waits {lost_s} per step for samples, {lost_share} of its time.",
        "A faster rollout, such as more replicas{reason}; or more samples in flight (num_warmup_batches, or "
        "staleness_threshold with a rollouter), which makes them staler and changes what is trained.",
        ("bubble_ledger",),
        categories=("waiting_for_samples",),
        least=0.05,
        fixes=("hybrid_switch",),
        pooled=True,
        without=_OF_ROLLOUT,
    ),
    "waits_for_trainer": Rule(
        "The rollout's devices are idle for {lost_s} per step, {lost_share} of their time, because "
        "no more samples are dispatched.",
        "More devices for the trainer; larger micro-batches (actor.use_dynamic_bsz).",
        ("bubble_ledger",),
        least=0.1,
        dominates=True,
        pooled=True,
    ),
    "waits_in_turn": Rule(
        "Trainer and rollout alternately wait for each other, the trainer {lost_s} per step.",
        "More samples in flight: a larger num_warmup_batches, or staleness_threshold with a rollouter. They are "
        "staler, which changes what is trained.",
        ("bubble_ledger", "staleness"),
        categories=("waiting_for_samples",),
        least=0.05,
        pooled=True,
        without=_OF_ROLLOUT,
    ),
    "sync_bound": Rule(
        "The weight sync stops the trainer for {lost_s} per step, {lost_share} of its time.",
        "A faster rollout.checkpoint_engine; larger buckets (update_weights_bucket_megabytes). A larger "
        "parameter_sync_step makes samples staler, which changes what is trained.",
        ("bubble_ledger", "weight_transfers"),
        categories=("weight_sync",),
        least=0.1,
        pooled=True,
        without=("weight_sync",),
    ),
    "stale_samples": Rule(
        "{lost_share} of the generating devices' time, {lost_s} per step, is spent on samples that "
        "are dropped, while the trainer waits.",
        "Fewer warm-up batches; a larger max_off_policy_threshold, or max_off_policy_strategy=wait. Each changes "
        "which samples are trained.",
        ("bubble_ledger", "staleness"),
        categories=("generating_dropped",),
        least=0.05,
        pooled=True,
    ),
    "wasted_aborts": Rule(
        "{lost_share} of the generating devices' time, {lost_s} per step, is lost to aborted calls, "
        "while the trainer waits.",
        "Engines that keep the tokens of an aborted call. A larger parameter_sync_step makes samples staler, "
        "which changes what is trained.",
        ("bubble_ledger", "staleness"),
        categories=("generating_aborted",),
        least=0.05,
        pooled=True,
    ),
}
