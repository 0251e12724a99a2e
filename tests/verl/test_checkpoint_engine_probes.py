"""Buckets of verl's checkpoint engines over one-sided reads: its own classes, over fakes of their libraries."""

BUCKETS = [64, 60, 8]


def buckets(report):
    return [
        (each["extra"]["sender"], each["extra"].get("size_bytes"))
        for each in report["events"]
        if each["event"] == "weight_bucket"
    ]


def test_each_bucket_of_mooncake_has_a_line_in_each_rank(reported):
    """Of a sender its wait until the bucket was read; a rank that relays counts each once."""
    sender, *receivers = reported("mooncake_probes.py", probed=True)
    wanted = [[str(at), [at] * size] for at, size in enumerate((40, 24, 60, 8))]

    assert [{}] * 3 == [each["errors"] for each in (sender, *receivers)]
    assert [(True, None)] * 3 == buckets(sender)
    for each in receivers:
        assert wanted == each["got"]
        assert [(False, size) for size in BUCKETS] == buckets(each)
        (sync,) = (line for line in each["events"] if line["event"] == "weight_receive")
        assert (3, 2) == (sync["extra"]["buckets"], sync["extra"]["weight_version"])


def test_each_bucket_of_kimi_is_broadcast_by_the_rank_that_read_it(reported):
    report = reported("kimi_probes.py", probed=True)
    (sync,) = (each for each in report["events"] if each["event"] == "weight_receive")

    assert {} == report["errors"]
    assert report["wanted"] == report["got"]
    assert [(True, 64), (False, 68)] == buckets(report)
    assert 2 == sync["extra"]["buckets"]
