"""Export a run to the format of another tool.

    verl-profiler export perfetto logs/my-run
    verl-profiler export perfetto logs/my-run -o timeline.pftrace.gz --step 3:5
    verl-profiler export perfetto logs/my-run --merge worker.pt.trace.json.gz
    verl-profiler export perfetto logs/my-run --chrome-json -o timeline.json

One timeline of all processes, to open in https://ui.perfetto.dev (nothing is uploaded).  Traces of
torch.profiler and SQLite exports of nsys under RUN/nsight are merged into it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl_profiler.cli.options import add_cache, add_out, add_runs, add_steps, check_steps
from verl_profiler.cli.output import replacing, target_of
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from verl_profiler.analysis import Steps

__all__ = ["add_arguments", "run", "write_timeline"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("format", choices=["perfetto"], help="the output format")
    add_runs(parser)
    add_out(
        parser, "the file to write; compressed if it ends in .gz (default: RUN/timeline.pftrace)"
    )
    add_steps(parser)
    parser.add_argument(
        "--merge",
        metavar="TRACE",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        help="additional torch.profiler traces or nsys SQLite exports to merge",
    )
    parser.add_argument(
        "--chrome-json",
        action="store_true",
        help="write Chrome JSON trace events, for tools that cannot read Perfetto traces",
    )
    add_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Write the timeline; return 0, or 1 if it would be empty.

    Raises:
        ReadingError: The paths or the arguments cannot be used (exit code 2).
    """
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
