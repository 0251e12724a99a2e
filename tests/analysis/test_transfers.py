"""TransferQueue calls: bytes, time, and time in which any was under way."""

from picked import picked

from verl_profiler.analysis.transfers import weight_transfers


def test_ranks_wait_for_the_last_to_take_part_in_a_bucket(span, tables):
    """Two receivers are there at 0 s; the sender gathers until 2 s, then one of them loads until 6 s."""
    events = [
        span("step", 0, 10, name="trainer_0"),
        span("weight_send", 1, 8, name="actor_0", tensors=4, size_bytes=300, buckets=2),
        span("weight_bucket", 2, 3, name="actor_0", sender=True, size_bytes=200),
        span("weight_bucket", 4, 7, name="actor_0", sender=True, size_bytes=100),
        span("weight_receive", 0, 8, name="rollout_1", tensors=4, size_bytes=300, buckets=2),
        span("weight_transfer", 0, 8, name="rollout_1", tensors=4, size_bytes=300, buckets=2),
        span("weight_bucket", 0, 3, name="rollout_1", sender=False, size_bytes=200),
        span("weight_load", 3, 4, name="rollout_1", size_bytes=200),
        span("weight_bucket", 3, 7, name="rollout_1", sender=False, size_bytes=100),
        span("weight_load", 7, 8, name="rollout_1", size_bytes=100),
        span("weight_receive", 0, 9, name="rollout_2", tensors=4, size_bytes=300, buckets=2),
        span("weight_bucket", 0, 3, name="rollout_2", sender=False, size_bytes=200),
        span("weight_bucket", 6, 7, name="rollout_2", sender=False, size_bytes=100),
    ]

    rows = {(row["name"], row["way"]): row for row in weight_transfers(tables(events, shuffled=3))}

    found = {
        key: picked(row, "total_s moving_s waited_s caused_wait_s") for key, row in rows.items()
    }
    assert {
        ("actor_0", "send"): (7.0, 2.0, 2.0, 4.0),
        ("rollout_1", "receive"): (8.0, 2.0, 5.0, 0.0),
        ("rollout_1", "load"): (8.0, 2.0, None, None),
        ("rollout_2", "receive"): (9.0, 2.0, 2.0, 5.0),
    } == found
    assert {150.0} == {row["bytes_per_s"] for row in rows.values()}
    assert {(2, 4, 300)} == {
        (row["buckets"], row["tensors"], row["size_bytes"]) for row in rows.values()
    }


def test_buckets_that_share_a_line_move_as_long_as_they_took_together(span, tables):
    """The line's own length has the gaps between them; nobody can tell who waited."""
    events = [
        span("weight_send", 0, 9, name="actor_0", size_bytes=600, buckets=3),
        span("weight_bucket", 0, 1, name="actor_0", sender=True, size_bytes=200),
        span(
            "weight_bucket", 2, 9, name="actor_0", sender=True, size_bytes=400, buckets=2,
            transfer_s=3.0,
        ),
        span("weight_bucket", 0, 1, name="rollout_1", sender=False, size_bytes=200),
    ]  # fmt: skip

    (row,) = weight_transfers(tables(events))

    assert (4.0, 0.0, 0.0, 150.0) == picked(row, "moving_s waited_s caused_wait_s bytes_per_s")


def test_an_engine_without_buckets_has_the_speed_of_the_whole(span, tables):
    """As with `nixl`; and bytes are missing where an earlier version wrote none."""
    events = [
        span("weight_receive", 0, 4, name="rollout_1", size_bytes=600, tensors=2),
        span("weight_send", 0, 4, name="actor_0"),
    ]

    sender, receiver = weight_transfers(tables(events))

    assert (150.0, None, None, None) == picked(receiver, "bytes_per_s moving_s waited_s buckets")
    assert (None, None) == (sender["bytes_per_s"], sender["size_bytes"])
