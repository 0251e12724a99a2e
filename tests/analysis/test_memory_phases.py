"""Memory readings, in the order of a step."""

from verl_profiler.analysis.memory import memory_phases

GIB = 1 << 30


def reading(span, at_s, at, used, *, name="actor_0", total=80):
    return {
        **span(
            "memory",
            at_s,
            at_s,
            name=name,
            at=at,
            allocated_bytes=used * GIB // 2,
            reserved_bytes=used * GIB,
            used_bytes=used * GIB,
            total_bytes=total * GIB if total > 1 else total,
        ),
        "duration_us": None,
    }


def test_checkpoints_are_in_the_order_of_the_step(span, tables):
    """With the fullest process of each; two ranks are one row."""
    events = [
        reading(span, 2, "after update", 30),
        reading(span, 1, "before update", 10),
        reading(span, 1.5, "before update", 20, name="actor_1"),
    ]

    first, second = memory_phases(tables(events))

    assert ("before update", 1, 2, 2, 20 * GIB, 10 * GIB, "actor_1") == tuple(
        first[key]
        for key in (
            "at",
            "place",
            "readings",
            "processes",
            "used_bytes",
            "lowest_used_bytes",
            "fullest",
        )
    )
    assert ("after update", 2, 15 * GIB) == tuple(
        second[key] for key in ("at", "place", "allocated_bytes")
    )


def test_a_cpu_has_no_device_memory(span, tables):
    """verl reports 1 byte of 1 there."""
    assert [] == memory_phases(tables([reading(span, 1, "x", 0, total=1)]))
