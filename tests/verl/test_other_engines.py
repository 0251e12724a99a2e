"""What is recorded of vLLM and TensorRT-LLM: on verl's own servers, with fakes of the engines.

The real vLLM runs in tests/rehearsal where it is installed; TensorRT-LLM has no build for CPUs.
"""

import pytest

TIMES = {"cached_tokens": 2, "queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.25}


@pytest.fixture(scope="module")
def report(reported):
    """The report of other_engines.py, which runs in a process of its own."""
    return reported("other_engines.py")


@pytest.fixture(params=["vllm", "trtllm"])
def asked(request, report):
    """One engine's part of the report."""
    return request.param, report[request.param]


def test_verl_gets_its_answers(asked):
    """The fakes answer in a form that verl's own code takes, and no probe failed."""
    engine, told = asked
    completed = "completed" if engine == "vllm" else None

    assert {"stop": completed, "abort": "aborted", "error": "ConnectionError"} == told["reasons"]
    assert {} == told["errors"] == told["missed"]


def test_each_request_is_recorded_as_on_sglang(asked):
    """The same fields, and those of the engine's own account that it has."""
    engine, told = asked
    times = TIMES if engine == "vllm" else {}
    served = {
        line["extra"].pop("engine_request_id"): line["extra"]
        for line in told["events"]
        if line["event"] == "engine_request"
    }
    assert {"parked", "late"} == {*served} - {"stop", "abort", "error"}
    served = {name: served[name] for name in ("stop", "abort", "error")}
    whole = {"prompt_tokens": 3, "response_tokens": 3, "weight_version": 4, **times}

    assert {
        "stop": whole,
        "abort": {**whole, "finish_reason": "aborted"},
        "error": {"prompt_tokens": 3, "status": "error", "error": "ConnectionError"},
    } == served
    # The weights of step 4 serve the requests of step 5.
    assert {5} == {line["step"] for line in told["events"] if line["event"] == "engine_request"}


def test_releases_and_resumes_are_recorded_with_their_tags(asked):
    """In the engine where it says what is moved."""
    engine, told = asked
    moves = [
        (line["event"], line["extra"]["tags"])
        for line in told["events"]
        if line["event"].startswith("memory_re")
    ]

    resumed = ["weights"] if engine == "vllm" else ["all"]
    assert [("memory_release", ["all"]), ("memory_resume", resumed)] == moves


def test_a_request_is_parked_from_the_abort_until_the_resume(asked):
    """And none after it."""
    _, told = asked
    pauses = [
        (line["event"], line.get("extra", {}).get("engine_request_id"))
        for line in told["events"]
        if line["event"] in ("engine_abort", "engine_parked", "engine_resume")
    ]

    assert [("engine_abort", None), ("engine_resume", None), ("engine_parked", "parked")] == pauses
