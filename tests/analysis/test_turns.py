"""Turn times, by the index of the turn."""

import pytest

from verl_profiler.analysis.requests import turn_times


def test_turns_by_index(tables, conversation):
    """Turn 0 took 5 and 10 s, turn 1 took 2 and 4 s."""
    events = conversation("a") + conversation("b", scale=2.0)

    first, second = turn_times(tables(events))

    assert (0, 2, 15.0, 7.5, 10.0) == tuple(
        first[key] for key in ("turn", "turns", "total_s", "mean_s", "max_s")
    )
    assert (4.5, 3.0, 0.0) == (first["engine_s"], first["tool_s"], first["other_s"])
    assert (1, 3.0, 3.0, 0.0) == (
        second["turn"],
        second["mean_s"],
        second["engine_s"],
        second["tool_s"],
    )
    assert [15 / 21, 6 / 21] == pytest.approx([first["share"], second["share"]])
    assert (30 / 3 * 2, 10.0) == (first["response_tokens"], second["response_tokens"])


def test_an_unfinished_turn_is_counted_and_not_measured(tables, conversation, span):
    """A turn that was cut off by the end of the run would look short."""
    events = [*conversation(), span("engine_call", 0, 1, request_id="cut", turn=0)]

    first, _ = turn_times(tables(events))

    assert (1, 1, 5.0) == (first["turns"], first["unfinished"], first["mean_s"])
