"""Export a run to the format of another tool.

    verl-profiler export perfetto logs/my-run
    verl-profiler export perfetto logs/my-run -o timeline.pftrace.gz --step 3:5
    verl-profiler export perfetto logs/my-run --from 90 --to 120.5
    verl-profiler export perfetto logs/my-run --merge worker.pt.trace.json.gz
    verl-profiler export perfetto logs/my-run --chrome-json -o timeline.json
    verl-profiler export otlp logs/my-run --endpoint http://127.0.0.1:4318
    verl-profiler export otlp logs/my-run -o spans.jsonl --step 3

perfetto: one timeline of all processes, to open in https://ui.perfetto.dev (nothing is uploaded).
Of a large run, the slowest requests of each step and a sample of the others are drawn; --all draws all.
Traces of torch.profiler and SQLite exports of nsys under RUN/nsight are merged into it.
otlp: requests, one trace each, and TransferQueue calls as OpenTelemetry spans, for Jaeger, Tempo and
other tracing backends.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl_profiler.cli.options import add_cache, add_on, add_out, add_runs, add_steps, check_steps
from verl_profiler.cli.output import replacing, target_of
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from verl_profiler.analysis import Steps
    from verl_profiler.exports.trace_selection import TimeRange
    from verl_profiler.reading.reader import Run

__all__ = ["add_arguments", "moment", "run", "write_timeline"]

# Seconds after the begin of a run, or a time of day.
Moment = float | datetime | None


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
    for option, edge in (("--from", "first"), ("--to", "last")):
        parser.add_argument(
            option,
            dest=f"{edge}_moment",
            metavar="TIME",
            type=moment,
            help=f"perfetto: the {edge} moment to draw: seconds after the run's first event, or a time "
            "in UTC such as 2026-11-24T09:30:00",
        )
    parser.add_argument(
        "--all",
        dest="everything",
        action="store_true",
        help="perfetto: draw every request, however many there are",
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
    add_on(parser)


def moment(text: str) -> float | datetime:
    """Parse seconds after the begin of a run, or a time of day, in UTC unless it has an offset."""
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if math.isfinite(seconds):
            return seconds
    try:
        when = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; write seconds after the run's begin, such as 90.5, "
            "or 2026-11-24T09:30:00"
        ) from error
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)


# Attribute, option → the format that honors it.
_OPTIONS = {"first_moment": "from", "last_moment": "to", "everything": "all"}
_HONORED = {
    "first_moment": "perfetto",
    "last_moment": "perfetto",
    "everything": "perfetto",
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
        if getattr(args, name) not in (None, False, []) and form != args.format:
            option = _OPTIONS.get(name, name.replace("_", "-"))
            raise ReadingError(
                f"export {args.format} does not honor --{option}; export {form} does.",
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
        between=(args.first_moment, args.last_moment),
        everything=args.everything,
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
    between: tuple[Moment, Moment] = (None, None),
    everything: bool = False,
) -> bool:
    """Write the timeline of runs; return False when there is nothing in it.

    Args:
        runs: Runs, as the command line takes them.
        target: The file to write; compressed if it ends in .gz.
        steps: First and last step; all when None.
        merge: Further traces to merge.
        chrome_json: Chrome's JSON trace events instead of a Perfetto trace.
        cache: Use and write the runs' table caches.
        between: First and last moment; None for the begin and the end of the steps.
        everything: Draw all requests, also of a large run.

    Raises:
        ReadingError: The paths cannot be used, or the moments are not in the run.
    """
    from verl_profiler.analysis.selection import in_steps
    from verl_profiler.exports.chrome_trace import ChromeTrace
    from verl_profiler.exports.perfetto import PerfettoTrace
    from verl_profiler.exports.trace_selection import Selection, choose
    from verl_profiler.exports.tracks import origin_ns, write_foreign, write_run
    from verl_profiler.reading.formats.registry import find_traces, read_trace
    from verl_profiler.reading.reader import load

    kind = ChromeTrace if chrome_json else PerfettoTrace
    foreign = [read_trace(path) for path in merge]
    with load(list(runs), cache=cache, steps=steps) as opened:
        check_steps(opened, steps)
        first_ns = origin_ns(opened.tables, steps)
        if not first_ns:
            print_error("nothing to export:", *opened.problems)
            return False
        within_us = _range(opened, first_ns // 1000, between)
        if everything:
            selection = Selection(in_steps(steps), within_us)
        else:
            selection = choose(opened.tables, steps, within_us)
        for sentence in selection.sentences:
            print_error(sentence)
        for path in (path for each in runs for path in find_traces(each / "nsight")):
            try:
                foreign.append(read_trace(path, found=True))
            except ReadingError as error:
                print_error(f"not merged: {error}")
        with replacing(target) as file, _packed(file, target) as stream:
            trace = kind(stream, first_ns)
            folders = write_run(opened.tables, steps, trace, selection)
            for each in filter(None, foreign):
                write_foreign(each, opened.tables, folders, trace)
                if each.left_out:
                    print_error(f"{each.title}: {each.left_out} implausible events were left out")
            trace.close()
    return True


def _range(opened: Run, first_us: int, between: tuple[Moment, Moment]) -> TimeRange | None:
    """Place moments on the run's axis.

    Raises:
        ReadingError: Nothing lies between them.
    """
    if between == (None, None):
        return None
    row = opened.tables.row("SELECT max(end_us) AS last_us FROM event_counts")
    placed = [first_us, row["last_us"] or first_us]
    for place, given in enumerate(between):
        if isinstance(given, datetime):
            placed[place] = round(given.timestamp() * 1e6)
        elif given is not None:
            placed[place] = first_us + round(given * 1e6)
    if not placed[0] < placed[1] or placed[1] < first_us or placed[0] > (row["last_us"] or 0):
        lasted_s = ((row["last_us"] or first_us) - first_us) / 1e6
        raise ReadingError(
            f"nothing lies between these moments; the run lasted {lasted_s:.1f} s.\n"
            f"For example --from 0 --to {lasted_s / 2:.1f}",
            "no-such-time",
        )
    return placed[0], placed[1]


def _packed(file: IO[bytes], target: Path) -> contextlib.AbstractContextManager[Any]:
    if target.suffix == ".gz":
        return gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0)
    return contextlib.nullcontext(file)
