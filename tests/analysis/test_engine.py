"""What generate calls consist of, and how fast they returned tokens."""

from picked import picked

from verl_profiler.analysis.engine import (
    replica_token_rates,
)


def events(span):
    """Two replicas: one serves 100 tokens in 0 to 4 s and 2 to 6 s, one 30 in 0 to 2 s."""
    calls = (("a", 0, 4, 40, "one"), ("b", 2, 6, 60, "one"), ("c", 0, 2, 30, "two"))
    return [
        span("step", 0, 10, name="trainer_0"),
        *(
            each
            for request_id, begin, end, tokens, server in calls
            for each in (
                span(
                    "engine_call",
                    begin,
                    end,
                    request_id=request_id,
                    turn=0,
                    engine_request_id=request_id,
                    prompt_tokens=5,
                    response_tokens=tokens,
                    server=server,
                ),
                span("request", begin, end, request_id=request_id, response_tokens=tokens),
            )
        ),
    ]


def test_a_replicas_rate_is_by_the_time_in_which_it_worked(span, tables):
    """Overlapping calls count once in its time."""
    one, two = replica_token_rates(tables(events(span)))

    assert ("one", 6.0, 100 / 6, 12.5) == picked(
        one, "replica busy_s engine_tokens_per_s call_tokens_per_s"
    )
    assert ("two", 2.0, 15.0) == (two["replica"], two["busy_s"], two["engine_tokens_per_s"])


def test_what_the_request_says_is_taken_before_what_its_calls_returned(span, tables):
    """verl cuts long responses after generation; older runs have the calls only."""

    def made(**more):
        who = {"request_id": "a", "name": "worker_0"}
        events = [
            span("request", 0, 4, **{"response_tokens": 10, **who, **more}),
            span("engine_call", 0, 2, turn=0, engine_request_id="a", response_tokens=9, **who),
        ]
        (row,) = tables(events).rows("SELECT generated_tokens, tool_tokens FROM requests")
        return tuple(row.values())

    assert (7, 3) == made(generated_tokens=7, tool_tokens=3)
    assert (9, 1) == made()
    # Cut to less than was generated: how much of it is a tool's is not known.
    assert (9, None) == made(response_tokens=5)
