"""What generate calls consist of, and how fast they returned tokens."""

from picked import picked

from verl_profiler.analysis.engine import (
    engine_parts,
    replica_token_rates,
)
from verl_profiler.reading.tables.tables import Tables


def call(duration_s, engine_s=None, parts=(None, None, None), *, step=1, validate=False, number=0):
    def us(value):
        return None if value is None else round(value * 1e6)

    return {
        "run": "r",
        "step": step,
        "name": "worker_0",
        "validate": validate,
        "request_id": f"q{number}",
        "begin_us": 0,
        "duration_us": us(duration_s),
        "engine_duration_us": us(engine_s),
        "queue_us": us(parts[0]),
        "prefill_us": us(parts[1]),
        "decode_us": us(parts[2]),
    }


def totals(rows):
    return {row["part"]: round(row["total_s"], 6) for row in rows}


def test_all_of_a_call_is_in_one_part():
    """Half a second inside the engine is in none of the parts that it reports."""
    tables = Tables.of({"engine_calls": [call(10, 9, (1, 2.5, 5))]})

    rows = engine_parts(tables)

    assert {"queue": 1, "prefill": 2.5, "decode": 5, "engine": 0.5, "outside": 1} == totals(rows)
    assert ["queue", "prefill", "decode", "engine", "outside"] == [row["part"] for row in rows]
    assert [0.1, 0.25, 0.5, 0.05, 0.1] == [round(row["share"], 9) for row in rows]


def test_engines_that_report_no_parts_have_none():
    """Queueing that nobody measured is not zero: it has no row."""
    tables = Tables.of({"engine_calls": [call(10, 9), call(3)]})

    assert {"engine": 9, "outside": 1, "unseen": 3} == totals(engine_parts(tables))


def test_the_step_is_the_callers(tables, span):
    """An engine that has the next weights already writes under the next step."""
    events = [
        span("engine_call", 0, 4, request_id="v", turn=0, validate=True, engine_request_id="e"),
        span(
            "engine_request", 1, 3, name="engine_0", step=2, request_id="v", engine_request_id="e"
        ),
    ]

    assert [] == engine_parts(tables(events))
    assert {(1, "engine", 2.0), (1, "outside", 2.0)} == {
        (row["step"], row["part"], row["total_s"])
        for row in engine_parts(tables(events), validate=True)
    }


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
