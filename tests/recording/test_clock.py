"""The clock: one axis, whole microseconds."""

from datetime import datetime

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from verl_profiler.recording.clock import (
    Anchor,
    Timestamps,
    anchor_for_this_boot,
    take_anchor,
)

ANCHOR = Anchor("boot", 1_795_000_000_123_456_789, 5_000_000_000, 50)


def test_a_timestamp_is_the_monotonic_time_placed_by_the_anchor():
    """The anchor's own moment is the anchor's wall time, to the microsecond."""
    timestamps = Timestamps(ANCHOR)

    text = timestamps.text(timestamps.microseconds(ANCHOR.monotonic_ns))

    assert "2026-11-18T11:06:40.123456+00:00" == text


@given(st.integers(0, 10**15), st.integers(0, 10**12))
def test_begin_is_end_minus_duration_to_the_microsecond(begin_ns, length_ns):
    """What a reader computes from a line is what the process measured, rounded down."""
    timestamps = Timestamps(ANCHOR)
    begin = timestamps.microseconds(begin_ns)
    end = timestamps.microseconds(begin_ns + length_ns)
    duration_sec = (end - begin) / 1e6

    first, read = (datetime.fromisoformat(timestamps.text(us)).timestamp() for us in (begin, end))

    assert begin == round(first * 1e6) == round(read * 1e6) - round(duration_sec * 1e6)


def test_processes_of_one_boot_share_the_drivers_anchor():
    """Their lines then lie on one axis exactly; not so on another host, or in a time namespace of its own."""
    driver = take_anchor()
    shared = anchor_for_this_boot(driver)
    assert driver == msgspec.structs.replace(shared, shared=False)
    assert shared.shared

    other_host = msgspec.structs.replace(driver, boot_id="another")
    assert "another" != anchor_for_this_boot(other_host).boot_id
    # Same kernel, other monotonic clock: the driver's pair would be hours off.
    elsewhere = msgspec.structs.replace(driver, monotonic_ns=driver.monotonic_ns - 3600 * 10**9)
    assert not anchor_for_this_boot(elsewhere).shared
