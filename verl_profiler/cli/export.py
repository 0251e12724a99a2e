"""Export a run to the format of another tool.

    verl-profiler export perfetto logs/my-run
    verl-profiler export perfetto logs/my-run -o timeline.pftrace.gz --step 3:5
    verl-profiler export perfetto logs/my-run --merge worker.pt.trace.json.gz
    verl-profiler export otlp logs/my-run --endpoint http://127.0.0.1:4318
    verl-profiler export otlp logs/my-run -o spans.jsonl --step 3
    verl-profiler export prometheus logs/my-run -o verl.prom
    verl-profiler export jsonl training.log -o tq.jsonl
    verl-profiler export trackers logs/my-run --tracker wandb mlflow

perfetto: one timeline of all processes, to open in https://ui.perfetto.dev
(nothing is uploaded). Of a large run, the longest steps are drawn, and of a
large step its slowest requests; --all draws all. Traces of torch.profiler and
SQLite exports of nsys under RUN/nsight are merged into it.
otlp, prometheus, jsonl: TransferQueue calls as OpenTelemetry spans for Jaeger,
Tempo and other tracing backends, as metrics for node_exporter's textfile
collector, or one JSON document each; also from console logs.
trackers: the report, the findings and a few numbers (profile/…) to W&B,
TensorBoard or MLflow, under the run's own project and experiment.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import READING, Argument, opened_run, output_arguments
from verl_profiler.cli.output import refuse_overwriting, replacing, target_of, write_whole
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.events.vocabulary import TRACKERS
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Steps

# What a file has near its beginning that was written for this format, and may be replaced.
_TIMELINE, _SPANS = b"whole run", b'"scope":{"name":"verl_profiler"}'
_TIMED_SPANS = "spans with a time of day"
_TRANSFERS = {"prometheus": b"# HELP verl_tq_", "jsonl": b'"kind":"call","run":"'}


def utc_offset(text: str) -> int:
    """Parse a UTC offset; return seconds."""
    match = re.fullmatch(r"([+-]?)(\d{1,2}):(\d\d)", text)
    if match is None or int(match[2]) > 14 or int(match[3]) > 59:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a UTC offset; write for example --utc-offset=08:00 or --utc-offset=-05:00"
        )
    seconds = int(match[2]) * 3600 + int(match[3]) * 60
    return -seconds if match[1] == "-" else seconds


ARGUMENTS = (
    Argument(
        "format", choices=["perfetto", "otlp", *_TRANSFERS, "trackers"], help="the output format"
    ),
    *READING,
    *output_arguments(
        "the file to write; a timeline is compressed if it ends in .gz (default: "
        "RUN/timeline.pftrace, RUN/spans.otlp.jsonl; prometheus and jsonl: the terminal)",
    ),
    Argument(
        "--merge",
        metavar="TRACE",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        help="perfetto: additional torch.profiler traces or nsys SQLite exports to merge",
    ),
    Argument(
        "--all",
        dest="everything",
        action="store_true",
        help="perfetto: draw every request, however many there are",
    ),
    Argument(
        "--endpoint",
        metavar="URL",
        help="otlp: send to this OTLP/HTTP endpoint, such as http://127.0.0.1:4318, instead of a file",
    ),
    Argument(
        "--utc-offset",
        metavar="HH:MM",
        type=utc_offset,
        help="prometheus, jsonl, otlp: UTC offset of a console log's timestamps, such as 08:00 or "
        "=-05:00; the logs do not record it",
    ),
    Argument(
        "--tracker",
        nargs="+",
        action="extend",
        choices=TRACKERS,
        metavar="TRACKER",
        default=[],
        help=f"trackers: {', '.join(TRACKERS)} (default: those of the run's trainer.logger)",
    ),
    Argument("--project", metavar="NAME", help="trackers: the project (default: the run's)"),
    Argument("--experiment", metavar="NAME", help="trackers: the experiment (default: the run's)"),
)

# Attribute, option → the formats that honor it.
_OPTIONS = {"everything": "all"}
_HONORED: dict[str, tuple[str, ...]] = {
    "everything": ("perfetto",),
    "merge": ("perfetto",),
    "endpoint": ("otlp",),
    "project": ("trackers",),
    "experiment": ("trackers",),
    "tracker": ("trackers",),
    "utc_offset": ("otlp", *_TRANSFERS),
    "out": ("perfetto", "otlp", *_TRANSFERS),
    "steps": ("perfetto", "otlp", *_TRANSFERS),
}


def run(args: argparse.Namespace) -> int:
    """Write or send the export; return 0, or 1 if there is nothing to export or a tracker failed."""
    for name, forms in _HONORED.items():
        if getattr(args, name) not in (None, False, []) and args.format not in forms:
            option = _OPTIONS.get(name, name.replace("_", "-"))
            raise ReadingError(
                f"export {args.format} does not honor --{option}; export {forms[0]} does.",
                "option-not-heeded",
            )
    if args.format in ("otlp", *_TRANSFERS):
        return _transfers(args)
    if args.format == "trackers":
        from verl_profiler.cli.publishing import publish_run

        return publish_run(args)
    return _timeline(args)


def _transfers(args: argparse.Namespace) -> int:
    """Write or send the TransferQueue calls of runs and console logs; return 1 if there are none."""
    from verl_profiler.cli.tq import check, nothing, opened_transfers

    if args.endpoint is not None and args.out is not None:
        raise ReadingError(
            "--out writes a file, --endpoint writes none.\nLeave one of them out",
            "option-not-heeded",
        )
    target: Path | None = args.out
    if args.format == "otlp" and args.endpoint is None:
        target = target_of(args.runs, args.out, "spans.otlp.jsonl", force=args.force, mark=_SPANS)
    elif target is not None:
        refuse_overwriting(target, force=args.force, mark=_TRANSFERS[args.format])
    with opened_transfers(
        args.runs, cache=not args.no_cache, utc_offset_s=args.utc_offset or 0
    ) as opened:
        if opened.is_empty:
            print_error(*nothing(args.runs))
            return 1
        check(opened.tables, args.steps)
        if args.format == "prometheus":
            from verl_profiler.exports.prometheus import exposition, metrics

            found = metrics(opened.tables, args.steps, counts=opened.counts)
            return _write_lines(iter([exposition(list(found))]), target, "metrics")
        if args.format == "jsonl":
            from verl_profiler.exports.jsonl import json_lines

            lines = json_lines(opened.tables, args.steps)
            return _write_lines(lines, target, "calls")
        from verl_profiler.exports.otlp import otlp_lines, send, transfer_queue_spans

        spans = transfer_queue_spans(opened.tables, args.steps)
        if args.endpoint is None:
            return _write_lines(otlp_lines(spans), target, _TIMED_SPANS)
        sent = send(spans, args.endpoint)
    if not sent:
        _print_none(_TIMED_SPANS)
        return 1
    print(visible(f"Sent {sent:,} spans to {args.endpoint}"))
    return 0


def _write_lines(lines: Iterator[str], out: Path | None, what: str) -> int:
    """Write lines to a file or the terminal; return 1 if there are none.

    Raises:
        ReadingError: The file cannot be written.
    """
    first = next(lines, None)
    if first is None:
        _print_none(what)
        return 1
    everything = itertools.chain([first], lines)
    if out is None:
        sys.stdout.writelines(everything)
    else:
        write_whole(out, everything)
        print(visible(f"Wrote {out}"))
    return 0


def _print_none(what: str) -> None:
    print_error(f"nothing to export: there are no {what}")


def _timeline(args: argparse.Namespace) -> int:
    """Write the timeline of runs; return 1 when there is nothing in it."""
    from verl_profiler.analysis.selection import in_steps
    from verl_profiler.exports.perfetto import PerfettoTrace
    from verl_profiler.exports.tracks import (
        Selection,
        choose,
        days_apart,
        origin_ns,
        write_foreign,
        write_run,
    )
    from verl_profiler.reading.formats.foreign_traces import read_trace
    from verl_profiler.reading.formats.registry import find_traces

    steps: Steps = args.steps
    target = target_of(args.runs, args.out, "timeline.pftrace", force=args.force, mark=_TIMELINE)
    foreign = [read_trace(path) for path in args.merge]
    with opened_run(args) as opened:
        first_ns = origin_ns(opened.tables, steps)
        if not first_ns:
            print_error("nothing to export:", *opened.problems)
            return 1
        selection = Selection(in_steps(steps)) if args.everything else choose(opened.tables, steps)
        for sentence in selection.sentences:
            print_error(sentence)
        for path in (path for each in args.runs for path in find_traces(each / "nsight")):
            try:
                foreign.append(read_trace(path, found=True))
            except ReadingError as error:
                print_error(f"not merged: {error}")
        with replacing(target) as file, contextlib.ExitStack() as stack:
            stream: Any = file
            if target.suffix == ".gz":
                stream = stack.enter_context(
                    gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0)
                )
            trace = PerfettoTrace(stream, first_ns)
            folders = write_run(opened.tables, steps, trace, selection)
            for each in filter(None, foreign):
                if (apart := days_apart(each, opened.tables)) is not None:
                    print_error(
                        f"WARNING: {each.title} lies {apart:,} days from the run's events: is it of "
                        "this run? Its file's clock, or the files given, may be wrong"
                    )
                write_foreign(each, opened.tables, folders, trace)
                if each.left_out:
                    print_error(f"{each.title}: {each.left_out} implausible events were left out")
            trace.close()
    print(visible(f"Wrote {target}"))
    print("Open https://ui.perfetto.dev and drop the file into it; nothing is uploaded.")
    return 0
