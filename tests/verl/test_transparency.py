"""What verl sees of the probes: nothing.  One test per property, over all probes, on the real classes."""

import pytest

from verl_profiler.probes import all_probes

# Where another engine or trainer would be; not installed together with this one.
ELSEWHERE = ("vllm", "trtllm", "megatron")


@pytest.fixture(scope="module")
def reports(reported):
    """The reports of transparency.py, which runs in a process of its own."""
    return reported("transparency.py")


@pytest.fixture(params=["measuring", "tracing"])
def report(reports, request):
    """The report on the probes that measure, or with those of TransferQueue tracing."""
    return reports[request.param]


def test_every_probe_that_this_verl_has_is_placed(report):
    """Else the other tests would check less than they say."""
    expected = {
        target
        for probe in all_probes()
        for target in probe.targets[:1]
        if not any(word in target for word in ELSEWHERE)
        # Those of engines are placed when one is made (`test_flops.py`).
        and not (probe.optional or probe.of_subclasses)
    }
    placed = {target for targets in report["installed"].values() for target in targets}

    assert set() == expected - placed, report["absent"]
    assert {} == report["missed"]
    assert len(report["targets"]) >= 60


def test_every_target_has_one_wrapper(report):
    """One that is both measured and traced too; a probe takes only one target of a module."""
    counts = report["wrappers"]
    none = {target for target, count in counts.items() if count == 0}

    assert {0, 1} >= set(counts.values())
    assert none.isdisjoint(t for targets in report["installed"].values() for t in targets)


def test_tracing_has_targets_of_its_own(reports):
    """Else the other tests would check the same twice."""
    more = reports["tracing"]["targets"].keys() - reports["measuring"]["targets"].keys()

    assert len(more) >= 20
    assert any("_compute_advantage" in target for target in more)


def test_no_caller_notices_a_probe(report):
    """Signature, kind and attributes stay, also where verl finds a worker's methods by them.

    Results and exceptions are tried in tests/instrumentation, with each probe in each kind of function.
    """
    assert {} == {target: odd for target, odd in report["targets"].items() if odd}
    assert [target for target in report["registered"] if "update_actor" in target]


def test_probes_are_placed_once_and_taken_off_whole(report):
    """Nothing is placed without settings; the entry point and Ray's hook may both load the plugin."""
    assert report["untouched"]
    assert [] == report["wrapped_twice"]
    assert [] == report["not_restored"]


def test_every_wrapper_survives_pickling_by_value_and_by_reference(reports):
    """In a process that records nothing, as on a node that is not profiled."""
    here = {
        target: error
        for target, error in reports["tracing"]["unpicklable"].items()
        if not any(word in target for word in ELSEWHERE)
    }

    assert {} == here
