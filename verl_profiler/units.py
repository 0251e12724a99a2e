"""Numbers with units, the same in commands, plots and the page (its format.js follows these rules).

    seconds(0.0004)     ->  400 µs          share(0.613)    ->  61 %
    size(1_300_000)     ->  1.2 MiB         rate(1250.4)    ->  1,250 (MiB/s)

Ties are rounded up, as in JavaScript. Missing values, infinity and NaN are `-`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value: float | None) -> str:
    """Write a duration in seconds with two or three digits: `0.4 ms`, `312 ms`, `12 min 5 s`."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 0.000_000_5:
        return "0 s"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0095:
        return f"{_fixed(value * 1e6, 0)} µs" if value < 0.001 else f"{_fixed(value * 1e3, 1)} ms"
    if value < 0.9995:
        return f"{_fixed(value * 1e3, 0)} ms"
    if value < 119.95:
        return f"{_fixed(value, 2 if value < 9.995 else 1)} s"
    minutes, rest = divmod(math.floor(value + 0.5), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def quantile_texts(row: Mapping[str, Any], *names: str) -> list[str]:
    """Write quantiles of durations, `too few` where there are fewer values than a quantile needs.

    Args:
        row: With columns such as `p50_s`, `p95_s` and `max_s`, in seconds.
        names: Of the columns, without `_s`; the maximum, which shows whether there are any, last.
    """
    some = row[f"{names[-1]}_s"] is not None
    return [
        "too few" if some and row[f"{name}_s"] is None else seconds(row[f"{name}_s"])
        for name in names
    ]


def share(value: float | None) -> str:
    """Write a share as percent: `61 %`, `0.3 %`, `<0.1 %`, `-12 %`, `>-0.1 %`."""
    if value is None or not math.isfinite(value):
        return "-"
    percent = value * 100
    if 0 < abs(percent) < 0.05:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    if percent < 0:
        return f"-{share(-value)}"
    return f"{_fixed(percent, 1 if 0 < percent < 9.95 else 0)} %"


def size(value: float | None) -> str:
    """Write a number of bytes: `512 B`, `1.4 GiB`, in powers of 1024."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0:
        return f"-{size(-value)}"
    if value < 1023.5:
        return f"{_fixed(value, 0)} B"
    for unit in BYTE_UNITS[1:-1]:
        value /= 1024
        if value < 1023.5:
            return f"{_fixed(value, 1 if value < 99.95 else 0)} {unit}"
    return f"{_fixed(value / 1024, 1)} {BYTE_UNITS[-1]}"


def rate(value: float | None) -> str:
    """Write a rate, without its unit: `1,250`, `92`, `0.3`."""
    if value is None or not math.isfinite(value):
        return "-"
    if value >= 9.95:
        return f"{math.floor(value + 0.5):,}"
    return _fixed(value, 1) if value >= 0.095 else f"{value:.2g}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """Write a number of things: `1 call`, `2,300 calls`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: Iterable[str], most: int) -> str:
    """Write the first of some names: `a, b and 3 others`."""
    listed = list(names)
    shown = ", ".join(listed[:most])
    more = len(listed) - most
    return shown if more <= 0 else f"{shown} and {counted(more, 'other')}"


def _fixed(value: float, digits: int) -> str:
    """Write a number that is not negative with this many decimals; a tie is rounded up."""
    scale = 10**digits
    return f"{math.floor(value * scale + 0.5) / scale:.{digits}f}"
