"""Export options of `verl-profiler tq`: Prometheus, OpenTelemetry, JSON lines."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.output import refuse_overwriting, write_whole
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from verl_profiler.reading.tq_sources import Source

__all__ = ["add_arguments", "chosen", "export", "send_spans", "write_lines"]

_LOOPBACK = "127.0.0.1"
# Option → the export that honors it.
_HONORED = {
    "serve": "prometheus",
    "allow_host": "prometheus",
    "endpoint": "otel",
    "project": "otel",
    "experiment": "otel",
    "index": "jsonl",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of exports."""
    group = parser.add_argument_group("export", "Export the numbers to other tools instead.")
    group.add_argument(
        "--export",
        choices=("prometheus", "otel", "jsonl"),
        help="prometheus: metrics as text; otel: spans as OTLP in JSON lines; jsonl: one document per call",
    )
    group.add_argument(
        "--out", metavar="FILE", type=Path, help="the file to write (default: the terminal)"
    )
    group.add_argument("--force", action="store_true", help="replace the file if it exists")
    group.add_argument(
        "--serve",
        metavar="[HOST:]PORT",
        type=_address,
        help=f"prometheus: serve /metrics until Ctrl-C, to this machine alone (HOST: {_LOOPBACK})",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        help="prometheus: a name that scrapers use for this machine, besides addresses, localhost and "
        "its host name; may be given several times",
    )
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="otel: send to this OTLP/HTTP endpoint, such as http://127.0.0.1:4318",
    )
    group.add_argument("--project", metavar="NAME", help="otel: RL-Insight's project")
    group.add_argument(
        "--experiment", metavar="NAME", help="otel: RL-Insight's experiment (default: the run's)"
    )
    group.add_argument("--index", metavar="NAME", help="jsonl: write for Elasticsearch's bulk API")


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:]+\]|[^\s:\[\]/]+):)?(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write 9464 or {_LOOPBACK}:9464")
    return (match[1] or _LOOPBACK).strip("[]"), int(match[2])


def chosen(args: argparse.Namespace) -> str | None:
    """Return the requested export; an option of only one export implies it.

    Raises:
        ReadingError: Options contradict each other.
    """
    given = {name: form for name, form in _HONORED.items() if getattr(args, name) is not None}
    form = args.export or next(iter(given.values()), None)
    for name, honoring in given.items():
        if honoring != form:
            raise ReadingError(
                f"--export {form} does not honor --{name.replace('_', '-')}; --export {honoring} does.",
                "option-not-heeded",
            )
    if form is None and args.out is not None:
        raise ReadingError(
            "--out is for exports.\nAdd --export prometheus, otel or jsonl",
            "option-not-heeded",
        )
    if form is not None and (
        args.json or args.trace is not None or args.plot is not None or args.lang != "en"
    ):
        raise ReadingError(
            "--json, --lang, --trace and --plot cannot be combined with exports.\nLeave them out",
            "option-not-heeded",
        )
    if args.out is not None and (args.serve is not None or args.endpoint is not None):
        raise ReadingError(
            "--out writes a file, --serve and --endpoint write none.\nLeave one of them out",
            "option-not-heeded",
        )
    return form


def export(
    sources: list[Source],
    args: argparse.Namespace,
    reopen: Callable[[], AbstractContextManager[list[Source]]],
) -> int:
    """Write, send or serve the requested export.

    Args:
        sources: The open runs and logs.
        args: The command's arguments.
        reopen: Opens them again, for scrapes of a run that grows.

    Raises:
        ReadingError: An extra is not installed, or a file, address or endpoint cannot be used.
    """
    if args.out is not None:
        refuse_overwriting(args.out, force=args.force)
    form = chosen(args)
    if form == "prometheus":
        return _prometheus(sources, args, reopen)
    narrowed = {"function": args.function}
    if form == "jsonl":
        from verl_profiler.exports.jsonl import json_lines

        lines = (
            line
            for source in sources
            for line in json_lines(source.tables, args.steps, index=args.index, **narrowed)
        )
        return write_lines(lines, args.out, "calls")
    from verl_profiler.exports.otlp import About, otlp_lines
    from verl_profiler.exports.otlp_transfer_queue import transfer_queue_spans

    given = (
        span
        for source in sources
        for span in transfer_queue_spans(
            source.tables,
            About.of_source(source, args.project, args.experiment),
            args.steps,
            **narrowed,
        )
    )
    if args.endpoint is None:
        return write_lines(otlp_lines(given), args.out, "spans with a time of day")
    return send_spans(given, args.endpoint)


def send_spans(given: Iterator[ReadableSpan], endpoint: str) -> int:
    """Send spans and print how many; return 1 if there are none.

    Raises:
        ReadingError: The endpoint does not accept them.
    """
    from verl_profiler.exports.otlp import send

    sent = send(given, endpoint)
    if not sent:
        print_error("nothing to export: there are no spans with a time of day")
        return 1
    print(visible(f"Sent {sent:,} spans to {endpoint}"))
    return 0


def write_lines(lines: Iterator[str], out: Path | None, what: str) -> int:
    """Write lines to a file or the terminal; return 1 if there are none.

    Raises:
        ReadingError: The file cannot be written.
    """
    first = next(lines, None)
    if first is None:
        print_error(f"nothing to export: there are no {what}")
        return 1

    def everything() -> Iterator[str]:
        yield first
        yield from lines

    if out is None:
        sys.stdout.writelines(everything())
    else:
        write_whole(out, everything())
        print(visible(f"Wrote {out}"))
    return 0


def _prometheus(
    sources: list[Source],
    args: argparse.Namespace,
    reopen: Callable[[], AbstractContextManager[list[Source]]],
) -> int:
    from verl_profiler.exports.prometheus import exposition, metrics, serve

    def read(opened: list[Source]) -> list[Any]:
        families: dict[str, Any] = {}
        for source in opened:
            for family in metrics(
                source.tables, args.steps, function=args.function, counts=source.counts
            ):
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples += family.samples
        return list(families.values())

    known = read(sources)
    if args.serve is None:
        return write_lines(iter([exposition(lambda: known)]), args.out, "metrics")
    if any(str(path) == "-" for path in args.paths):
        raise ReadingError(
            "standard input can be read only once, but --serve reads for every scrape.\n"
            "Name the log's file",
            "option-not-heeded",
        )
    state = {"files": _signature(args.paths), "metrics": known}

    def current() -> list[Any]:
        files = _signature(args.paths)
        if files != state["files"]:
            with reopen() as opened:
                state.update(metrics=read(opened), files=files)
        return state["metrics"]

    host, port = args.serve
    server, thread = serve(current, host, port, args.allow_host or ())
    shown = f"[{host}]" if ":" in host else host
    print(f"Serving http://{shown}:{server.server_port}/metrics; stop with Ctrl-C", flush=True)
    try:
        thread.join()
    except KeyboardInterrupt:
        print("Ended")
    finally:
        server.shutdown()
        server.server_close()
    return 0


def _signature(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return size and time of every file, which change when a run or log grows."""
    files = [
        file
        for path in paths
        for file in (path.glob("step_*/*.jsonl*") if path.is_dir() else [path])
    ]
    found: list[tuple[str, int, int]] = []
    for file in sorted(files):
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return found
