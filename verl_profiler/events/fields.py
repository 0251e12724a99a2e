"""Every field of events, headers and captures: type, unit, events and one sentence.

The reader's columns, the schemas of tables and the site's list of fields come from these tables, and
tests compare them with what is recorded.  Both halves may import this; it needs
no other package.  Over 400 lines, as it is one table with a row per field.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAPTURE", "FIELDS", "HEADER", "IDENTITY", "LINE", "Field", "fields_of"]


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        type: As JSON has it: string, integer, number, boolean, list or object.  Headers
            have null where a value is unknown or does not apply; events leave the key out.
        unit: Of numbers, which are then not negative; empty for counts, names and flags.
        doc: One sentence: what it is, and where it is from.
        events: The events that have it; of `FIELDS` only.
        column: Whether the reader makes a column of it; for fields of frequent events.
    """

    type: str
    unit: str
    doc: str
    events: tuple[str, ...] = ()
    column: bool = False


def _text(doc: str, *events: str, column: bool = False) -> Field:
    return Field("string", "", doc, events, column)


def _count(doc: str, *events: str, column: bool = False) -> Field:
    return Field("integer", "", doc, events, column)


def _flag(doc: str, *events: str) -> Field:
    return Field("boolean", "", doc, events)


def _number(doc: str, *events: str, column: bool = False) -> Field:
    return Field("number", "", doc, events, column)


def _object(doc: str, *events: str) -> Field:
    return Field("object", "", doc, events)


def _list(doc: str, *events: str) -> Field:
    return Field("list", "", doc, events)


def _bytes(doc: str, *events: str, column: bool = False) -> Field:
    return Field("integer", "bytes", doc, events, column)


def _seconds(doc: str, *events: str, column: bool = False) -> Field:
    return Field("number", "s", doc, events, column)


def _ns(doc: str) -> Field:
    return Field("integer", "ns", doc)


# The keys of a line.
LINE = {
    "timestamp": _text("End of the interval, UTC."),
    "event": _text(
        "Name of the event, from the vocabulary, from verl's timers or from the user's code."
    ),
    "duration_sec": _seconds("Length of the interval."),
    "extra": Field("object", "", "Identity and fields, below."),
    "workid": _count("Rank of the process."),
    "step": _count("verl's global step."),
}

# Keys of `extra` that any event may have.
IDENTITY = {
    "request_id": _text("Random id of one agent-loop run, created by verl."),
    "turn": _count("Number of the assistant turn, from 0."),
    "validate": _flag("Whether the request belongs to a validation."),
    "sample": _count("Index of the sample in the data set."),
    "session": _count("Number of the sample among those of its prompt."),
    "status": _text("`error`, `cancelled` or `unfinished`; absent when the call returned."),
    "error": _text("Name of the exception's type; never its message."),
    "sampled": _count(
        "How many calls the recorded one stands for, where details are sampled; absent for 1."
    ),
}

_TRACED = (
    "tq_put",
    "tq_get",
    "tq_function",
    "tq_function_get",
    "tq_function_compute",
    "tq_function_put",
)

_OF_REPLICAS = (
    "replica_pool",
    "weight_sync",
    "pool_switch",
    "replicas_join",
    "replicas_leave",
    "abort_replicas",
    "resume_replicas",
    "sleep_replicas",
)
_ENGINE_CALLS = ("engine_call", "engine_attempt", "engine_request")
_SAMPLE_ENDS = ("sample_consumed", "sample_dropped")

# Keys of `extra` by name: what it is, and the events that have it.
FIELDS = {
    "aborted": _count(
        "Requests in the engine server when the abort was requested.", "engine_abort"
    ),
    "aborted_tokens": _count(
        "Response tokens of attempts that were then aborted; verl keeps them.",
        "engine_call",
        column=True,
    ),
    "accepted_draft_tokens": _count(
        "Draft tokens that the model accepted, with speculative decoding.",
        "engine_request",
        "engine_state",
    ),
    "agent": _text(
        "Name of the agent loop, from the data set or the config.", "request", column=True
    ),
    "allocated_bytes": _bytes("Device memory that torch's allocator has given out.", "memory"),
    "at": _text("verl's name of its memory checkpoint.", "memory"),
    "attempt": _count(
        "Number of the attempt of a generate call, from 0; for a pause, that of the preceding attempt.",
        "engine_attempt",
        "parked",
        "server_acquire",
        column=True,
    ),
    "attempts": _count(
        "Attempts of the generate call, or of all calls of a request; only if one was aborted.",
        "engine_call",
        "request",
        column=True,
    ),
    "backend": _text("Name of the checkpoint engine.", "weight_sync"),
    "begin_error_s": _seconds("Error bound of the stall's recorded start.", "event_loop_lag"),
    "buckets": _count(
        "Number of buckets: of the sync, or that the event stands for; absent for one.",
        "weight_send",
        "weight_receive",
        "weight_transfer",
        "weight_bucket",
        "weight_load",
    ),
    "busy_s": _seconds(
        "Time of the iterations, each until the next one's message; gaps in which the engine idled are "
        "left out.",
        "engine_iterations",
    ),
    "bytes": _bytes("Written to event files.", "profiler_cost"),
    "cached_tokens": _count(
        "Prompt tokens found in the engine's cache.", "engine_request", column=True
    ),
    "cached_host_tokens": _count(
        "Prompt tokens among the cached ones that came from host memory or storage; absent if none.",
        "engine_request",
    ),
    "call": _text(
        "Id of one call, unique across processes: random digits, pid and a number.",
        *_TRACED,
        column=True,
    ),
    "capacity": _count("Maximum number of prompts in it; absent if unlimited.", "queue_depth"),
    "compute_s": _seconds(
        "Time of the function's own work; of a batch, the time that verl's MFU refers to.",
        "reward_score",
        "tq_function",
        "batch_flops",
    ),
    "components": _object(
        "Sums of the request's details by component, in seconds; only where details are sampled.",
        "request",
    ),
    "consumed_step": _count(
        "verl's global step that trained on the sample.", "sample_consumed", column=True
    ),
    "conversation": _text(
        "verl's id by which a conversation keeps its replica, of a call without a request; with "
        "uni-agent that of the session.",
        "engine_call",
    ),
    "context_tokens": _count(
        "KV cache of the requests that decoded, in tokens, summed over the iterations.",
        "engine_iterations",
    ),
    "decode_requests": _count(
        "Requests that decoded, summed over the iterations.", "engine_iterations"
    ),
    "decode_s": _seconds(
        "Time of decoding, as the engine reports it.", "engine_request", column=True
    ),
    "device": _count("Number of the device on its host, as its library counts.", "device"),
    "device_s": _seconds(
        "Time on the device: of a call, from when its stream reached the call's begin until it had done its "
        "work; of iterations, their forward passes as SGLang reports them (`wall_time`), measured by CUDA "
        "events on a GPU and by a clock on a CPU.",
        "device_time",
        "engine_iterations",
    ),
    "devices": _count(
        "Devices of the process, or of a pool's replicas together.",
        "memory_release",
        "memory_resume",
        "replica_pool",
    ),
    "decode_tokens": _count(
        "Tokens that the engine generated since its previous line (vLLM).", "engine_state"
    ),
    "dp_rank": _count(
        "Data-parallel rank of the engine that served the request, or reports.",
        "engine_request",
        "engine_state",
        "engine_iterations",
    ),
    "draft_tokens": _count(
        "Tokens that the draft model proposed, with speculative decoding.",
        "engine_request",
        "engine_state",
    ),
    "dropped": _count("Events that were dropped.", "profiler_cost"),
    "dropped_step": _count(
        "verl's global step during which the samples were dropped.", "sample_dropped"
    ),
    "during": _text(
        "What ran while the loop was stalled: the probed event, else the function.",
        "event_loop_lag",
        column=True,
    ),
    "e2e_s": _seconds(
        "Time in the engine, as the engine reports it.", "engine_request", column=True
    ),
    "engine_calls": _count(
        "Number of generate calls; in a request's line only where details are sampled.", "request"
    ),
    "engine_request_id": _text(
        "Random id of one generate call, created by verl.",
        *_ENGINE_CALLS,
        "engine_parked",
        column=True,
    ),
    "events": _count("Events that were written.", "profiler_cost"),
    "fields": _count(
        "Number of fields of the samples; not their names.", "tq_put", "tq_get", column=True
    ),
    "failed": _count("Prompts with a failed request.", "queue_depth"),
    "file": _text(
        "Base name of that function's file; never its folder or contents.", "event_loop_lag"
    ),
    "finish_reason": _text(
        "Why generation ended: `stop`, `length`, `abort`, …; an engine server names aborts only.",
        *_ENGINE_CALLS,
        column=True,
    ),
    "forward_only": _flag("Whether the pass has no backward.", "forward_backward", "batch_flops"),
    "func": _text(
        "Name of the traced function.",
        *_TRACED,
        column=True,
    ),
    "function": _text(
        "Module and name of the user's function that blocked the loop, where `during` is a probed call; never its arguments.",
        "event_loop_lag",
    ),
    "generated_tokens": _count(
        "Tokens of the response that the model generated; not the tokens.", "request", column=True
    ),
    "get_s": _seconds("Time of getting data out of the queue.", "tq_function"),
    "host_s": _seconds("Length of the call on the host.", "device_time"),
    "host_used_after_bytes": _bytes(
        "Host memory in use on the machine, after.", "memory_release", "memory_resume"
    ),
    "host_used_before_bytes": _bytes(
        "Host memory in use on the machine, before.", "memory_release", "memory_resume"
    ),
    "in_flight": _count(
        "Generate calls on the chosen replica before this one, as verl counts them.",
        "server_route",
    ),
    "innermost": _text(
        "Module and name of the innermost Python function that blocked the loop.", "event_loop_lag"
    ),
    "iterations": _count(
        "Iterations of the engine; of `engine_state` since its previous line (vLLM).",
        "engine_state",
        "engine_iterations",
    ),
    "kv_capacity_tokens": _count("Capacity of a scheduler's KV cache, in tokens.", "engine_state"),
    "kv_used_tokens": _count("Tokens of it in use, as the scheduler reports it.", "engine_state"),
    "least_in_flight": _count(
        "The same for the replica with the fewest; events have it only where it is less.",
        "server_route",
    ),
    "line": _count("Line of the file at which the function was seen first.", "event_loop_lag"),
    "loads": _list(
        "Generate calls in flight on each replica before this one, in the order of `servers`.",
        "server_route",
    ),
    "loop": _text("Name of the event loop's thread.", "event_loop_lag", column=True),
    "max_required_samples": _count("Limit of `staleness_samples`.", "dispatch_pause"),
    "max_weight_version": _count(
        "Newest weight version that generated its tokens; for a request, only if there were several.",
        "request",
        "engine_call",
        *_SAMPLE_ENDS,
        column=True,
    ),
    "memory_mhz": Field("integer", "MHz", "Clock of the device's memory.", ("device",)),
    "memory_utilization": Field(
        "integer",
        "%",
        "Share of the library's last sample period in which device memory was read or written.",
        ("device",),
    ),
    "metrics": _object(
        "What verl logs for the step: names and numbers; texts are left out.", "metrics"
    ),
    "min_weight_version": _count(
        "Oldest weight version that generated its tokens; for a request, only if there were several.",
        "request",
        "engine_call",
        *_SAMPLE_ENDS,
        column=True,
    ),
    "mini_batch": _count(
        "Which sampling of the step took it, from 0; only where a step samples several times.",
        "sample_consumed",
        column=True,
    ),
    "model": _flag("Whether the model is moved.", "load", "offload"),
    "of": _text(
        "What the tokens are of: `response`, `tool`, …; or the call that the time is of.",
        "token_merge",
        "device_time",
        column=True,
    ),
    "one_in": _count(
        "Details are written of one in so many requests, and of the slowest; 0 for these only.",
        "request",
    ),
    "op": _text("Name of the client's operation.", "tq_meta", column=True),
    "optimizer": _flag("Whether the optimizer is moved.", "load", "offload"),
    "output": _count(
        "Number of the agent loop's output, from 0; only for the second and later ones.",
        "sample_consumed",
        column=True,
    ),
    "partition": _text("Name of the queue's partition.", "tq_put", "tq_get", column=True),
    "pending": _count("Prompts whose requests have not begun.", "queue_depth"),
    "pool": _text(
        "Which replicas: `hybrid` (on the trainer's devices), `standalone` or `colocated`.",
        *_OF_REPLICAS,
    ),
    "prefill_requests": _count(
        "Requests that were prefilled, summed over the iterations.", "engine_iterations"
    ),
    "prefill_tokens": _count(
        "Prompt tokens that the engine computed, without those from its prefix cache; of "
        "`engine_state` since its previous line (vLLM).",
        "engine_state",
        "engine_iterations",
    ),
    "prefix_hit_tokens": _count("Those of `prefix_queried_tokens` found there.", "engine_state"),
    "prefix_queried_tokens": _count(
        "Prompt tokens looked up in the prefix cache since the previous line (vLLM).",
        "engine_state",
    ),
    "power_w": Field("integer", "W", "Power of the device.", ("device",)),
    "prefill_s": _seconds(
        "Time of prefill, as the engine reports it.", "engine_request", column=True
    ),
    "promised_tflops": Field(
        "number",
        "",
        "verl's peak rate of one device, in 1e12 FLOP/s; absent for devices that it does not know.",
        ("batch_flops",),
    ),
    "prompt_tokens": _count(
        "Length of the prompt in tokens, for a later attempt including the tokens generated before; not the prompt itself.",
        "request",
        *_ENGINE_CALLS,
        "sample_consumed",
        column=True,
    ),
    "prompts": _count("Number of prompts.", "dispatch"),
    "put_s": _seconds("Time of putting results into the queue.", "tq_function"),
    "queue": _text("Which queue: `replay_buffer`, `message_queue` or `rollouter`.", "queue_depth"),
    "queue_s": _seconds(
        "Time in the engine's queue, as the engine reports it.", "engine_request", column=True
    ),
    "ranks": _count("Ranks of the process group.", "batch_flops"),
    "ready": _count("Prompts whose requests have all ended.", "queue_depth"),
    "reason": _text(
        "Why: of a dispatch `step`, `warm_up`, `refill` or `reissue`; of dropped samples `stale`, "
        "`filtered`, `failed`, `surplus` or `queue_full`; of a pause `staleness_limit` or "
        "`queue_full`; of replicas what they are stopped or resumed for, "
        "`weight_sync`, `switch_to_trainer`, `switch_to_rollout`, or the trainer's hook: `init_end`, "
        "`step_begin`, `sample_end`, `step_end`, `validate_begin`, `switch_wait`; of a route `only_one` "
        "(replica), `sticky` (the request's earlier replica), `hash` (`full_determinism`) or "
        "`least_loaded`.",
        "dispatch",
        "dispatch_pause",
        "sample_dropped",
        "server_route",
        "pool_switch",
        "replicas_join",
        "replicas_leave",
        "abort_replicas",
        "resume_replicas",
        "sleep_replicas",
        "weight_sync",
    ),
    "reject": _flag(
        "Whether requests that arrive during the pause fail immediately instead of waiting.",
        "abort_replicas",
        "engine_abort",
    ),
    "replicas": _list(
        "Ranks of the replicas.",
        *_OF_REPLICAS,
    ),
    "reserved_bytes": _bytes("Device memory that torch's allocator holds.", "memory"),
    "response_tokens": _count(
        "Length of the response in tokens, for dropped samples in total; not the response itself.",
        "request",
        *_ENGINE_CALLS,
        "sample_dropped",
        "sample_consumed",
        column=True,
    ),
    "retracted_requests": _count(
        "Requests of `waiting_requests` that had decoded before: retracted ones.",
        "engine_iterations",
    ),
    "retractions": _count(
        "How often the engine took the request out of its batch to free KV cache, and computed it "
        "again (SGLang's `num_retractions`, vLLM's `num_preemptions`); absent if never.",
        "engine_request",
        "engine_state",
    ),
    "reward": _number("Score of the request.", "request", column=True),
    "rows": _count(
        "Number of samples.", "tq_put", "tq_get", "tq_meta", "tq_clear", "tq_function", column=True
    ),
    "rss_after_bytes": _bytes(
        "Host memory of the process, after.", "memory_release", "memory_resume"
    ),
    "rss_before_bytes": _bytes(
        "Host memory of the process, before.", "memory_release", "memory_resume"
    ),
    "rss_bytes": _bytes("Host memory of the process.", "memory"),
    "running": _count("Prompts whose requests run.", "queue_depth"),
    "running_limit": _count(
        "Maximum number of requests that a scheduler runs at once.", "engine_state"
    ),
    "running_requests": _count(
        "Requests in the running batch; of `engine_iterations` in the last iteration.",
        "engine_state",
        "engine_iterations",
    ),
    "samples": _count(
        "Number of samples that were delivered, or dropped.", "sample_wait", "sample_dropped"
    ),
    "score": _number(
        "What the reward function returned, if that is a number.",
        "reward",
        "reward_score",
        column=True,
    ),
    "sender": _flag("Whether the process sends the bucket.", "weight_bucket"),
    "sequences": _count(
        "Number of sequences of a batch, counted where its tokens are.",
        "train_batch",
        "infer_batch",
        "batch_flops",
    ),
    "server": _text(
        "Address or id of the chosen engine server: IP address and port with SGLang.",
        "server_acquire",
        "server_route",
        column=True,
    ),
    "servers": _list(
        "Replicas of the load balancer; in its first line, and where they have changed.",
        "server_route",
    ),
    "size_bytes": _bytes(
        "Size of the data; not the data itself.",
        "tq_put",
        "tq_get",
        "weight_send",
        "weight_receive",
        "weight_transfer",
        "weight_bucket",
        "weight_load",
        column=True,
    ),
    "slowed_by": _list(
        "Why its clocks are lowered: `power_cap`, `thermal`, `hardware_thermal`, `hardware_slowdown`, "
        "`power_brake`, `sync_boost`; empty if they are not, absent if the driver does not report it.",
        "device",
    ),
    "gap_s": _seconds(
        "Time since the reading before, where the process could not read for more than two periods.",
        "device",
    ),
    "sm_mhz": Field("integer", "MHz", "Clock of the device's multiprocessors.", ("device",)),
    "staleness_samples": _count(
        "Samples finished or started since the last sync, plus those left from before it.",
        "dispatch_pause",
    ),
    "tags": _list(
        "What is released or resumed: `kv_cache`, `weights`, …", "memory_release", "memory_resume"
    ),
    "temperature_c": Field("integer", "°C", "Temperature of the device.", ("device",)),
    "tensors": _count(
        "Number of tensors.", "weight_send", "weight_receive", "weight_transfer", "weight_load"
    ),
    "tflops": Field(
        "number",
        "",
        "verl's estimate for all ranks, in 1e12 FLOP/s, of a forward and a backward pass; absent for "
        "models that it does not know.",
        ("batch_flops",),
    ),
    "to": _text("Where replicas go: `rollout` or `trainer`.", "pool_switch"),
    "tokens": _count(
        "Number of tokens; not the tokens. Of a rank's batch, on one of the ranks that share it.",
        "prompt_build",
        "train_batch",
        "infer_batch",
        "batch_flops",
        column=True,
    ),
    "tool": _text(
        "Name of the tool as the model wrote it; neither its arguments nor its result.",
        "tool_call",
        "event_loop_lag",
        column=True,
    ),
    "tool_calls": _count(
        "Number of tool calls; in a request's line only where details are sampled.",
        "turn",
        "tool_parsing",
        "tool_execution",
        "request",
        column=True,
    ),
    "tool_tokens": _count(
        "Tokens of the response that tools returned; not the tokens.", "request", column=True
    ),
    "total_bytes": _bytes(
        "Memory of the device, or of the devices together.",
        "memory_release",
        "memory_resume",
        "memory",
    ),
    "trainer_devices": _count("Devices of the trainer's ranks.", "replica_pool"),
    "trainer_version": _count(
        "Weight version that the trainer had last synced to the replicas.",
        *_SAMPLE_ENDS,
        column=True,
    ),
    "trace_id": _text(
        "Random id shared by the samples of one submitted batch.",
        *_TRACED,
        column=True,
    ),
    "transfer_s": _seconds(
        "Sum of the buckets' times, of an event that stands for several.",
        "weight_bucket",
        "weight_load",
    ),
    "turns": _count("Number of turns of the request.", "request", column=True),
    "uid": _text(
        "Id of the prompt in its batch, created by verl; identifies a sample together with `session`.",
        "request",
        "request_start",
        "dispatch",
        *_SAMPLE_ENDS,
        "reward_score",
        column=True,
    ),
    "untensored_fields": _count(
        "Number of fields that are not tensors, whose size is unknown.",
        "tq_put",
        "tq_get",
        column=True,
    ),
    "used_after_bytes": _bytes(
        "Device memory in use by all processes, after.", "memory_release", "memory_resume"
    ),
    "used_before_bytes": _bytes(
        "Device memory in use by all processes, before.", "memory_release", "memory_resume"
    ),
    "used_bytes": _bytes("Device memory in use by all processes.", "memory", "device"),
    "utilization": Field(
        "integer",
        "%",
        "Share of the library's last sample period (NVML: 1/6 to 1 s) in which the device ran any kernel.",
        ("device",),
    ),
    "wait_s": _seconds(
        "Time from the call of the reward worker until the function began.", "reward_score"
    ),
    "waiting_requests": _count(
        "Requests in the waiting queues; of `engine_iterations` in the last iteration.",
        "engine_state",
        "engine_iterations",
    ),
    "waits": _flag(
        "Whether the function waits for calls of the same data in other processes.", "tq_function"
    ),
    "wanted": _count("Prompts that the trainer waits for.", "sampleable_wait"),
    "weight_version": _count(
        "Version of the weights: verl's global step after which they were synced.",
        "dispatch",
        "engine_attempt",
        "engine_request",
        "weight_sync",
        "weight_send",
        "weight_receive",
        "update_weights",
        "weight_transfer",
        column=True,
    ),
    "wrapper_cpu_s": _seconds("CPU time inside wrappers.", "profiler_cost"),
    "wrapper_s": _seconds("Time inside wrappers.", "profiler_cost"),
    "writer_cpu_s": _seconds("CPU time of the writer thread.", "profiler_cost"),
    "writer_s": _seconds("Time of the writer thread.", "profiler_cost"),
}

_CLOCK = {
    "clock.boot_id": _text("The kernel's random id of this boot."),
    "clock.wall_ns": _ns("Wall clock of the anchor."),
    "clock.monotonic_ns": _ns("Monotonic clock of the anchor."),
    "clock.uncertainty_ns": _ns("Maximum time between the two readings."),
    "clock.shared": _flag("Whether the anchor is the driver's."),
}

# processes/<name>.json; keys of objects with dots between.
HEADER = {
    "format": _count("Version of the event files."),
    "device_sampling.devices": Field(
        "list",
        "",
        "Devices that the process samples: number, UUID, PCI bus, model, memory in bytes, power limit in W.",
    ),
    "device_sampling.interval_s": _seconds("Time between two samples."),
    "device_sampling.library": _text("Library that reads them."),
    "devices": Field("list", "", "Devices that the process uses: UUID and PCI bus, or number."),
    "name": _text("Name of the process's files: role and rank, or role, host and pid."),
    "role": _text("Role of the process."),
    "rank": _count("Its rank."),
    "replica": _count("Its engine replica."),
    "host": _text("Host name."),
    "ip": _text("Address of the host, from older versions."),
    "pid": _count("Process id."),
    "ppid": _count("Process id of the parent."),
    "actor_name": _text("Ray's name of the actor."),
    "actor_class": _text("Class of the actor."),
    "python": _text("Version of Python."),
    "versions.*": _text("Versions of the packages that the process has imported."),
    **_CLOCK,
    "clock.last_wall_ns": _ns("Wall clock when the header was written."),
    "clock.last_monotonic_ns": _ns("Monotonic clock when the header was written."),
    "clock_exchange.boot_id": _text("The driver's boot id."),
    "clock_exchange.peers": Field(
        "list", "ns", "Boot id, host name and clock samples of the other nodes."
    ),
    "probes.installed.*": Field("list", "", "Functions of the host that are wrapped."),
    "probes.missed.*": _text("Why a probe is not installed."),
    "probes.hits.*": _count("Calls by probe."),
    "probes.errors.*": _count("Failures of a probe."),
    "counters.events": _count("Lines written."),
    "counters.own_events": _count("Lines added by the recorder itself."),
    "counters.bytes": _bytes("Written."),
    "counters.dropped": _count("Events that were dropped."),
    "counters.dropped_by.*": _count("Events that were dropped, by reason."),
    "counters.sampled_out": _count("Details of requests that were not chosen for them."),
    "counters.write_errors": _count("Writes that failed."),
    "counters.wrapper_s": _seconds("Time inside wrappers."),
    "counters.wrapper_cpu_s": _seconds("CPU time inside wrappers."),
    "counters.writer_s": _seconds("Time of the writer thread."),
    "counters.writer_cpu_s": _seconds("CPU time of the writer thread."),
    "steps": Field("list", "", "Steps with events of this process."),
    "started": _text("When recording began, UTC."),
    "updated": _text("When the header was written, UTC."),
    "ended": _text("When recording ended, UTC."),
    "end_reason": _text("Why it ended."),
    "directory": _text("The run directory, absolute."),
    "fallback": _text("Folder of the events if the run directory was not writable."),
    "flush_interval_s": _seconds("How often events reach the file."),
    "longest_flush_s": _seconds("Longest delay of a write beyond that interval."),
    "budget.max_bytes": _bytes("`profiler.events.max_gb`."),
    "budget.used_bytes": _bytes("Of it, by the process's event files."),
    "budget.halvings": _count(
        "How often the share of requests with details has been halved; null once there are none."
    ),
    "budget.refused": _count("Events for which there was no room."),
    "complete_until": _text("Until when the process's files are complete, UTC."),
    "written_events": _count("Lines written until then."),
    "written_bytes": _bytes("Of those lines."),
    "waiting_events": _count("Events that were not written then."),
    "dropped_events": _count("Events dropped until then."),
    "sampled_out_events": _count("Details of requests not chosen for them, until then."),
}

# nsight/captures.json, nsight/<capture>.json and nsight/journal/*.jsonl.
CAPTURE = {
    "capture": _count("In the journal: `number`."),
    "number": _count("Number of the capture in its process, from 1."),
    "role": _text("Role of the process."),
    "rank": _count("Its rank."),
    "host": _text("Host name."),
    "pid": _count("Process id."),
    "step": _count("verl's global step."),
    "task": _text("verl's name of the task."),
    "tool": _text("`nsys` or `torch`."),
    "begin_ns": _ns("When the capture began."),
    "end_ns": _ns("When it ended."),
    "file": _text("Name of the report."),
    "source": _text("Name that the tool gave to the report."),
    "size_bytes": _bytes("Size of the report."),
    "problem": _text("Problem with the report; may contain paths."),
}


def fields_of(event: str) -> tuple[str, ...]:
    """Return the keys of `extra` that an event has besides the identity."""
    return tuple(name for name, field in FIELDS.items() if event in field.events)
