"""Measure a report: its size, how soon a browser paints and has drawn it, and frames of zooming.

    python benchmarks/bench_report.py /tmp/run
    python benchmarks/bench_report.py /tmp/run --picture /tmp/report.png

Needs Chromium.  The page is opened from disk three times in a fresh tab; the medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BAR_BYTES = 2_500_000
BAR_PAINT_MS = 500
TIMES = 3

# A page is drawn when its last section is; the browser's own clock starts with the navigation.
_TIMES = """
(() => {
  const paint = performance.getEntriesByType('paint');
  const first = paint.find((each) => each.name === 'first-contentful-paint') || paint[0];
  const [page] = performance.getEntriesByType('navigation');
  return {paint: first ? first.startTime : null, drawn: page.loadEventEnd,
          nodes: document.querySelectorAll('*').length};
})()
"""

# Zooms in and out, a key per frame; returns how long each frame took, in milliseconds, and how much of it
# the script did.
_FRAMES = """
new Promise((done) => {
  const canvas = document.querySelector('.lane-canvas');
  const [frames, scripts] = [[], []];
  let last = null;
  const frame = (now) => {
    if (last !== null) frames.push(now - last);
    last = now;
    const begin = performance.now();
    const key = frames.length % 16 < 8 ? '+' : '-';
    canvas.dispatchEvent(new KeyboardEvent('keydown', {key}));
    scripts.push(performance.now() - begin);
    if (frames.length < 240) requestAnimationFrame(frame);
    else done({frames, scripts});
  };
  requestAnimationFrame(frame);
})
"""


def opened(page: Path, picture: Path | None) -> dict[str, Any]:
    """Return medians of first paint and load, the number of elements, and frames of zooming (milliseconds)."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from views.chromium import Chromium

    browser = Chromium(timeout_s=120)
    try:
        readings: list[dict[str, Any]] = []
        for _ in range(TIMES):
            browser.open(page)
            readings.append(browser.evaluate(_TIMES))
        zoomed = browser.evaluate(_FRAMES)
        if picture is not None:
            browser.screenshot(picture, whole=True)
    finally:
        browser.close()
    medians = {key: statistics.median(each[key] for each in readings) for key in readings[0]}
    for key, values in zoomed.items():
        ordered = sorted(values)
        medians |= {
            key: ordered[len(ordered) // 2],
            f"{key}_p95": ordered[len(ordered) * 95 // 100],
        }
    return medians


def main() -> int:
    """Print the figures; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--picture", type=Path, help="where to put a picture of the page")
    parser.add_argument("--out", type=Path, help="where to keep the report")
    args = parser.parse_args()
    from verl_profiler.cli import main as command

    with tempfile.TemporaryDirectory() as folder:
        page = args.out or Path(folder) / "report.html"
        begin = time.perf_counter()
        if command(["report", str(args.run), "-o", str(page), "--force"]) != 0:
            return 1
        made_s = time.perf_counter() - begin
        size = page.stat().st_size
        times = opened(page, args.picture)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"  report made in {made_s:.1f} s, {size / 1e6:.2f} MB, {times['nodes']:,.0f} elements")
    print(f"  first paint after {times['paint']:,.0f} ms, drawn after {times['drawn']:,.0f} ms")
    print(
        f"  zooming: {times['frames']:.1f} ms per frame (P95 {times['frames_p95']:.1f}), "
        f"{times['scripts']:.1f} ms of it in the script (P95 {times['scripts_p95']:.1f})"
    )
    return int(size > BAR_BYTES or times["paint"] > BAR_PAINT_MS)


if __name__ == "__main__":
    sys.exit(main())
