"""Sessions of uni-agent are requests that are joined to their samples, and to the calls of its gateways."""

import os

import pytest


@pytest.fixture(scope="module")
def report(reported):
    return reported("uni_agent_probes.py")


def named(report, event):
    return [each for each in report["events"] if each["event"] == event]


def test_each_session_is_a_request_of_its_sample(report):
    """verl stores the sample under uid, session and output; validation and failures are marked."""
    found = sorted(
        (
            each["step"],
            *(each["extra"].get(name) for name in ("uid", "session", "sample", "agent")),
            each["extra"].get("validate", False),
            each["extra"].get("status"),
        )
        for each in named(report, "request")
    )

    assert os.environ.get("UNI_AGENT_CHECKOUT", "fakes") in report["source"]
    assert {} == report["errors"]
    assert ["ValueError('fail')"] == report["failures"]
    assert [
        (3, "p", 0, 7, "solver", False, None),
        (3, "p", 1, 7, "solver", False, None),
        (3, "v", 0, 7, "solver", True, None),
        (4, "f", 0, 7, "solver", False, "error"),
    ] == found
    assert 4 == len(named(report, "request_start"))


def test_calls_of_the_gateways_name_the_request(report):
    """Its id is what a gateway passes to the client; spans of the agent belong to it, too."""
    ids = {each["extra"]["request_id"] for each in named(report, "request")}
    calls = [each["extra"]["conversation"] for each in named(report, "engine_call")]

    assert 4 == len(ids)
    assert sorted([*ids, *ids]) == sorted(calls)
    assert ids == {each["extra"]["request_id"] for each in named(report, "sandbox")}
