"""What sampling the devices of a host costs, with a fake driver or, if there is one, the real one.

    python benchmarks/bench_devices.py [--devices 8] [--readings 2000]

With nvidia-ml-py and a driver, the time of the driver's calls is part of it.  Without, a fake answers at once
with values that change at each reading (`tests/fake_nvml.py`): what is measured is then the profiler's
own part.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def _feed(devices: int) -> dict[str, Any]:
    """Return a feed that changes every millisecond."""
    readings = [
        {
            "utilizationGpu": place % 100,
            "utilizationMemory": place % 60,
            "memoryUsed": 70_000_000_000 + place,
            "power": 700_000 - 1000 * place,
            "clockSm": 1980 - place % 50,
            "clockMem": 2619,
            "temperature": 60 + place % 20,
            "clocksEventReasons": 4 * (place % 2),
        }
        for place in range(100)
    ]
    facts = {"name": "Fake", "powerLimit": 700_000, "memoryTotal": 85_899_345_920}
    return {
        "devices": [{"uuid": f"GPU-{number}", "busId": "0", **facts} for number in range(devices)],
        "period_s": 0.001,
        "readings": [readings],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8, help="of the fake driver")
    parser.add_argument("--readings", type=int, default=2000, help="of each device")
    chosen = parser.parse_args()

    from verl_profiler.recording import devices
    from verl_profiler.recording.clock import now, take_anchor
    from verl_profiler.recording.encoding import LineEncoder

    devices.visible_words = lambda: None
    library, opened = devices.LIBRARY, devices.open_devices()
    if not opened:
        import fake_nvml

        fake_nvml.load(_feed(chosen.devices))
        sys.modules["pynvml"] = fake_nvml
        opened = devices.open_devices()
        library = "a fake driver"
    for device in opened:
        device.read()
    encoder = LineEncoder(take_anchor(), Path("/nowhere"))
    sizes: list[int] = []
    before_cpu, before = time.thread_time(), time.perf_counter()
    for _ in range(chosen.readings):
        for device in opened:
            extra = {"device": device.index, **device.read()}
            sizes.append(len(encoder.encode(("device", None, now(), extra, 12))[1]))
    cpu_s, wall_s = time.thread_time() - before_cpu, time.perf_counter() - before
    many = len(sizes)
    print(f"{library}: {len(opened)} devices, {many:,} readings on {os.cpu_count()} cores")
    print(
        f"a reading with its line: {cpu_s / many * 1e6:.0f} us of CPU, {wall_s / many * 1e6:.0f} us"
    )
    print(f"a line: {sum(sizes) / many:.0f} bytes, at most {max(sizes)}")
    print(
        f"at one reading per second of {len(opened)} devices: {cpu_s / many * len(opened):.4%} of a "
        f"core, at most {max(sizes) * len(opened)} B/s"
    )


if __name__ == "__main__":
    main()
