"""What is recorded of weight syncs, on verl's own checkpoint-engine worker and a real gloo group."""

import pytest

from verl_profiler.probes.weight_transfers import LIMIT

# Of the script's two syncs: bytes of each weight, and how many buckets of 64 bytes they take.
WEIGHTS = {1: [64] * 99 + [192], 2: [64, 16]}
BUCKETS = {1: 102, 2: 2}


@pytest.fixture(scope="module")
def report(reported):
    return reported("weight_probes.py")


def extras(events, event, step):
    """Return the fields of a step's events, in the order of the file."""
    return [each["extra"] for each in events if (each["event"], each["step"]) == (event, step)]


def test_no_probe_fails(report):
    """A failure is counted, and hidden from verl."""
    assert [{}, {}, {}] == [report["errors"], *(each["errors"] for each in report["receivers"])]


def test_weights_arrive_as_they_were(report):
    """Whatever counts them on the way."""
    for receiver in report["receivers"]:
        assert list(WEIGHTS.values()) == receiver["received"]


@pytest.mark.parametrize("step", WEIGHTS)
def test_senders_and_receivers_count_the_same(report, step):
    """Tensors, bytes and buckets; the rank that only takes part in gathering has none."""
    wanted = {
        "weight_version": step,
        "tensors": len(WEIGHTS[step]),
        "size_bytes": sum(WEIGHTS[step]),
        "buckets": BUCKETS[step],
    }

    assert [wanted, {"weight_version": step}] == extras(report["events"], "weight_send", step)
    for receiver in report["receivers"]:
        assert [wanted] == extras(receiver["events"], "weight_receive", step)


@pytest.mark.parametrize("step", WEIGHTS)
def test_each_bucket_has_a_line_up_to_the_limit(report, step):
    """The others of a sync share one, so that a large model makes no more lines than a small one."""
    for events in (report["events"], *(each["events"] for each in report["receivers"])):
        lines = extras(events, "weight_bucket", step)
        single = [each for each in lines if "buckets" not in each]
        shared = [each for each in lines if "buckets" in each]
        assert min(LIMIT, BUCKETS[step]) == len(single)
        assert [BUCKETS[step] - LIMIT] * (BUCKETS[step] > LIMIT) == [x["buckets"] for x in shared]
        assert sum(WEIGHTS[step]) == sum(each["size_bytes"] for each in lines)
        assert {events is report["events"]} == {each["sender"] for each in lines}
        assert all(each["transfer_s"] > 0 for each in shared)
