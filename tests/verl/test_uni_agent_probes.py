"""Sessions of uni-agent are requests that are joined to their samples, and to the calls of its gateways."""

import os
import re
from pathlib import Path

import pytest

from verl_profiler.reading.reader import load

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def report(reported):
    return reported("uni_agent_probes.py", probed=True)


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


def test_the_query_of_the_docs_joins_the_calls_to_their_samples(report):
    """Word for word; the folder is that of the run above, as it was recorded."""
    (query,) = re.findall(
        r"^    SELECT r\.uid.*?(?=\n\n)", API.read_text(), re.DOTALL | re.MULTILINE
    )
    taken_s = sum(
        each["duration_sec"]
        for each in named(report, "engine_call")
        if each["extra"]["conversation"]
        in {r["extra"]["request_id"] for r in named(report, "request") if r["extra"]["uid"] == "p"}
    )
    with load(report["folder"]) as run:
        rows = run.rows(query)

    assert {("p", "0", 5, 2), ("p", "1", 5, 2)} == {
        (row["uid"], row["session"], row["consumed_step"], row["calls"]) for row in rows
    }
    assert taken_s == pytest.approx(sum(row["seconds"] for row in rows), abs=1e-5)
