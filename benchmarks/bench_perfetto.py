"""Measure writing a run's timeline, beside encoding as many spans with Perfetto's own classes.

    python benchmarks/bench_perfetto.py                 1e6 events
    python benchmarks/bench_perfetto.py --events 1e5

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


def timeline(folder: Path) -> tuple[float, float, int]:
    """Return wall seconds, CPU seconds and bytes of writing the timeline."""
    from verl_profiler.exports.perfetto import PerfettoTrace
    from verl_profiler.exports.tracks import origin_ns, write_run
    from verl_profiler.reading.reader import load

    load(folder).close()
    wall, cpu = time.perf_counter(), time.process_time()
    with load(folder) as run, (folder / "timeline.pftrace").open("wb") as file:
        trace = PerfettoTrace(file, origin_ns(run.tables, None))
        write_run(run.tables, None, trace)
        trace.close()
        size = file.tell()
    return time.perf_counter() - wall, time.process_time() - cpu, size


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
    events = int(parser.parse_args().events)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, str(Path(__file__).with_name("generate_events.py")), str(folder)]
        subprocess.run([*command, "--events", str(events)], check=True, capture_output=True)
        wall, cpu, size = timeline(folder)
    encoded = classes(events)
    load = os.getloadavg()[0]
    print(f"{events:,} events; load {load:.1f} on {os.cpu_count()} cores")
    print(f"  timeline            {wall:6.1f} s wall, {cpu:6.1f} s CPU, {size / 1e6:.0f} MB")
    print(f"  Perfetto's classes  {encoded:6.1f} s wall for the encoding alone")
    return int(events == 1_000_000 and wall > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
