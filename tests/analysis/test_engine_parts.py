"""Engine parts: what the engine reports, what it does not, and what is not the engine."""

from verl_profiler.analysis.engine import engine_parts
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
