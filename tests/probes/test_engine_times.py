"""What an engine's answer says of a request's time: nothing is made up where it says nothing."""

from types import SimpleNamespace

import pytest

from verl_profiler.probes.engine import times_of


def fake_vllm_answer(**moments):
    """In the form of vLLM's `RequestOutput` with its `RequestStateStats` (vllm 0.27.1)."""
    stats = {"queued_ts": 0.0, "scheduled_ts": 0.0, "first_token_ts": 0.0, "last_token_ts": 0.0}
    return SimpleNamespace(num_cached_tokens=32, metrics=SimpleNamespace(**{**stats, **moments}))


CASES = {
    "vllm": (
        fake_vllm_answer(queued_ts=5.0, scheduled_ts=5.5, first_token_ts=6.0, last_token_ts=9.0),
        {"cached_tokens": 32, "queue_s": 0.5, "prefill_s": 0.5, "decode_s": 3.0},
    ),
    "vllm, aborted in its prefill": (
        fake_vllm_answer(queued_ts=5.0, scheduled_ts=5.5),
        {"cached_tokens": 32, "queue_s": 0.5},
    ),
    "sglang": (
        {
            "meta_info": {
                "cached_tokens": 8,
                "e2e_latency": 3.5,
                "queue_time": 0.0,
                "forward_entry_time": 10.0,
                "prefill_finished_time": 10.5,
                "request_finished_ts": 12.0,
            }
        },
        {"cached_tokens": 8, "e2e_s": 3.5, "queue_s": 0.0, "prefill_s": 0.5, "decode_s": 1.5},
    ),
    "sglang with retractions, data parallel, a cache on the host and drafts": (
        {
            "meta_info": {
                "cached_tokens": 96,
                "cached_tokens_details": {"device": 64, "host": 24, "storage": 8},
                "num_retractions": 2,
                "dp_rank": 0,
                "spec_num_proposed_drafts": 30,
                "spec_num_correct_drafts": 21,
            }
        },
        {
            "cached_tokens": 96,
            "cached_host_tokens": 32,
            "retractions": 2,
            "dp_rank": 0,
            "draft_tokens": 30,
            "accepted_draft_tokens": 21,
        },
    ),
    "vllm with preemptions and drafts": (
        fake_vllm_answer(
            num_preemptions=3,
            request_spec_decode_stats=SimpleNamespace(num_draft_tokens=9, num_accepted_tokens=4),
        ),
        {"cached_tokens": 32, "retractions": 3, "draft_tokens": 9, "accepted_draft_tokens": 4},
    ),
    "something else": (object(), {}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_reported_is_taken_over(case):
    """In seconds, under the same names for each engine."""
    answer, expected = CASES[case]

    assert expected == times_of(answer)
