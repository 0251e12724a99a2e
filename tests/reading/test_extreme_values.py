"""Numbers beyond every type, and lines beyond every size: a problem, never a failure."""

import json

import pytest
from event_files import line, write_run

from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.schemas import SCHEMAS

HUGE = 9 * 10**18
REQUEST = {"request_id": "r1", "turn": 0}


def three(event, **extra):
    return [line(number, event, extra={**REQUEST, **extra}) for number in range(3)]


CASES = {
    "sums over 2^63": (
        three("engine_call", prompt_tokens=HUGE, cached_tokens=HUGE, response_tokens=HUGE),
        "`prompt_tokens` is out of range",
    ),
    "products over 2^63": (
        three("tq_put", size_bytes=HUGE, rows=HUGE, sampled=HUGE, func="f", call="c"),
        "`sampled` is out of range",
    ),
    "accounts over 2^63": (three("profiler_cost", events=HUGE, bytes=HUGE, dropped=HUGE), None),
    "seconds over 2^63": (three("engine_request", queue_s=1e300), "`queue_s` is out of range"),
    "309 digits": (three("request", reward=int("9" * 309)), "too large"),
    "309 digits of one's own": (three("request", own=int("9" * 309), reward=float("nan")), "NaN"),
    "length of 309 digits": ([line(1), line(2, duration_sec=int("9" * 309))], "too large"),
    "step of 309 digits": ([line(1), line(2, step=int("9" * 309))], "too large"),
    "turn of 309 digits": ([line(1), line(2, extra={"turn": int("9" * 309)})], "too large"),
    "overflow": ([line(1, "request").replace('"turn":0', '"reward":1e999')], "too large"),
    "NaN of one's own": (three("request", own=float("nan")), "NaN or Infinity is not JSON"),
    "turns up to 2^31": (three("turn", turn=(1 << 31) - 1), "`turn` is not a whole number"),
    "length of 1e400 as text": ([line(1), line(2, duration_sec="1e400")], "not a valid duration"),
    "text for a number": (three("engine_call", prompt_tokens="many"), "`prompt_tokens` is not a n"),
    "a list for a number": (three("engine_call", prompt_tokens=[1]), "`prompt_tokens` is not a n"),
    "NaN as text": (three("engine_call", prompt_tokens="NaN"), "`prompt_tokens` is out of range"),
    "1e400 as text": (three("engine_call", prompt_tokens="1e400"), "`prompt_tokens` is out of r"),
    "a number as text": (three("engine_call", prompt_tokens="12"), None),
    "15 MB": ([line(1), line(2, extra={"own": "x" * (15 << 20)}), line(3)], "2: longer than 1 MiB"),
}


def test_extreme_values_are_problems_and_no_failure(tmp_path, capsys):
    """Every table can be made; what else is in the files is there."""
    for number, (lines, _) in enumerate(CASES.values()):
        write_run(tmp_path, [*lines, line(999_999, "turn")], f"worker_{number}")

    with load(tmp_path) as run:
        for table in SCHEMAS:
            run.rows(f"SELECT * FROM {table}")
        last = run.rows(
            "SELECT name, arg_max(event, end_us) AS event FROM events GROUP BY name ORDER BY name"
        )
        extras = [json.loads(row["extra"]) for row in run.rows("SELECT extra FROM events")]
        problems = run.problems
    status = main(["summary", str(tmp_path), "--json"])

    assert ["turn"] * len(CASES) == [row["event"] for row in last]
    assert not any("cannot be read" in each for each in problems)
    for case, (_, problem) in CASES.items():
        assert problem is None or any(problem in each for each in problems), case
    assert json.loads(json.dumps(extras, allow_nan=False)) == extras
    assert 0 == status
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_tags_of_a_memory_release_that_are_no_list_are_unknown(tmp_path):
    """As text or as an object; the times and the bytes of the release are kept."""
    lines = [
        line(number, "memory_release", extra={"tags": tags, "used_before_bytes": 7})
        for number, tags in enumerate(("?x?", {"a": 1}, 3, ["weights", "kv_cache"]))
    ]
    write_run(tmp_path, lines)

    with load(tmp_path) as run:
        moves = run.rows("SELECT tags, used_before_bytes FROM memory_moves ORDER BY end_us")

    assert [7] * 4 == [row["used_before_bytes"] for row in moves]
    assert [None, None, None, "weights, kv_cache"] == [row["tags"] for row in moves]
