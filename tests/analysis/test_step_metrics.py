"""One number per step and metric."""

import pytest

from verl_profiler.analysis.compare.step_metrics import PER_EVENT, step_metrics

# So many values are needed; nothing at all still has a count and a total.
LEAST = {"p90": 10, "p95": 20, "p99": 100, "count": 0, "total": 0}


def test_what_occurs_once_and_what_occurs_often(tables, span, conversation):
    """The step and its phases have a value; requests and calls have statistics."""
    events = [
        span("step", 0, 14, name="trainer_0"),
        span("gen", 0, 11, name="trainer_0"),
        span("update_actor", 11, 13, name="trainer_0"),
        span("update_actor", 11, 12.5, name="actor_0"),
        *conversation("q"),
        *conversation("p", begin=1, scale=0.5),
    ]
    rows = {row["name"]: row for row in step_metrics(tables(events))}

    assert [14, 11, 2, 1] == [
        rows[name]["value"] for name in ("step", "gen", "update_actor", "unaccounted")
    ]
    assert (1.5, None) == (rows["workers:update_actor"]["mean"], rows["update_actor"]["mean"])
    assert [7.5, 7.5, 10, 15, 2] == [
        rows["request"][statistic] for statistic in ("mean", "p50", "max", "total", "count")
    ]
    assert (4, 1.5) == (rows["tool_call"]["count"], rows["tool_call:search"]["mean"])
    assert [60, 2, 2] == [
        rows[name]["value"] for name in ("generated_tokens", "turns_per_request", "requests")
    ]
    assert pytest.approx(60 / 14) == rows["generated_tokens_per_s"]["value"]
    assert 10 == rows["rollout"]["value"]
    # Of two requests there is no slowest fifth, and no 95th percentile.
    assert "tail_p80" not in rows
    assert [None, None] == [rows["request"][statistic] for statistic in ("p95", "p99")]


def test_every_row_has_a_value_or_statistics(rehearsed):
    """Of a real run, in a fixed order."""
    rows = step_metrics(rehearsed.tables)

    for row in rows:
        assert (row["value"] is None) == (row["count"] is not None)
        for statistic, least in {**dict.fromkeys(PER_EVENT, 1), **LEAST}.items():
            assert (row[statistic] is None) == (row["count"] is None or row["count"] < least)
    assert rows == sorted(rows, key=lambda row: (row["name"], row["step"]))
    assert {1, 2} == {row["step"] for row in rows}
