"""Measure a report: its size, and how soon a browser paints and has drawn it.

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

BAR_BYTES = 3_000_000
BAR_PAINT_MS = 1_000
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


def opened(page: Path, picture: Path | None) -> dict[str, Any]:
    """Return medians of first paint and load (milliseconds), and the number of elements."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from views.chromium import Chromium

    browser = Chromium(timeout_s=120)
    try:
        readings: list[dict[str, Any]] = []
        for _ in range(TIMES):
            browser.open(page)
            readings.append(browser.evaluate(_TIMES))
        if picture is not None:
            browser.screenshot(picture, whole=True)
    finally:
        browser.close()
    return {key: statistics.median(each[key] for each in readings) for key in readings[0]}


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
    return int(size > BAR_BYTES or times["paint"] > BAR_PAINT_MS)


if __name__ == "__main__":
    sys.exit(main())
