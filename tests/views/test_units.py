"""Numbers with units: the same text in the terminal and on the page."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from verl_profiler import units
from verl_profiler.render import html

DURATIONS = [
    (None, "-"),
    (0, "0 s"),
    (-0.000_000_4, "0 s"),
    (0.000_000_5, "1 µs"),
    (0.000_002_5, "3 µs"),
    (0.000_012, "12 µs"),
    (0.0004, "400 µs"),
    (0.0012, "1.2 ms"),
    (0.00625, "6.3 ms"),
    (0.0625, "63 ms"),
    (0.312, "312 ms"),
    (0.9996, "1.00 s"),
    (1.125, "1.13 s"),
    (6.7, "6.70 s"),
    (10.25, "10.3 s"),
    (61.04, "61.0 s"),
    (120.5, "2 min 1 s"),
    (725, "12 min 5 s"),
    (7199.5, "2 h 0 min"),
    (9000, "2 h 30 min"),
    (-0.5, "-500 ms"),
]
SHARES = [
    (None, "-"),
    (0, "0 %"),
    (-0.0, "0 %"),
    (0.0001, "<0.1 %"),
    (-0.0002, ">-0.1 %"),
    (-0.003, "-0.3 %"),
    (0.0025, "0.3 %"),
    (0.031, "3.1 %"),
    (0.0995, "10 %"),
    (0.125, "13 %"),
    (0.61, "61 %"),
    (1, "100 %"),
    (-0.37, "-37 %"),
    (-0.125, "-13 %"),
]
SIZES = [
    (None, "-"),
    (0, "0 B"),
    (0.5, "1 B"),
    (999, "999 B"),
    (1024, "1.0 KiB"),
    (1400, "1.4 KiB"),
    (150 << 10, "150 KiB"),
    ((1 << 20) - 1, "1.0 MiB"),
    (15_938_355, "15.2 MiB"),
    (80 << 30, "80.0 GiB"),
    (3 << 40, "3.0 TiB"),
    (-(20 << 20), "-20.0 MiB"),
]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (name, *pair)
        for name, pairs in (("seconds", DURATIONS), ("share", SHARES), ("size", SIZES))
        for pair in pairs
    ],
)
def test_a_number_has_few_digits_and_a_unit(name, value, text):
    """Bytes are in powers of 1024, ties are rounded up, zero has no sign."""
    assert text == getattr(units, name)(value)


@pytest.mark.parametrize("name", ["seconds", "share", "size"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_missing(name, value):
    """A damaged file may have one."""
    assert "-" == getattr(units, name)(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1250.4, "1,250"), (38.2, "38"), (9.94, "9.9"), (0.3, "0.3"), (0.0123, "0.012")],
)
def test_rates(value, text):
    """The unit is in the heading, or follows."""
    assert text == units.rate(value)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "pairs"), [("seconds", DURATIONS), ("share", SHARES), ("size", SIZES)]
)
def test_the_page_writes_the_same_text(browser, name, pairs):
    """Of the values above, of values between and beside them, and of their negatives."""
    known = [value for value, _ in pairs if value is not None]
    steps = [
        10**power * factor for power in range(-8, 16) for factor in (1, 2.5, 4.95, 9.949, 9.95)
    ]
    between = [(low + high) / 2 for low, high in pairwise(known)]
    beside = [math.nextafter(value, end) for value in known for end in (-math.inf, math.inf)]
    values = [*known, *steps, *between, *beside]
    values += [-value for value in values]
    text = (Path(html.__file__).with_name("page") / "format.js").read_text(encoding="utf-8")
    shown = browser.evaluate(
        f"(() => {{{text.replace('export ', '')}; return {json.dumps(values)}.map({name}); }})()"
    )

    assert [getattr(units, name)(value) for value in values] == shown
