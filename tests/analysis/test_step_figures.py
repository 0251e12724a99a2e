"""One number per step and figure."""

import pytest

from verl_profiler.analysis.step_figures import PER_EVENT, step_figures


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
    rows = {row["name"]: row for row in step_figures(tables(events))}

    assert [14, 11, 2, 1] == [
        rows[name]["value"] for name in ("step", "gen", "update_actor", "unaccounted")
    ]
    assert (1.5, None) == (rows["workers:update_actor"]["mean"], rows["update_actor"]["mean"])
    assert [7.5, 7.5, 10, 15, 2] == [
        rows["request"][statistic] for statistic in ("mean", "p50", "max", "total", "count")
    ]
    assert (4, 1.5) == (rows["tool_call"]["count"], rows["tool_call:search"]["mean"])
    assert [60, 2, 2] == [
        rows[name]["value"] for name in ("response_tokens", "turns_per_request", "requests")
    ]
    assert pytest.approx(60 / 14) == rows["response_tokens_per_s"]["value"]
    assert (0, 10) == (rows["tail_p80"]["value"], rows["rollout"]["value"])


def test_steps_without_end_and_validation_are_left_out(tables, span, conversation):
    """Half a step is no step to compare."""
    events = [
        span("step", 0, 14, name="trainer_0"),
        *conversation("q"),
        *conversation("v", validate=True),
        *conversation("r", step=2),
    ]
    rows = step_figures(tables(events))

    assert {1} == {row["step"] for row in rows}
    assert {1} == {row["count"] for row in rows if row["name"] == "request"}
    assert [] == step_figures(tables(events), (2, 2))


def test_every_row_has_a_value_or_statistics(rehearsed):
    """Of a real run, in a fixed order."""
    rows = step_figures(rehearsed.tables)

    for row in rows:
        assert (row["value"] is None) != any(row[statistic] is None for statistic in PER_EVENT)
    assert rows == sorted(rows, key=lambda row: (row["name"], row["step"]))
    assert {1, 2} == {row["step"] for row in rows}
