"""Every field that is recorded: type, unit and one sentence.  docs/privacy.md is made of these tables.

    python -m verl_profiler.events.fields > docs/privacy.md

`events.vocabulary.EVENTS` has which events a field comes with.  Both halves may import this; it needs no other
package.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiler.events.vocabulary import EVENTS

__all__ = ["CAPTURE", "FIELDS", "HEADER", "IDENTITY", "LINE", "RUN", "Field", "page"]


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        type: As JSON has it: string, integer, number, boolean, list or object.
        unit: Of numbers; empty for counts, names and flags.
        doc: One sentence: what it is, and where it is from.
    """

    type: str
    unit: str
    doc: str


def _text(doc: str) -> Field:
    return Field("string", "", doc)


def _count(doc: str) -> Field:
    return Field("integer", "", doc)


def _flag(doc: str) -> Field:
    return Field("boolean", "", doc)


def _bytes(doc: str) -> Field:
    return Field("integer", "bytes", doc)


def _seconds(doc: str) -> Field:
    return Field("number", "s", doc)


def _ns(doc: str) -> Field:
    return Field("integer", "ns", doc)


# The keys of a line.
LINE = {
    "timestamp": _text("End of the interval, UTC."),
    "event": _text("Its name, from the vocabulary, from verl's timers or from the user's code."),
    "duration_sec": _seconds("Length of the interval."),
    "extra": Field("object", "", "Identity and fields, below."),
    "workid": _count("Rank of the process."),
    "step": _count("verl's global step."),
}

# Keys of `extra` that any event may have.
IDENTITY = {
    "request_id": _text("Random id of one agent-loop run, made by verl."),
    "turn": _count("Number of the assistant turn, from 0."),
    "validate": _flag("Whether the request belongs to a validation."),
    "sample": _count("Index of the sample in the data set."),
    "session": _count("Which of the samples of one prompt."),
    "status": _text("`error`, `cancelled` or `unfinished`; absent when the call returned."),
    "error": _text("Name of the exception's type; never its message."),
}

# Keys of `extra` by name; `EVENTS` has the events.
FIELDS = {
    "agent": _text("Name of the agent loop, from the data set or the config."),
    "allocated_bytes": _bytes("Device memory that torch's allocator has given out."),
    "at": _text("Which of verl's memory checkpoints, in verl's words."),
    "begin_error_s": _seconds("How far from its recorded begin the stall may have begun."),
    "bytes": _bytes("Written to event files."),
    "cached_tokens": _count("Prompt tokens that the engine had in its cache."),
    "call": _text("Id of one call in all processes: random digits, pid and a number."),
    "compute_s": _seconds("Time of the function's own work."),
    "decode_s": _seconds("Time of decoding, as the engine reports it."),
    "devices": _count("Devices of the process."),
    "dropped": _count("Events that were dropped."),
    "during": _text("What ran while the loop stood still: the probed event, else the function."),
    "e2e_s": _seconds("Time in the engine, as the engine reports it."),
    "engine_request_id": _text("Random id of one generate call, made by verl."),
    "events": _count("Events that were written."),
    "fields": _count("Number of fields of the samples; not their names."),
    "file": _text("Base name of that function's file; never its folder or contents."),
    "finish_reason": _text("Why generation ended: `stop`, `length`, …"),
    "forward_only": _flag("Whether the pass has no backward."),
    "func": _text("Name of the traced function."),
    "function": _text(
        "Module and name of the user's function that held the loop, where `during` is a probed call; never its arguments."
    ),
    "generated_tokens": _count("Tokens of the response that the model generated; not the tokens."),
    "get_s": _seconds("Time of getting data out of the queue."),
    "host_used_after_bytes": _bytes("Host memory in use on the machine, after."),
    "host_used_before_bytes": _bytes("Host memory in use on the machine, before."),
    "host_used_bytes": _bytes("Host memory in use on the machine."),
    "innermost": _text("Module and name of the innermost Python function that held the loop."),
    "line": _count("Line of the file at which the function was seen first."),
    "loop": _text("Name of the event loop's thread."),
    "metrics": Field(
        "object", "", "What verl logs for the step: names and numbers; texts are left out."
    ),
    "model": _flag("Whether the model is moved."),
    "of": _text("What the tokens are of: `response`, `tool`, …"),
    "op": _text("Name of the client's operation."),
    "optimizer": _flag("Whether the optimizer is moved."),
    "partition": _text("Name of the queue's partition."),
    "prefill_s": _seconds("Time of prefill, as the engine reports it."),
    "prompt_tokens": _count("Length of the prompt in tokens; not the prompt."),
    "put_s": _seconds("Time of putting results into the queue."),
    "queue_s": _seconds("Time in the engine's queue, as the engine reports it."),
    "reserved_bytes": _bytes("Device memory that torch's allocator holds."),
    "response_tokens": _count("Length of the response in tokens; not the response."),
    "reward": Field("number", "", "Score of the request."),
    "rows": _count("Number of samples."),
    "rss_after_bytes": _bytes("Host memory of the process, after."),
    "rss_before_bytes": _bytes("Host memory of the process, before."),
    "rss_bytes": _bytes("Host memory of the process."),
    "samples": _count("Number of samples that were handed over."),
    "score": Field("number", "", "What the reward function returned, if that is a number."),
    "server": _text("Address or id of the chosen engine server: IP address and port with SGLang."),
    "size_bytes": _bytes("Size of the data; not the data."),
    "tags": Field("list", "", "What is released or resumed: `kv_cache`, `weights`, …"),
    "tokens": _count("Number of tokens; not the tokens."),
    "tool": _text("Name of the tool as the model wrote it; neither its arguments nor its result."),
    "tool_calls": _count("Number of tool calls."),
    "tool_tokens": _count("Tokens of the response that tools returned; not the tokens."),
    "total_bytes": _bytes("Memory of the device, or of the devices together."),
    "trace_id": _text("Random id that samples of one submitted batch have in common."),
    "turns": _count("Number of turns of the request."),
    "uid": _text("Random id of the prompt in its batch, made by verl."),
    "untensored_fields": _count("Number of fields that are no tensors, whose size is not known."),
    "used_after_bytes": _bytes("Device memory in use by all processes, after."),
    "used_before_bytes": _bytes("Device memory in use by all processes, before."),
    "used_bytes": _bytes("Device memory in use by all processes."),
    "wait_s": _seconds("Time from the call of the reward worker until the function began."),
    "waits": _flag("Whether the function waits for calls of the same data in other processes."),
    "weight_version": _count("Version of the weights."),
    "wrapper_cpu_s": _seconds("Time on a core inside wrappers."),
    "wrapper_s": _seconds("Time inside wrappers."),
    "writer_cpu_s": _seconds("Time on a core of the writer thread."),
    "writer_s": _seconds("Time of the writer thread."),
}

_CLOCK = {
    "clock.boot_id": _text("The kernel's random id of this boot."),
    "clock.wall_ns": _ns("Wall clock of the anchor."),
    "clock.monotonic_ns": _ns("Monotonic clock of the anchor."),
    "clock.uncertainty_ns": _ns("How far the two readings may be apart."),
    "clock.shared": _flag("Whether the anchor is the driver's."),
}

# processes/<name>.json; keys of objects with dots between.
HEADER = {
    "format": _count("Version of the event files."),
    "name": _text("Name of the process's files: role and rank, or role, host and pid."),
    "role": _text("Role of the process."),
    "rank": _count("Its rank."),
    "replica": _count("Its engine replica."),
    "host": _text("Host name; recorded also with `profiler.record_command: false`."),
    "ip": _text("Address of the host, from older versions."),
    "pid": _count("Process id."),
    "ppid": _count("Process id of the parent."),
    "actor_name": _text("Name that Ray has for the actor."),
    "actor_class": _text("Class of the actor."),
    "python": _text("Version of Python."),
    "versions.*": _text("Versions of the packages that the process has imported."),
    **_CLOCK,
    "clock.readings": Field("list", "ns", "Later readings of both clocks."),
    "clock.last_wall_ns": _ns("Wall clock when the header was written."),
    "clock.last_monotonic_ns": _ns("Monotonic clock when the header was written."),
    "clock_exchange.boot_id": _text("The driver's boot id."),
    "clock_exchange.peers": Field(
        "list", "ns", "Boot id, host name and clock samples of the other nodes."
    ),
    "probes.installed.*": Field("list", "", "Functions of the host that are wrapped."),
    "probes.missed.*": _text(
        "Why a probe is not installed; an exception's text, with credentials masked."
    ),
    "probes.hits.*": _count("Calls by probe."),
    "probes.errors.*": _count("Failures of a probe."),
    "counters.events": _count("Lines written."),
    "counters.own_events": _count("Lines that the recorder made itself."),
    "counters.bytes": _bytes("Written."),
    "counters.dropped": _count("Events that were dropped."),
    "counters.dropped_by.*": _count("Events that were dropped, by reason."),
    "counters.write_errors": _count("Writes that failed."),
    "counters.wrapper_s": _seconds("Time inside wrappers."),
    "counters.wrapper_cpu_s": _seconds("Time on a core inside wrappers."),
    "counters.writer_s": _seconds("Time of the writer thread."),
    "counters.writer_cpu_s": _seconds("Time on a core of the writer thread."),
    "steps": Field("list", "", "Steps that the process has events of."),
    "started": _text("When recording began, UTC."),
    "updated": _text("When the header was written, UTC."),
    "ended": _text("When recording ended, UTC."),
    "end_reason": _text("Why it ended."),
    "directory": _text("The run directory, absolute. ¹"),
    "fallback": _text("Where events went when the run directory could not be written."),
    "flush_interval_s": _seconds("`profiler.events.flush_interval_s`."),
    "longest_flush_s": _seconds("Longest time between two writes beyond that."),
    "complete_until": _text("Until when the process's files are complete, UTC."),
    "written_events": _count("Lines written until then."),
    "written_bytes": _bytes("Of those lines."),
    "waiting_events": _count("Events that were not written then."),
    "dropped_events": _count("Events dropped until then."),
}

# run.json.
RUN = {
    "format": _count("Version of the event files."),
    "experiment": _text("Name of the run directory."),
    "launched": _text("When, UTC."),
    "host": _text("Host name of the driver. ¹"),
    "pid": _count("Process id of the driver."),
    "command": Field("list", "", "The command line, with its overrides; credentials masked. ¹"),
    "cwd": _text("Directory of the command. ¹"),
    "versions.*": _text("Versions of Python, verl, Ray, torch, engines and this package."),
    "settings.*": Field(
        "object",
        "",
        "The settings under `profiler:`, credentials masked; ¹ `output_dir`, `nsight.directory`, "
        "`nsight.options` and `memory_saver.environment`.",
    ),
    "training.model": _text("`actor_rollout_ref.model.path`, credentials masked. ¹ Its last part."),
    "training.rollout": _text("Name of the engine."),
    "training.rollout_n": _count("Samples per prompt."),
    "training.tensor_model_parallel_size": _count("Of the rollout."),
    "training.agent_workers": _count("Number of agent-loop workers."),
    "training.agent_loop": _text("Name of the default agent loop."),
    "training.strategy": _text("`fsdp`, `fsdp2`, `megatron`."),
    "training.train_batch_size": _count("Prompts per step."),
    "training.max_prompt_length": _count("Tokens."),
    "training.max_response_length": _count("Tokens."),
    "training.nnodes": _count("Nodes."),
    "training.n_gpus_per_node": _count("GPUs of each."),
    "training.use_v1": _flag("Which of verl's trainers."),
    "training.project_name": _text("`trainer.project_name`."),
    "training.experiment_name": _text("`trainer.experiment_name`."),
    "training.memory.*": Field(
        "object", "", "What the memory saver does in this run: flags and shares."
    ),
    **_CLOCK,
}

# nsight/captures.json, nsight/<capture>.json and nsight/journal/*.jsonl.
CAPTURE = {
    "capture": _count("In the journal: which of the process's captures."),
    "number": _count("The same, from 1."),
    "role": _text("Role of the process."),
    "rank": _count("Its rank."),
    "host": _text("Host name."),
    "pid": _count("Process id."),
    "step": _count("verl's global step."),
    "task": _text("verl's name of the task."),
    "tool": _text("`nsys` or `torch`."),
    "begin_ns": _ns("When the capture began."),
    "end_ns": _ns("When it ended."),
    "silent": _flag("Whether nvtx and nsys record no range together."),
    "file": _text("Name of the report."),
    "source": _text("Name that the tool gave to the report."),
    "size_bytes": _bytes("Size of the report."),
    "problem": _text("What is wrong with it; may hold paths."),
}

_BEGIN = """\
# What is recorded

<!-- Generated: python -m verl_profiler.events.fields > docs/privacy.md -->

Everything that this package writes about a run, field by field.
It records times, counts, sizes, names and ids.
It does not record prompts, responses, token ids, tool arguments and results, samples, weights, gradients, or messages of exceptions that calls end with.
All of it stays in the run directory; only the sums `tq/*` of `profiler.transfer_queue` go to the loggers configured in verl.

Exceptions:

- Events of your own code (`span`, `log_manager.log`) contain what your code passes, unmasked.
- Reports of nsys and of the torch profiler contain what those tools record: command lines, environment variables, names of kernels and modules.
- A tool's name is recorded as the model wrote it, and the reason why a probe is not installed may quote an exception, masked.
- TransferQueue tracing prints lines to the console log.
- Hydra writes the overrides of the command, unmasked, to its own output directory (`hydra.run.dir`, or `outputs/…/.hydra`).

## Credentials

The following is replaced by `***` before `run.json`, headers and the messages of `collect` are written, and again in the report:

- values of keys that name a credential (`api_key`, `HF_TOKEN`, `--password`, `Authorization`, `cookie`, `client_secret`, …), in command lines, overrides, settings, variables, JSON and headers;
- user information in URLs (`https://user:password@host`), and tokens and signatures among their parameters;
- what follows `Bearer`, and keys of a known form (`hf_…`, `sk-…`, `ghp_…`, `AKIA…`, JSON web tokens, private keys);
- the values of such variables of the driver's environment, wherever a shell has put them.

Training keys that contain the same words stay readable: `max_tokens`, `eos_token`, `prompt_key`, `tokenizer`.
A credential of no known form under an unrelated key is not recognized.

`profiler.record_command=false` leaves out what is marked with ¹ below.
A later `verl-profiler collect` then searches the run directory only; reports under `profiler.nsight.directory` are gathered at the end of the run itself.

## Files

| file | what |
| --- | --- |
| `run.json` | what was launched |
| `processes/<name>.json` | one header per process |
| `step_<N>/<name>.jsonl` | events |
| `nsight/` | captures: journals, lists, and the tools' reports |
| `.cache/` | made by reading commands: the same events as Parquet |

File and folder modes follow the umask of the process; gathered reports are restricted to it.
nsys clears the umask of the processes that it starts; the driver's is restored there.
To make a run private, start it under `umask 077`.
"""


def page() -> str:
    """Return docs/privacy.md."""
    events: dict[str, list[str]] = {name: [] for name in FIELDS}
    for event, known in EVENTS.items():
        for name in known.fields:
            if name in events:
                events[name].append(f"`{event}`")
    return "\n".join(
        [
            _BEGIN,
            *_table("run.json", RUN),
            *_table("processes/<name>.json", HEADER),
            *_table("Lines of step_<N>/<name>.jsonl", LINE),
            *_table("`extra` of any event", IDENTITY),
            *_table("`extra` of events of this package", FIELDS, events),
            *_table("nsight/captures.json, nsight/<capture>.json, nsight/journal/", CAPTURE),
        ]
    )


def _table(
    title: str, fields: dict[str, Field], events: dict[str, list[str]] | None = None
) -> list[str]:
    more = "" if events is None else " events |"
    lines = [
        f"## {title}\n",
        f"| field | type | unit | what |{more}",
        "| --- | --- | --- | --- |" + (" --- |" if more else ""),
    ]
    for name, field in fields.items():
        last = "" if events is None else f" {', '.join(events[name])} |"
        lines.append(f"| `{name}` | {field.type} | {field.unit} | {field.doc} |{last}")
    return [*lines, ""]


if __name__ == "__main__":
    print(page(), end="")
