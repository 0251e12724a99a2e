"""The pages of the docs that come from the contract: all of privacy.md, the vocabulary in events.md.

python -m verl_profiler.events.pages docs
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from verl_profiler.events.fields import (
    CAPTURE,
    FIELDS,
    HEADER,
    IDENTITY,
    LINE,
    RUN,
    Field,
    fields_of,
)
from verl_profiler.events.vocabulary import EVENTS

__all__ = ["privacy", "vocabulary", "write"]

_VOCABULARY = "<!-- Generated: python -m verl_profiler.events.pages docs -->\n"
_END = "<!-- End of the generated part -->\n"

_BEGIN = """\
# What is recorded

<!-- Generated: python -m verl_profiler.events.pages docs -->

Everything that this package writes about a run, field by field.
It records times, counts, sizes, names and ids.
It does not record prompts, responses, token ids, tool arguments and results, samples, weights, gradients, or messages of exceptions that calls end with.
All of it stays in the run directory, except that a URL as `profiler.output_dir` has a copy of it, and that two settings, both off by default, send to the loggers configured in verl: `profiler.transfer_queue.metrics` the sums `tq/*`, and `profiler.publish` the report (which has the command line with credentials masked, unless `profiler.record_command=false`) and the findings.

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
- the values of such variables of the driver's environment, wherever a shell has inserted them.

Training keys that contain the same words stay readable: `max_tokens`, `eos_token`, `prompt_key`, `tokenizer`.
A credential of no known form under an unrelated key is not recognized.

`profiler.record_command=false` leaves out what is marked with ¹ below.
A later `verl-profiler collect` then searches the run directory only; reports under `profiler.nsight.directory` are gathered at the end of the run itself.

## Files

| file | what |
| --- | --- |
| `run.json` | what was launched |
| `processes/<name>.json` | one header per process |
| `step_<N>/<name>.jsonl` | events; with `profiler.events.compress`, also as `.jsonl.gz`; with `profiler.events.steps_per_file`, in `step_<first>-<last>/` |
| `open/<name>.json` | what a process has open for long: events, times, identity as in its events, and names of functions with line numbers; of an exception that ended the trainer its type, process id and address, and a reason in known words of Ray, torch or the kernel, never its message ([stuck](stuck.md)) |
| `evidence/<number>/<name>.json` | only if the run was stuck: names of functions with line numbers, names of threads, counts of requests and tokens in engines, names of collectives, class and process id of Ray actors, functions called through Ray, IP addresses and ports of TCP connections, load, memory and disk space of the host, and names of processes that the kernel killed for lack of memory; the path of PyTorch's dump ¹ ([stuck](stuck.md#evidence)) |
| `upload.json` | in object storage only: times of uploads, why files could not be uploaded with credentials masked; host, run directory and URL ¹ |
| `shipping.json`, `.disk` | nodes with disks of their own: host, names of processes, times and bytes of shipments, why one failed with credentials masked, the run directory ¹; a random name of the disk |
| `nsight/` | captures: journals, lists, and the tools' reports |
| `.cache/` | created by reading commands: the same events as Parquet |

File and folder modes follow the umask of the process; gathered reports are restricted to it.
nsys clears the umask of the processes that it starts; the driver's is restored there.
To make a run private, start it under `umask 077`.
"""


def write(docs: Path) -> None:
    """Write privacy.md, and the vocabulary of events.md, into a folder."""
    (docs / "privacy.md").write_text(privacy(), encoding="utf-8")
    page = docs / "events.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_VOCABULARY)
    after = rest.partition(_END)[2]
    page.write_text(f"{before}{vocabulary()}{after}", encoding="utf-8")


def privacy() -> str:
    """Return docs/privacy.md."""
    return "\n".join(
        [
            _BEGIN,
            *_table("`run.json`", RUN),
            *_table("`processes/<name>.json`", HEADER),
            *_table("Lines of `step_<N>/<name>.jsonl`", LINE),
            *_table("`extra` of any event", IDENTITY),
            *_table("`extra` of events of this package", FIELDS, events=True),
            *_table("`nsight/captures.json`, `nsight/<capture>.json`, `nsight/journal/`", CAPTURE),
        ]
    )


def vocabulary() -> str:
    """Return the generated part of docs/events.md, with its marks."""
    lines = [
        f"{_VOCABULARY}",
        "| event | category | inside | fields besides the identity | what it is |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, event in EVENTS.items():
        instant = " (instant)" if event.instant else ""
        parent = f"`{event.parent}`" if event.parent else ""
        lines.append(
            f"| `{name}`{instant} | {event.family} | {parent} | {_listed(fields_of(name))} "
            f"| {event.doc} |"
        )
    return "\n".join([*lines, "", _END])


def _table(title: str, fields: Mapping[str, Field], *, events: bool = False) -> list[str]:
    more = " events |" if events else ""
    lines = [
        f"## {title}\n",
        f"| field | type | unit | what |{more}",
        "| --- | --- | --- | --- |" + (" --- |" if more else ""),
    ]
    for name, field in fields.items():
        last = f" {_listed(field.events)} |" if events else ""
        lines.append(f"| `{name}` | {field.type} | {field.unit} | {field.doc} |{last}")
    return [*lines, ""]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
