"""Buckets of verl's NIXL checkpoint engine: its own classes over fakes of its libraries."""


def test_each_bucket_has_a_line_on_both_sides(reported):
    """A rank that relays counts each once; what a read moves is the whole buffer."""
    report = reported("nixl_probes.py")
    lines = [
        (each["extra"]["sender"], each["extra"].get("size_bytes"))
        for each in report["events"]
        if each["event"] == "weight_bucket"
    ]
    (sent,) = (each for each in report["events"] if each["event"] == "weight_send")

    assert {} == report["errors"]
    assert [3, 3, True] == [report["buckets"], report["relayed"], report["same"]]
    assert [(True, None)] * 3 + [(False, 64)] * 3 == lines
    assert (3, 132, 2) == tuple(
        sent["extra"][name] for name in ("buckets", "size_bytes", "weight_version")
    )
    assert all(
        0 <= each["duration_sec"] < 60 for each in report["events"] if "duration_sec" in each
    )
