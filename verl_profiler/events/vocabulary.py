"""The event files: names, fields, units and layout.  Imported by both halves.

A run directory holds `run.json`, `processes/<name>.json` (one header per process) and
`step_<N>/<name>.jsonl` (the events).  `docs/events.md` shows each of them in full.

`EVENTS` is the whole vocabulary.  A name that is not in it is either a timer of verl's trainer
(family `trainer`, parent `step`) or an event of the user's own code (family `user`).
Over 400 lines, as most of it is one table with a row per event.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

__all__ = [
    "COMPUTING_ROLES",
    "EVENTS",
    "FAMILIES",
    "FORMAT_VERSION",
    "LAG_THRESHOLD_S",
    "NVTX_DOMAIN",
    "PHASES",
    "RUN_FILE",
    "TRACKERS",
    "WORKER_ROLE",
    "Event",
    "Family",
    "process_name",
    "step_folder",
    "step_of_folder",
]

FORMAT_VERSION = 1

RUN_FILE = "run.json"

# The domain of all our NVTX ranges.
NVTX_DOMAIN = "verl_profiler"

# The loggers of verl to which a profile can be published.
TRACKERS = ("wandb", "tensorboard", "mlflow")

# Agent-loop workers keep the file name of the original logger: `worker_<rank>.jsonl`.
WORKER_ROLE = "agent_loop"

# These compute inside their event loops, which therefore stall by design.
COMPUTING_ROLES = ("actor", "critic", "ref", "rollout")

# Probe families, the names in `profiler.events.exclude`.
Family = Literal[
    "trainer",
    "rollout",
    "engine",
    "reward",
    "workers",
    "weights",
    "memory",
    "transfer_queue",
    "event_loop",
]
FAMILIES: tuple[Family, ...] = get_args(Family)

# Event-loop stalls of at least this length are recorded.
LAG_THRESHOLD_S = 0.02

# verl's own timing names, in the order in which a step runs them.
PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "update_weights",
    "testing",
)


class Event(msgspec.Struct, frozen=True):
    """One entry of the vocabulary.

    Args:
        family: The probe family that records it; `profiler` for the profiler's own accounts, `devices`
            for samples of devices, which need no probe.
        parent: The event that contains it, or None at the top.
        doc: One sentence for docs/events.md.
        instant: True when the line has no `duration_sec`.
    """

    family: str
    parent: str | None
    doc: str
    instant: bool = False


EVENTS: dict[str, Event] = {
    # trainer
    "step": Event("trainer", None, "One training step, verl's `timing_s/step`."),
    **{
        phase: Event("trainer", "step", f"The trainer's `timing_s/{phase}`.")
        for phase in PHASES
        if phase not in ("reward", "update_actor", "save_checkpoint", "update_weights", "testing")
    },
    "testing": Event("trainer", None, "Validation between steps, verl's `timing_s/testing`."),
    "init": Event("trainer", None, "Start-up: workers, engines and models are created."),
    "validation": Event("trainer", None, "One pass over the validation set."),
    "prepare_step": Event(
        "trainer", "step", "The trainer reads the next batch and passes it to the agent loops."
    ),
    "start_profile": Event("trainer", "step", "The captures of a step are started."),
    "stop_profile": Event("trainer", "step", "The captures of a step are ended."),
    "sample_wait": Event(
        "trainer",
        "gen",
        "The trainer waits in its queue for finished samples.",
    ),
    "sleep_replicas": Event("trainer", "gen", "The trainer puts the engines to sleep."),
    # asynchronous trainers: what becomes of a sample, and of the replicas
    "dispatch": Event(
        "trainer",
        None,
        "The trainer passed prompts to the agent loops, except those of a validation.",
        instant=True,
    ),
    "sample_consumed": Event(
        "trainer",
        None,
        "The trainer took a sample from its queue; `step` is the step that dispatched it.",
        instant=True,
    ),
    "sample_dropped": Event(
        "trainer",
        None,
        "The queue removed all samples of a prompt untrained; `step` is the step that dispatched it.",
        instant=True,
    ),
    "queue_depth": Event(
        "trainer",
        None,
        "Prompts in the replay buffer by state, at each poll after which the numbers differ; or "
        "those in the message queue or the rollouter, at each change.",
        instant=True,
    ),
    "sampleable_wait": Event(
        "trainer", "sample_wait", "The trainer polls until enough prompts are ready."
    ),
    "switch_wait": Event(
        "trainer",
        "prepare_step",
        "The trainer's `timing_s/switch_wait`: its replicas generate until enough prompts are ready.",
    ),
    "wait_for_enough_samples": Event(
        "trainer",
        "step",
        "The trainer's `timing_s/wait_for_enough_samples`: its replicas generate until enough are ready.",
    ),
    "switch_to_trainer": Event(
        "trainer",
        "step",
        "The trainer's `timing_s/switch_to_trainer`, with its `pool_switch` inside.",
    ),
    "switch_to_rollout": Event(
        "trainer",
        "step",
        "The trainer's `timing_s/switch_to_rollout`, with its `pool_switch` inside.",
    ),
    "pool_switch": Event(
        "trainer", None, "Hybrid replicas are switched from training to generating, or back."
    ),
    "replica_pool": Event(
        "trainer", None, "Replicas that are synced together, and their devices.", instant=True
    ),
    "replicas_join": Event("trainer", None, "Replicas are added to the load balancer."),
    "replicas_leave": Event("trainer", None, "Replicas are removed from the load balancer."),
    "abort_replicas": Event(
        "trainer", None, "The trainer aborts all requests of replicas; they stay paused."
    ),
    "resume_replicas": Event("trainer", None, "The trainer resumes paused replicas."),
    "metrics": Event("trainer", None, "The numbers that verl logs for a step.", instant=True),
    # rollout: one request is one agent-loop run of one sample
    "generate_async": Event(
        "rollout",
        None,
        "The one-step-off trainer's `timing_s/generate_async`: the agent loops generate a batch "
        "while the trainer works on the previous one.",
    ),
    "dispatch_pause": Event(
        "rollout",
        None,
        "The rollouter dispatches no samples, because a limit is reached.",
    ),
    "request_start": Event(
        "rollout",
        None,
        "An agent loop starts; its `request` line follows when it ends.",
        instant=True,
    ),
    "request": Event(
        "rollout",
        None,
        "One agent-loop run of one sample, from its start until its result is stored.",
    ),
    "agent_loop": Event("rollout", "request", "The conversation: all turns of the request."),
    "prompt_build": Event("rollout", "agent_loop", "The first prompt is tokenized."),
    "turn": Event(
        "rollout",
        "agent_loop",
        "One assistant turn: an engine call and the tool calls that it requests.",
    ),
    "engine_call": Event(
        "rollout",
        "turn",
        "One generate call as measured in the agent loop, including transport and queueing.",
    ),
    "engine_attempt": Event(
        "rollout",
        "engine_call",
        "One attempt of a generate call that was aborted; a call without such lines is its only attempt.",
    ),
    "parked": Event(
        "rollout", "engine_call", "The pause of an aborted generate call before its next attempt."
    ),
    "server_acquire": Event("rollout", "engine_call", "The load balancer chooses a replica."),
    "server_route": Event(
        "rollout",
        None,
        "The load balancer chose a replica for a generate call; in its process.",
        instant=True,
    ),
    "token_merge": Event("rollout", "turn", "New tokens are merged into the conversation."),
    "tool_parsing": Event("rollout", "turn", "Tool calls are read from the response."),
    "tool_execution": Event(
        "rollout", "turn", "All tool calls of a turn, from the first start to the last end."
    ),
    "tool_call": Event("rollout", "tool_execution", "One execution of one tool."),
    "postprocess": Event(
        "rollout", "request", "The result is scored, converted to tensors and stored."
    ),
    "reward": Event(
        "rollout",
        "postprocess",
        "The agent loop's wait for the reward of one request; in the trainer's files, "
        "`timing_s/reward`.",
    ),
    # reward workers
    "reward_score": Event(
        "reward",
        "reward",
        "A reward worker scores a sample: it waits for a thread, and runs the reward function.",
    ),
    # engine servers
    "engine_state": Event(
        "engine",
        None,
        "Load of an engine as reported by its scheduler; only with `profiler.events.engine_state`, "
        "and only when it changed; for vLLM also its work since the previous line, and in captured steps a "
        "line for each iteration.",
        instant=True,
    ),
    "engine_iterations": Event(
        "engine",
        None,
        "Consecutive iterations of an SGLang scheduler, at least 100 ms of them or until it idles; in "
        "captured steps a single one; only with `profiler.events.engine_iterations`.",
    ),
    "engine_request": Event(
        "engine",
        "engine_call",
        "One generate call inside the engine server.",
    ),
    "engine_parked": Event(
        "engine",
        "engine_request",
        "A request waits in a paused engine server for the end of the pause.",
    ),
    "engine_abort": Event(
        "engine", None, "An engine server aborts its requests; it stays paused from here on."
    ),
    "engine_resume": Event("engine", None, "A paused engine server accepts requests again."),
    "memory_release": Event("weights", None, "An engine releases memory."),
    "memory_resume": Event("weights", None, "An engine allocates memory again."),
    # trainer workers
    "update_actor": Event(
        "workers", None, "One rank's actor update; in the trainer's files, `timing_s/update_actor`."
    ),
    "compute_log_prob": Event("workers", None, "One rank's log-probabilities of the actor."),
    "compute_ref_log_prob": Event(
        "workers", None, "One rank's log-probabilities of the reference."
    ),
    "train_mini_batch": Event("workers", "update_actor", "The mini-batches of one update."),
    "train_batch": Event("workers", "train_mini_batch", "One mini-batch."),
    "infer_batch": Event("workers", "compute_log_prob", "A forward pass over a batch."),
    "forward_backward": Event("workers", "train_batch", "Forward and, when training, backward."),
    "batch_flops": Event(
        "workers",
        "train_batch",
        "Tokens of a batch over all ranks, and its FLOPs as verl's FlopsCounter estimates them.",
        instant=True,
    ),
    "device_time": Event(
        "workers",
        None,
        "Time on the device of a call, by two CUDA events in its stream; written at a later call.",
        instant=True,
    ),
    "optimizer_step": Event("workers", "train_batch", "The optimizer's step."),
    "load": Event("workers", None, "Model or optimizer is moved to the device."),
    "offload": Event("workers", None, "Model or optimizer is moved to host memory."),
    "save_checkpoint": Event(
        "workers",
        None,
        "One rank's part of a checkpoint; in the trainer's files, `timing_s/save_checkpoint`.",
    ),
    "load_checkpoint": Event("workers", None, "One rank reads a checkpoint."),
    "update_weights": Event(
        "weights",
        None,
        "One rank's part of the weight sync; in the trainer's files, `timing_s/update_weights`.",
    ),
    "weight_transfer": Event(
        "weights", "update_weights", "The weights are transferred from trainer to engine."
    ),
    "weight_sync": Event(
        "weights",
        None,
        "The trainer syncs the weights to a pool of replicas, from abort to resume.",
    ),
    "weight_group": Event(
        "weights", "weight_sync", "Senders and receivers form the group of a checkpoint engine."
    ),
    "weight_send": Event(
        "weights",
        "update_weights",
        "A trainer's rank sends the weights through a checkpoint engine.",
    ),
    "weight_receive": Event(
        "weights",
        "update_weights",
        "A replica's rank receives the weights through a checkpoint engine and passes them to its engine.",
    ),
    "weight_bucket": Event(
        "weights",
        "weight_send",
        "One bucket of a checkpoint engine, in a sender or in a receiver, with the time until all "
        "take part; or all buckets of a sync after its first 64.",
    ),
    "weight_load": Event(
        "weights",
        "weight_transfer",
        "One bucket is passed to an SGLang engine; or all buckets of a sync after its first 64.",
    ),
    "memory": Event(
        "memory",
        None,
        "Device memory at one of verl's own checkpoints.",
        instant=True,
    ),
    # all devices of a host
    "device": Event(
        "devices",
        None,
        "A device's utilization, memory, power and clocks (`profiler.events.devices`), from one process per "
        "host; only when they changed, and at least every 10 s.",
        instant=True,
    ),
    # TransferQueue client
    "tq_put": Event(
        "transfer_queue",
        None,
        "Data is stored in the queue.",
    ),
    "tq_get": Event(
        "transfer_queue",
        None,
        "Data is fetched from the queue.",
    ),
    "tq_meta": Event("transfer_queue", None, "A metadata query to the controller."),
    "tq_clear": Event("transfer_queue", None, "Samples are removed."),
    "tq_function": Event(
        "transfer_queue",
        None,
        "One call of a traced function, with its time by stage.",
    ),
    **{
        f"tq_function_{stage}": Event("transfer_queue", "tq_function", doc)
        for stage, doc in (
            ("get", "The function's data is fetched from the queue."),
            ("compute", "The function's own work."),
            ("put", "The function's results are stored in the queue."),
        )
    },
    # any asyncio process
    "event_loop_lag": Event(
        "event_loop",
        None,
        "The event loop was blocked: from its last known activity until an overdue timer ran.",
    ),
    # the profiler itself
    "profiler_cost": Event(
        "profiler",
        None,
        "The profiler's own cost in this process and step since its previous line.",
        instant=True,
    ),
}


_STEP_FOLDER = re.compile(r"step_([0-9]{1,18})")


def step_folder(step: int) -> str:
    """Name the folder of a step's events: `step_12`."""
    return f"step_{step}"


def step_of_folder(name: str) -> int | None:
    """Return the step of a folder with this name; None if it is no folder of a step."""
    match = _STEP_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


def process_name(role: str, rank: int | None, host: str, pid: int) -> str:
    """Name a process's files: `worker_0`, `actor_1`, `engine_0`, or by host and pid without a rank."""
    if rank is None:
        return f"{role}_{host}_{pid}"
    return f"{'worker' if role == WORKER_ROLE else role}_{rank}"
