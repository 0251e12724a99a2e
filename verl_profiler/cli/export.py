"""Export a run to the format of another tool.

    verl-profiler export perfetto logs/my-run
    verl-profiler export perfetto logs/my-run -o timeline.pftrace.gz --step 3:5
    verl-profiler export perfetto logs/my-run --merge worker.pt.trace.json.gz
    verl-profiler export perfetto logs/my-run --chrome-json -o timeline.json
    verl-profiler export otlp logs/my-run --endpoint http://127.0.0.1:4318
    verl-profiler export otlp logs/my-run -o spans.jsonl --step 3

perfetto: one timeline of all processes, to open in https://ui.perfetto.dev (nothing is uploaded).
Traces of torch.profiler and SQLite exports of nsys under RUN/nsight are merged into it.
otlp: requests, one trace each, and TransferQueue calls as OpenTelemetry spans, for Jaeger, Tempo and
other tracing backends.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl_profiler.cli.options import add_cache, add_out, add_runs, add_steps, check_steps
from verl_profiler.cli.output import replacing, target_of
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from verl_profiler.analysis import Steps

__all__ = ["add_arguments", "run", "write_timeline"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("format", choices=["perfetto", "otlp"], help="the output format")
    add_runs(parser)
    add_out(
        parser,
        "the file to write; a timeline is compressed if it ends in .gz "
        "(default: RUN/timeline.pftrace, RUN/spans.otlp.jsonl)",
    )
    add_steps(parser)
    parser.add_argument(
        "--merge",
        metavar="TRACE",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        help="perfetto: additional torch.profiler traces or nsys SQLite exports to merge",
    )
    parser.add_argument(
        "--chrome-json",
        action="store_true",
        help="perfetto: write Chrome JSON trace events, for tools that cannot read Perfetto traces",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="otlp: send to this OTLP/HTTP endpoint, such as http://127.0.0.1:4318, instead of a file",
    )
    parser.add_argument(
        "--only",
        choices=("requests", "transfer-queue"),
        help="otlp: leave out the other spans",
    )
    parser.add_argument("--project", metavar="NAME", help="otlp: RL-Insight's project")
    parser.add_argument(
        "--experiment", metavar="NAME", help="otlp: RL-Insight's experiment (default: the run's)"
    )
    add_cache(parser)


# Option → the format that honors it.
_HONORED = {
    "merge": "perfetto",
    "chrome_json": "perfetto",
    "endpoint": "otlp",
    "only": "otlp",
    "project": "otlp",
    "experiment": "otlp",
}


def run(args: argparse.Namespace) -> int:
    """Write the timeline or the spans; return 0, or 1 if there are none.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
    for name, form in _HONORED.items():
        if getattr(args, name) and form != args.format:
            raise ReadingError(
                f"export {args.format} does not honor --{name.replace('_', '-')}; export {form} does.",
                "option-not-heeded",
            )
    if args.format == "otlp":
        return _otlp(args)
    name = "timeline.json" if args.chrome_json else "timeline.pftrace"
    target = target_of(args.runs, args.out, name, force=args.force)
    if not write_timeline(
        args.runs,
        target,
        args.steps,
        merge=args.merge,
        chrome_json=args.chrome_json,
        cache=not args.no_cache,
    ):
        return 1
    print(visible(f"Wrote {target}"))
    if not args.chrome_json:
        print("Open it in https://ui.perfetto.dev, or with: verl-profiler open --perfetto RUN")
    return 0


def _otlp(args: argparse.Namespace) -> int:
    if args.endpoint is not None and args.out is not None:
        raise ReadingError(
            "--out writes a file, --endpoint writes none.\nLeave one of them out",
            "option-not-heeded",
        )
    target = None
    if args.endpoint is None:
        target = target_of(args.runs, args.out, "spans.otlp.jsonl", force=args.force)

    from verl_profiler.cli.tq_export import send_spans, write_lines
    from verl_profiler.exports.otlp import About, otlp_lines
    from verl_profiler.exports.otlp_requests import request_spans
    from verl_profiler.exports.otlp_transfer_queue import transfer_queue_spans
    from verl_profiler.reading.tq_sources import open_sources

    with open_sources(args.runs, cache=not args.no_cache) as sources:
        given: list[Iterator[ReadableSpan]] = []
        for source in sources:
            check_steps(source.tables, args.steps)
            about = About.of_source(source, args.project, args.experiment)
            if args.only != "transfer-queue":
                given.append(request_spans(source.tables, about, args.steps))
            if args.only != "requests":
                alone = args.only is not None
                given.append(
                    transfer_queue_spans(source.tables, about, args.steps, of_requests=alone)
                )
        if args.endpoint is not None:
            return send_spans(itertools.chain(*given), args.endpoint)
        lines = otlp_lines(itertools.chain(*given))
        return write_lines(lines, target, "spans with a time of day")


def write_timeline(
    runs: Sequence[Path],
    target: Path,
    steps: Steps,
    *,
    merge: Sequence[Path] = (),
    chrome_json: bool = False,
    cache: bool = True,
) -> bool:
    """Write the timeline of runs; return False when there is nothing in it.

    Args:
        runs: Runs, as the command line takes them.
        target: The file to write; compressed if it ends in .gz.
        steps: First and last step; all when None.
        merge: Further traces to merge.
        chrome_json: Chrome's JSON trace events instead of a Perfetto trace.
        cache: Use and write the runs' table caches.

    Raises:
        ReadingError: The paths cannot be used.
    """
    from verl_profiler.exports.chrome_trace import ChromeTrace
    from verl_profiler.exports.perfetto import PerfettoTrace
    from verl_profiler.exports.tracks import origin_ns, write_foreign, write_run
    from verl_profiler.reading.formats.registry import find_traces, read_trace
    from verl_profiler.reading.reader import load

    kind = ChromeTrace if chrome_json else PerfettoTrace
    foreign = [read_trace(path) for path in merge]
    with load(list(runs), cache=cache) as opened:
        check_steps(opened, steps)
        first_ns = origin_ns(opened.tables, steps)
        if not first_ns:
            print_error("nothing to export:", *opened.problems)
            return False
        for path in (path for each in runs for path in find_traces(each / "nsight")):
            try:
                foreign.append(read_trace(path, found=True))
            except ReadingError as error:
                print_error(f"not merged: {error}")
        with replacing(target) as file, _packed(file, target) as stream:
            trace = kind(stream, first_ns)
            folders = write_run(opened.tables, steps, trace)
            for each in filter(None, foreign):
                write_foreign(each, opened.tables, folders, trace)
                if each.left_out:
                    print_error(f"{each.title}: {each.left_out} implausible events were left out")
            trace.close()
    return True


def _packed(file: IO[bytes], target: Path) -> contextlib.AbstractContextManager[Any]:
    if target.suffix == ".gz":
        return gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0)
    return contextlib.nullcontext(file)
