"""Measure writing a run's timeline, beside encoding as many spans with Perfetto's own classes.

    python benchmarks/bench_perfetto.py                 1e6 events
    python benchmarks/bench_perfetto.py --events 1e5
    python benchmarks/bench_perfetto.py --run /tmp/run

Without `--all`, a timeline of a large run is a sample: at most 200 tracks and 100 MB.  Both are measured.
The run is opened twice, so that its Parquet cache is there, as it is after a summary.  The classes
encode spans with three fields and their ends, and neither read the run nor place it in lanes.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR_S = 10.0
BAR_TRACKS = 200
BAR_MB = 100


def timeline(folder: Path, *, everything: bool) -> tuple[float, float, int, int]:
    """Return wall seconds, CPU seconds, bytes and tracks of writing the timeline."""
    from verl_profiler.exports.perfetto import PerfettoTrace
    from verl_profiler.exports.tracks import choose, origin_ns, write_run
    from verl_profiler.reading.reader import load

    load(folder).close()
    wall, cpu = time.perf_counter(), time.process_time()
    with load(folder) as run, tempfile.TemporaryFile() as file:
        selection = None if everything else choose(run.tables, None)
        trace = PerfettoTrace(file, origin_ns(run.tables, None))
        write_run(run.tables, None, trace, selection)
        trace.close()
        size = file.tell()
    return time.perf_counter() - wall, time.process_time() - cpu, size, trace.tracks


def classes(spans: int) -> float:
    """Return wall seconds of encoding spans with the classes that Perfetto ships."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    file = io.BytesIO()
    begin = time.perf_counter()
    for number in range(spans):
        for kind in (1, 2):
            trace = protos.Trace()
            packet = trace.packet.add()
            packet.timestamp = 10**18 + number
            packet.trusted_packet_sequence_id = 1
            event = packet.track_event
            event.type, event.track_uuid = kind, 1
            if kind == 1:
                event.name_iid = 1
                for place, value in enumerate((3, number, "3d15eef738c1962e9148624feac1c14f")):
                    annotation = event.debug_annotations.add()
                    annotation.name_iid = place + 1
                    if isinstance(value, int):
                        annotation.int_value = value
                    else:
                        annotation.string_value = value
            file.write(trace.SerializeToString())
    return time.perf_counter() - begin


def main() -> int:
    """Print the comparison; return 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=float, default=1e6)
    parser.add_argument("--run", type=Path, help="measure this run instead, by default alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.run or Path(name) / "run"
        if args.run is None:
            script = str(Path(__file__).with_name("generate_events.py"))
            command = [sys.executable, script, str(folder), "--events", str(args.events)]
            subprocess.run(command, check=True, capture_output=True)
        measured = {"by default": timeline(folder, everything=False)}
        if args.run is None:
            measured["--all"] = timeline(folder, everything=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, (wall, cpu, size, tracks) in measured.items():
        print(
            f"  {name:<19} {wall:6.1f} s wall, {cpu:6.1f} s CPU, {size / 1e6:.1f} MB, "
            f"{tracks:,} tracks"
        )
    _, _, size, tracks = measured["by default"]
    missed = tracks > BAR_TRACKS or size > BAR_MB * 1e6
    if args.run is None:
        encoded = classes(int(args.events))
        print(f"  Perfetto's classes  {encoded:6.1f} s wall for the encoding alone")
        missed |= args.events == 1e6 and measured["--all"][0] > BAR_S
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
