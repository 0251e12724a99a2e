"""Spans of one lane, nested whatever their times were rounded to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from verl_profiler.reading.tables.derivations import NESTING_US

__all__ = ["Timed", "nested"]

# Begin and end in microseconds, depth in the vocabulary, and what else belongs to the span.
Timed = tuple[int, int, int, Any]


def nested(spans: Iterable[Timed]) -> Iterator[Timed]:
    """Give parents before children, and clip a child that sticks out by the rounding of times.

    A span is a child of one with a lower depth under the condition of the macro `within`.

    Args:
        spans: In the order of their begin.
    """
    around: list[Timed] = []
    for span in _parents_first(spans):
        begin_us, end_us, depth, about = span
        if around:
            around = [each for each in around if each[1] > begin_us]
        for _, until_us, above, _ in around:
            if above < depth and until_us < end_us and _ends_in(begin_us, end_us, until_us):
                end_us = until_us
        clipped = (begin_us, end_us, depth, about)
        around.append(clipped)
        yield clipped


def _ends_in(begin_us: int, end_us: int, until_us: int) -> bool:
    return end_us <= until_us + NESTING_US and (begin_us + end_us) // 2 <= until_us


def _parents_first(spans: Iterable[Timed]) -> Iterator[Timed]:
    # Those whose parent may still come, in the order of their begin.
    held: list[Timed] = []
    for span in spans:
        from_us, until_us, above, _ = span
        while held and held[0][0] < from_us - NESTING_US:
            yield held.pop(0)
        children = [
            each
            for each in held
            if each[2] > above
            and (each[0] + each[1]) // 2 >= from_us
            and _ends_in(each[0], each[1], until_us)
        ]
        if children:
            held = [each for each in held if each not in children]
        held.append(span)
        held += ((from_us, *each[1:]) for each in children)
    yield from held
