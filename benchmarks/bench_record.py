"""What recording costs, beside what users would otherwise use; all measured in one run.

    python benchmarks/bench_record.py [--write]

Needs no verl for the first table's own rows; verl's timer and OpenTelemetry are measured where they are
installed.  Figures are nanoseconds per event on the calling thread, median and p99 over batches;
the writer thread runs meanwhile, as it does in training.  Batches of ours have pauses between them,
in which it writes; some calls after each pause are not counted, since a core that slept is slow at
first.  The cost of those first calls is given apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from verl_profiler import span
from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import now, take_anchor
from verl_profiler.recording.context import Request, current_request
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

BATCH = 200
BATCHES = 300
PAUSE_S = 0.01


def spread(times):
    """Return (median, p99) of figures."""
    times = sorted(times)
    return statistics.median(times), times[int(len(times) * 0.99)]


def measure(body, batches=BATCHES, pause=0.0):
    """Return (median, p99) nanoseconds per call of `body`, over batches of BATCH calls."""
    for _ in range(BATCH):
        body()
    times = []
    gc.disable()
    for _ in range(batches):
        if pause:
            time.sleep(pause)
            for _ in range(BATCH):
                body()
        begin = now()
        for _ in range(BATCH):
            body()
        times.append((now() - begin) / BATCH)
    gc.enable()
    return spread(times)


def single(body, calls=20_000):
    """Return the p99 of single calls, in nanoseconds, with the clock's own cost in it."""
    times = []
    for _ in range(calls):
        begin = now()
        body()
        times.append(now() - begin)
    times.sort()
    return times[int(len(times) * 0.99)]


class Original:
    """The original multi-turn logger's way: json.dumps and a flush per event."""

    def __init__(self, path):
        self.file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def log(self, event, duration, extra, workid, step):
        record = {"timestamp": datetime.now().isoformat(), "event": event}  # noqa: DTZ005
        record["duration_sec"] = duration
        record["extra"] = extra
        record["workid"] = workid
        record["step"] = step
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


def start(folder):
    """Start recording into a new directory below `folder`."""
    directory = tempfile.mkdtemp(dir=folder)
    recorder.start(
        WorkerConfig(directory, directory, EventSettings(), take_anchor(), max_pending=5_000_000),
        lambda: Identity("agent_loop", 0),
    )
    return Path(directory)


def bench_spans(folder):
    """One span with four fields, as each tool would record it."""
    rows = {}
    extra = {"request_id": "0123456789abcdef0123456789abcdef", "turn": 2, "tokens": 55, "ok": 1}

    def floor():
        held.append((now(), now()))

    held = []
    rows["floor: two clock reads, one append"] = measure(floor)

    directory = start(folder)

    def ours():
        begin = now()
        recorder.record("tool_call", begin, now(), {**extra}, 3)

    rows["recorder.record, 4 fields"] = measure(ours, pause=PAUSE_S)
    rows["  single call"] = (None, single(ours))

    def ours_span():
        with span("lookup", table="users", turn=2, tokens=55, ok=1):
            pass

    rows["span(...), 4 fields"] = measure(ours_span, pause=PAUSE_S)
    rows["  single call "] = (None, single(ours_span))
    recorder.stop()
    size, count = size_of(directory)
    (header,) = directory.glob("processes/*.json")
    counters = json.loads(header.read_bytes())["counters"]
    writer_us = counters["writer_cpu_s"] / counters["events"] * 1e6

    original = Original(folder / "original.jsonl")

    def theirs():
        begin = time.time()
        original.log("tool_call", time.time() - begin, {**extra}, 0, 3)

    rows["original logger (json + flush)"] = measure(theirs, batches=60)

    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        provider = TracerProvider()
        sink = ConsoleSpanExporter(out=io.StringIO(), formatter=lambda _: "")
        provider.add_span_processor(BatchSpanProcessor(sink))
        tracer = provider.get_tracer("bench")

        def otel():
            with tracer.start_as_current_span("tool_call", attributes=extra):
                pass

        rows["OpenTelemetry SDK span"] = measure(otel, batches=40)
        provider.shutdown()
    except ImportError:
        print("OpenTelemetry is not installed; that row is left out", file=sys.stderr)

    with contextlib.suppress(Exception):
        from verl.utils.profiler.performance import marked_timer

        raw = {}

        def verls():
            with marked_timer("tool_call", raw):
                pass

        rows["verl marked_timer (a sum, no event)"] = measure(verls, batches=60)
    return rows, size / count, writer_us


def size_of(directory):
    """Return bytes and lines of all event files."""
    size = count = 0
    for file in directory.glob("step_*/*.jsonl"):
        data = file.read_bytes()
        size += len(data)
        count += data.count(b"\n")
    return size, count


class Host:
    """Two methods like verl's, one of each kind."""

    def method(self, request_id, prompt_ids):
        return prompt_ids

    async def coroutine(self, request_id, prompt_ids):
        return prompt_ids

    async def stream(self, request_id, prompt_ids):
        for number in range(5000):
            yield number


def _fields(call, result):
    call.extra = {
        "prompt_tokens": len(call.arguments["prompt_ids"]),
        "response_tokens": len(result),
    }


def bench_calls(folder):
    """What a probe adds to a call, with fields read from it and a request's identity."""
    probe = Probe("engine_call", "rollout", ("x:y",), leave=_fields)
    # As that of vLLM's outputs, of which there is one per token.
    streamed = replace(probe, leave=None, item=lambda call, item: None)
    request = Request(3)
    request.request_id, request.turn, request.sample, request.session = "0123456789abcdef", 1, 7, 0
    host, ids = Host(), list(range(50))
    wrapped_sync = wrapping.wrap(probe, Host.method)
    wrapped_async = wrapping.wrap(probe, Host.coroutine)
    rows = {}

    def run_async(function):
        async def many():
            current_request.set(request)
            times = {"first": [], "then": []}
            for _ in range(BATCHES):
                await asyncio.sleep(PAUSE_S)
                for part in times.values():
                    begin = now()
                    for _ in range(BATCH):
                        await function(host, "r", ids)
                    part.append((now() - begin) / BATCH)
            return spread(times["first"]), spread(times["then"])

        return asyncio.run(many())

    def run_stream(function):
        async def item_ns():
            begin = now()
            async for _ in function(host, "r", ids):
                pass
            return (now() - begin) / 5000

        # The writer has written what came before.
        time.sleep(1)
        return statistics.median(asyncio.run(item_ns()) for _ in range(30))

    bare_sync = measure(lambda: Host.method(host, "r", ids))
    bare_stream = run_stream(Host.stream)
    bare_first, bare_async = run_async(Host.coroutine)
    off = measure(lambda: wrapped_sync(host, "r", ids))
    start(folder)
    current_request.set(request)
    on_sync = measure(lambda: wrapped_sync(host, "r", ids), pause=PAUSE_S)
    on_first, on_async = run_async(wrapped_async)
    on_stream = run_stream(wrapping.wrap(streamed, Host.stream))
    recorder.stop()
    current_request.set(None)
    rows["method, bare"] = bare_sync
    rows["method, wrapped, no recorder"] = off
    rows["method, probed"] = on_sync
    rows["coroutine, bare"] = bare_async
    rows["coroutine, probed"] = on_async
    added = {
        "method": on_sync[0] - bare_sync[0],
        "coroutine": on_async[0] - bare_async[0],
        "coroutine, first after 10 ms of idling": on_first[0] - bare_first[0],
        "stream's item": on_stream - bare_stream,
    }
    return rows, added


def bench_import():
    """What importing the plugin adds to a worker, unprofiled and profiled: medians of nine, by name."""
    # A worker has imported these long before; Ray and TransferQueue bring them.
    code = """
import asyncio, importlib.metadata, json, msgspec, sys, threading, time, typing_extensions
def taken():
    with open("/proc/self/statm") as file:
        return len(sys.modules), int(file.read().split()[1]) * 4096 / 1e6, threading.active_count()
before, begin = taken(), time.thread_time()
import verl_profiler.plugin
took = (time.thread_time() - begin) * 1e3
print(json.dumps([took, *(now - then for now, then in zip(taken(), before))]))
"""
    folder = tempfile.mkdtemp()
    encoded = WorkerConfig(folder, folder, EventSettings(), take_anchor()).encode()
    rows = {"off": [], "on": []}
    for _ in range(9):
        for name, environment in (("off", {}), ("on", {"VERL_PROFILER_SETTINGS": encoded})):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={"PATH": "", **environment},
                capture_output=True,
                text=True,
                check=True,
            )
            rows[name].append(json.loads(done.stdout))
    names = ("ms", "modules", "megabytes", "threads")
    return {
        name: dict(zip(names, map(statistics.median, zip(*each, strict=True)), strict=True))
        for name, each in rows.items()
    }


COSTS = Path(__file__).with_name("costs.json")


def write_costs(spans, added, line_bytes, writer_us, imports):
    """Replace what COSTS has of this script; docs/platform.md shows it as a table."""
    record, ours, original = (
        f"{spans[name][0] / 1e3:.1f} µs"
        for name in (
            "recorder.record, 4 fields",
            "span(...), 4 fields",
            "original logger (json + flush)",
        )
    )
    method, coroutine, first, item = (f"{each / 1e3:.1f} µs" for each in added.values())
    off, on = imports["off"], imports["on"]
    costs = {
        "import of the plugin in a process that is not profiled": (
            f"{off['ms']:.1f} ms of CPU, {off['modules']:.0f} modules, no thread"
        ),
        "import of the plugin in a profiled process that has asyncio and msgspec, as a Ray worker has": (
            f"{on['ms']:.0f} ms of CPU, {on['modules']:.0f} modules, {on['megabytes']:.1f} MB of "
            f"memory, {on['threads']:.0f} threads (a third with an event loop)"
        ),
        "an event with four fields in the caller's thread, tight loop": (
            f"{record} (`recorder.record`), {ours} (`span`); the original logger: {original}"
        ),
        "a probed call beyond the call itself, tight loop": (
            f"{method} (method), {coroutine} (coroutine), {first} (coroutine after 10 ms of idling)"
        ),
        "a token of vLLM's stream, tight loop": f"{item}, no event",
        "a line with four fields, tight loop": (
            f"{writer_us:.1f} µs of CPU in the writer thread, {line_bytes:.0f} bytes on disk"
        ),
    }
    measured = [
        each
        for each in json.loads(COSTS.read_text(encoding="utf-8"))
        if each["script"] != "bench_record.py"
    ]
    mine = {"script": "bench_record.py", "date": time.strftime("%Y-%m-%d"), "costs": costs}
    COSTS.write_text(
        json.dumps([mine, *measured], indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the costs to costs.json")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench_record_"))
    spans, line_bytes, writer_us = bench_spans(folder)
    calls, added = bench_calls(folder)
    imports = bench_import()

    ours = spans["recorder.record, 4 fields"][0]
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {time.strftime('%Y-%m-%d')}\n"
    )
    print(f"{'per event, calling thread':<40}{'median':>10}{'p99':>10}{'ratio':>8}")
    for name, (median, p99) in spans.items():
        shown = f"{median:,.0f} ns" if median is not None else ""
        ratio = f"{median / ours:.1f}x" if median is not None else ""
        print(f"{name:<40}{shown:>10}{p99:>7,.0f} ns{ratio:>8}")
    print()
    for name, (median, p99) in calls.items():
        print(f"{name:<40}{median:>7,.0f} ns{p99:>7,.0f} ns")
    for name, nanoseconds in added.items():
        print(f"{'added to a ' + name:<52}{nanoseconds:>7,.0f} ns")
    print(
        f"\nper line with 4 fields: {line_bytes:.0f} bytes, {writer_us:.1f} µs of CPU in the writer"
    )
    print(f"import of the plugin: {imports}")
    if args.write:
        write_costs(spans, added, line_bytes, writer_us, imports)
        print(f"Wrote {COSTS}")


if __name__ == "__main__":
    main()
