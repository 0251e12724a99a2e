"""What is recorded of the real vLLM's requests: ended, aborted, cancelled, refused."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.rehearsal import model
from verl_profiler.rehearsal.environment import environment

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.verl,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("verl", "vllm")),
        reason="needs vllm; docs/versions.md says how to run it",
    ),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of real_vllm.py, which runs in a process of its own."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "STEPS", 1)
        patch.setattr(model, "TOKENIZER_DIALOGUES", 100)
        model.make(folder, [], seed=0)
    path = f"{HERE.parent / 'verl'}{os.pathsep}{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    current = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(HERE / "real_vllm.py"), str(folder)],
        env={**current, **environment("vllm", current)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT "))


@pytest.fixture
def served(report):
    """What was recorded of each request, by its id."""
    requests = [line for line in report["events"] if line["event"] == "engine_request"]
    return {line["extra"]["engine_request_id"]: line for line in requests}


def test_every_request_is_recorded_with_its_end(report, served):
    """As verl's server answered, or failed to."""
    assert {} == report["errors"]
    assert ["completed", 4] == report["answers"]["first"] == report["answers"]["again"]
    assert "aborted" == report["answers"]["aborted"][0]
    assert {"cancelled": "CancelledError"}.items() <= report["problems"].items()
    assert {
        "first": (None, None),
        "again": (None, None),
        "aborted": (None, None),
        "cancelled": ("cancelled", "CancelledError"),
        "wrong": ("error", report["problems"]["wrong"]),
    } == {
        name: (line["extra"].get("status"), line["extra"].get("error"))
        for name, line in served.items()
    }


def test_tokens_are_those_of_the_answer(report, served):
    """Of the prompt, of the response, and of the prefix that an earlier request left."""
    assert {300} == {line["extra"]["prompt_tokens"] for line in served.values()}
    for name, (_, tokens) in report["answers"].items():
        assert tokens == served[name]["extra"]["response_tokens"]
        assert 4 == served[name]["extra"]["weight_version"]
    assert 0 == served["first"]["extra"]["cached_tokens"]
    assert 128 <= served["again"]["extra"]["cached_tokens"] < 300


def test_parts_fit_into_their_request(served):
    """vLLM's core tells them on its own clock."""
    for name in ("first", "again"):
        extra = served[name]["extra"]
        parts = [extra[part] for part in ("queue_s", "prefill_s", "decode_s")]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= served[name]["duration_sec"]


def test_releases_and_resumes_are_those_of_the_engine(report):
    """A CPU has nothing to release, and vLLM says so; they are called all the same."""
    moves = [
        (line["event"], line["extra"]["tags"])
        for line in report["events"]
        if line["event"].startswith("memory_re")
    ]

    assert [("memory_release", ["all"]), ("memory_resume", ["weights"])] == moves


def test_the_load_adds_up_to_the_requests(report, served):
    """Tokens, prefix cache and batch by vLLM's own counts, against what was asked of it."""
    states = [line["extra"] for line in report["events"] if line["event"] == "engine_state"]

    def total(key):
        return sum(state.get(key, 0) for state in states)

    answered = sum(tokens for _, tokens in report["answers"].values())
    assert 64 < states[0]["kv_capacity_tokens"] == states[-1]["kv_capacity_tokens"]
    assert {1} == {state["running_requests"] for state in states if state["running_requests"]}
    assert 0 == states[-1]["running_requests"] + states[-1]["waiting_requests"]
    assert all(0 <= state["kv_used_tokens"] <= state["kv_capacity_tokens"] for state in states)
    # The cancelled request generated tokens too, and no one received those of the last iteration.
    assert total("decode_tokens") >= answered
    assert total("iterations") >= answered
    assert 0 == total("retractions")
    cached = sum(line["extra"].get("cached_tokens") or 0 for line in served.values())
    assert cached <= total("prefix_hit_tokens") < total("prefix_queried_tokens")
    assert 300 <= total("prefill_tokens") <= 4 * 300 - cached
