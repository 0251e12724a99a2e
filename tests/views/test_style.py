"""The colors of the reports."""

from __future__ import annotations

import itertools
import math

import pytest

from verl_profiler.events.vocabulary import PHASES
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.render import colors

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(code: str, vision: str) -> tuple[float, float, float]:
    """Return where in OKLab someone sees a color."""
    parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    r, g, b = (
        min(1.0, max(0.0, sum(a * c for a, c in zip(row, linear, strict=True))))
        for row in VISION[vision]
    )
    cones = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    x, y, z = (math.copysign(abs(each) ** (1 / 3), each) for each in cones)
    return (
        0.2104542553 * x + 0.7936177850 * y - 0.0040720468 * z,
        1.9779984951 * x - 2.4285922050 * y + 0.4505937099 * z,
        0.0259040371 * x + 0.7827717662 * y - 0.8086757660 * z,
    )


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "family",
    [
        colors.PHASE_COLORS,
        {name: code for name, code in colors.PART_COLORS.items() if name != "engine"},
        {
            name: code
            for name, code in colors.PART_COLORS.items()
            if name not in colors.ENGINE_COLORS
        },
        colors.CALL_PART_COLORS,
        colors.ACCOUNT_COLORS,
    ],
    ids=["phases", "parts with the engine's", "parts", "parts of calls", "accounts"],
)
def test_every_two_colors_of_a_family_stay_apart(family, vision):
    """No two colors of one figure look alike, whoever looks; 0.02 is a just noticeable difference."""
    places = {name: seen(code, vision) for name, code in family.items()}

    close = [
        (a, b)
        for a, b in itertools.combinations(places, 2)
        if math.dist(places[a], places[b]) < 0.07
    ]

    assert close == []


def test_every_phase_and_part_has_a_color_of_its_own():
    """No phase of verl's and no part of a request falls back to a spare color."""
    assert set(PHASES) <= set(colors.PHASE_COLORS)
    assert {*REQUEST_PARTS, "other"} <= set(colors.PART_COLORS)


def test_an_unknown_name_keeps_its_color():
    """A user's timer looks the same in every process, in spite of randomized hashes."""
    assert "#9B9B7A" == colors.color("my_timer")


def test_a_shared_name_has_one_color():
    """`reward` is a phase and a part; both figures show it in the same color."""
    for name in set(colors.PHASE_COLORS) & set(colors.PART_COLORS):
        assert colors.PHASE_COLORS[name] == colors.PART_COLORS[name]
