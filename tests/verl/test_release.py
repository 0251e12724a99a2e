"""verl's SGLang server drops each generator after one item; nothing of a request may stay for it."""

import pytest


@pytest.fixture(scope="module")
def report(reported):
    """The report of release.py, which runs in a process of its own."""
    return reported("release.py")


def test_both_real_classes_are_probed(report):
    """Else the other tests would see the bare ones."""
    targets = [target for targets in report["installed"].values() for target in targets]

    assert {} == report["errors"]
    assert any(target.endswith("SGLangHttpServer.generate") for target in targets)
    assert any(target.endswith("TokenizerManager.generate_request") for target in targets)


def test_each_request_is_recorded_with_its_end(report):
    """Twenty of each kind."""
    assert 80 == report["events"]
    assert [
        ["cancel", "cancelled"],
        ["raise", "error"],
        ["return", "ok"],
        ["timeout", "cancelled"],
    ] == report["statuses"]


@pytest.mark.parametrize("ending", ["return", "raise", "cancel", "timeout"])
def test_prompts_requests_and_answers_are_free(report, ending):
    """As they are without the profiler."""
    watched, alive = report["probed"][ending]

    assert report["bare"][ending] == [watched, 0]
    assert watched >= 40
    assert 0 == alive
